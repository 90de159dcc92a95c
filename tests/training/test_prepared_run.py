"""What `cqwen prepare` says of the data; a run that finds it prepared uses it."""

import json
import re
from pathlib import Path

from support.runs import cqwen_forked, train_run, write_config


def test_prepare_describes_the_data_and_a_run_uses_it(tmp_path: Path) -> None:
    config = write_config(tmp_path, data__cache_dir=str(tmp_path / "cache"), data__pack=True)
    done = cqwen_forked("prepare", config, "--json", "--workers", 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    folder = Path(found["folder"])
    assert {"summary.json", "train.arrow"} <= {path.name for path in folder.iterdir()}
    train = found["train"]
    assert train["texts"] == 32
    median, _, most = train["text_lengths"]
    assert 0 < median <= most < train["tokens"]
    assert train["numbers"] > 0
    assert 0 < train["tokens_per_sequence"] <= 1
    assert re.match(r"\[\[.*(costs <NUM -?\d+(\.\d+)?>|we have).*\.<\|endoftext\|>\]\]$", found["first_text"])
    stamp = (folder / "train.arrow").stat().st_mtime_ns
    train_run(config)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name != "contents"] == [folder]
    assert (folder / "train.arrow").stat().st_mtime_ns == stamp
