"""The texts of the comparison. A text's SHA-256 alone decides whether it is held out.

words    the user's JSONL (GSM8K's question and answer, or a field `text`): one part is trained on, one is held out
prose    English of Python's own language reference (`pydoc_data.topics`): held out only
code     functions of Python's standard library, without docstrings or comments: held out only

Every text has a `prompt`: the part whose numbers are given, such as a problem's question. It may be empty.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts

HELD_OUT = ("words", "prose", "code")
LONGEST_FUNCTION, SHORTEST_FUNCTION = 1200, 120  # characters
LONGEST_PIECE, SHORTEST_PIECE = 600, 300  # characters of a piece of prose or code; 600 are some 130 tokens
NOT_READ = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
FEWEST = 8  # texts of each part


class Item(NamedTuple):
    """A text and its part whose numbers are given."""

    text: str
    prompt: str


def write_corpora(folder: Path, data: str, texts: int, held_out: int, problems: int, pieces: int) -> dict[str, int]:
    """Write train.jsonl, and NAME.jsonl for each name of HELD_OUT. Files of an earlier equal call are kept.

    The first `held_out` texts of the user are held out, the next `texts` are trained on. At most `problems` held-out
    texts of the user, and `pieces` of prose and of code, are measured. Returns the number of texts of each file.
    Raises `UserError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked, note = [data, texts, held_out, problems, pieces], folder / "counts.json"
    if note.is_file():
        before = json.loads(note.read_text(encoding="utf-8"))
        if before["asked"] == asked:
            return dict(before["counts"])
    words, code = _ordered(_user_texts(data)), _ordered(_functions())[:held_out]
    shortest = min(SHORTEST_PIECE, max(len(item.text) for item in code))
    parts = {
        "train": words[held_out : held_out + texts],
        "words": words[: min(held_out, problems)],
        "prose": _ordered(_prose())[:pieces],
        "code": [Item(_cut(item.text), "") for item in code if len(item.text) >= shortest][:pieces],
    }
    counts = {name: len(items) for name, items in parts.items()}
    if min(counts["train"], counts["words"]) < FEWEST:
        found = Said(f"{counts['train']} texts to train on, {counts['words']} held out")
        raise UserError("--data", found, f"{FEWEST} or more of each")
    for name, items in parts.items():
        lines = [json.dumps(item._asdict()) + "\n" for item in items]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    note.write_text(json.dumps({"asked": asked, "counts": counts}), encoding="utf-8")
    return counts


def read_items(path: Path) -> list[Item]:
    """Read a file of `write_corpora`."""
    return [Item(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _user_texts(source: str) -> Iterable[Item]:
    """A JSONL file of `question` and `answer`, or of `text`. Raises `UserError`."""

    def read(template: str | None) -> Iterator[str]:
        config = DataConfig(train=source, text_template=template)
        return (text.text for text in read_texts(source, config, ReadReport(), "--data"))

    path = Path(source).expanduser()
    first = ""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "")
    if '"question"' in first and '"answer"' in first:
        return (Item(*pair) for pair in zip(read("{question}\n{answer}"), read("{question}\n"), strict=True))
    return (Item(text, "") for text in read(None))


def _ordered(items: Iterable[Item]) -> list[Item]:
    """Sorted by SHA-256, without duplicates."""
    return sorted(set(items), key=lambda item: hashlib.sha256(item.text.encode()).digest())


def _prose() -> Iterator[Item]:
    """Pieces of running English, one per topic."""
    from pydoc_data.topics import topics

    for text in topics.values():
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if p[:1].isalpha() and "::" not in p]
        piece = _cut(" ".join(p for p in paragraphs if p.endswith(".")))
        if len(piece) >= SHORTEST_PIECE:
            yield Item(piece, "")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PIECE else text[: LONGEST_PIECE + 1].rsplit(None, 1)[0]


def _functions() -> Iterator[Item]:
    """Functions of this machine's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if NOT_READ & set(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:] or [ast.Pass()]
                text = ast.unparse(node)
                if SHORTEST_FUNCTION <= len(text) <= LONGEST_FUNCTION:
                    yield Item(text, "")
