"""Blocks and workers: the same folder from any number of processes, errors at their line, a killed worker told."""

import csv
import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.config.errors import BadLine
from cqwen_dist.data import blocks as cutting
from cqwen_dist.data.blocks import Row, blocks
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.chunk import encode_blocks
from cqwen_dist.data.prepare import prepare, read_manifest, recipe_of
from cqwen_dist.data.records import Extractor, Text
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cqwen_dist.data.blocks.BLOCK", 3000)
    monkeypatch.setattr("cqwen_dist.data.blocks._ROWS", 30)
    monkeypatch.setattr("cqwen_dist.data.sources.CHUNK", 40)
    monkeypatch.setattr("cqwen_dist.data.chunk._WORTH", 2)


BAD = [b"{broken\n", b"\n", b'{"text": "\xff"}\n', b'{"text": " "}\n', b'{"text": "beyond 1e999 and 7"}\n']


def _corpus(folder: Path) -> dict[str, Path]:
    """300 texts, some twice, as every kind of file that is cut in a way of its own; bad lines where lines are."""
    texts = [*diabetes_texts("train")[:250], *diabetes_texts("train")[:50]]
    rows = [{"text": text, "n": i} for i, text in enumerate(texts)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    for i, bad in enumerate(BAD * 4):
        lines.insert(13 * i, bad)
    lines.insert(100, b'{"text": "' + b"x" * 17_000_000 + b'"}\n')
    paths = {ending: folder / f"a.{ending}" for ending in ("jsonl", "jsonl.gz", "csv", "txt", "parquet", "json")}
    paths["jsonl"].write_bytes(b"".join(lines))
    paths["jsonl.gz"].write_bytes(gzip.compress(b"".join(lines))[:-40])  # ends too early
    paths["json"].write_text(json.dumps(rows, indent=0))
    paths["txt"].write_text("\n".join(texts))
    pa.parquet.write_table(pa.Table.from_pylist(rows), paths["parquet"], row_group_size=70)
    with paths["csv"].open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "n"], delimiter=";")
        writer.writeheader()
        writer.writerows(rows)
        file.write("one cell\r\n")
    return paths


@pytest.mark.slow
def test_any_number_of_workers_prepares_the_same_bytes(tmp_path, tokenizer, small_blocks) -> None:
    paths = {name: str(path) for name, path in _corpus(tmp_path).items()}
    every: dict[str, Any] = {"train": list(paths.values()), "on_bad_line": "skip"}
    cases = [
        (every | {"train": str(tmp_path / "a.*"), "eval_fraction": 0.1}, (3,)),
        (every | {"prompt_template": "{n}: ", "train": paths["parquet"], "eval": paths["csv"]}, (2,)),
        (every | {"train": every["train"][:2], "limit": 380}, (2,)),
    ]
    for i, (case, several) in enumerate(cases):
        found = []
        for workers in (1, *several):
            config = DataConfig(**case, cache_dir=str(tmp_path / f"{i}-{workers}"))
            folder = prepare(config, tokenizer, workers=workers)
            manifest = read_manifest(folder)
            manifest.pop("seconds")
            arrays = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
            found.append((folder.name, manifest, arrays))
        assert all(other == found[0] for other in found[1:])
        assert pa.ipc.open_stream(found[0][2]["train.arrow"]).read_all().num_rows > 30
    reading = read_manifest(prepare(DataConfig(**cases[0][0], cache_dir=str(tmp_path / "0-1")), tokenizer))["reading"]
    # Two JSONL files with all the bad lines (but not those behind the compressed one's early end), and a table's row.
    assert reading["skipped"].keys() == {
        "broken JSON", "not UTF-8", "empty text", "text too long", "broken gzip", "wrong number of cells"
    }  # fmt: skip
    assert reading["first"]["text too long"] == f"{paths['jsonl']}:101"


def test_blocks_contain_whole_lines_with_their_position(tmp_path: Path, small_blocks: None) -> None:
    paths = _corpus(tmp_path)
    config = DataConfig(train="a")
    for name, path in paths.items():
        cut = list(blocks(str(path), config, "data.train"))
        rows: list[Row] = [row for block in cut for row in block]
        assert len(cut) > 3, name
        assert all(1 <= len(block) <= 100 for block in cut)
        places = [int(where.rsplit(":", 1)[1]) for where, _ in rows]
        assert places == sorted(set(places)), name
        good = [record for _, record in rows if not isinstance(record, BadLine)]
        assert len(good) >= 250, name
    lines = paths["jsonl"].read_bytes().split(b"\n")
    for where, record in (row for block in blocks(str(paths["jsonl"]), config, "") for row in block):
        line = lines[int(where.rsplit(":", 1)[1]) - 1]
        if isinstance(record, dict):
            assert json.loads(line)["text"] == record["text"]
        else:
            assert isinstance(record, BadLine)
            assert line in [bad.rstrip(b"\n") for bad in BAD] or len(line) > 2097


def test_an_error_in_a_worker_names_file_and_line(tmp_path, tokenizer, small_blocks) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in diabetes_texts("train")[:200]]
    path.write_text("".join([*lines[:150], '{"text": [5]}\n', *lines[150:], "{\n"]))
    for workers in (1, 2):
        with pytest.raises(UserError) as error:
            prepare(DataConfig(train=str(path), cache_dir=str(tmp_path / "cache")), tokenizer, workers=workers)
        assert str(error.value).startswith(f"{path}:151: wrong type: found")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name != "contents"] == []


class Killed(Extractor):
    def __call__(self, *_: object) -> Text:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.slow
def test_a_killed_worker_is_one_line(tokenizer: NumericalAwareTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cqwen_dist.data.chunk._WORTH", 1)
    config, block = DataConfig(train="a"), [("a:1", {"text": "a"})]
    with pytest.raises(UserError, match="workers: found no living process: one was killed"):
        list(encode_blocks(iter([block]), Killed(config, Chat()), recipe_of(tokenizer, config), 2))


def test_rows_of_any_size_make_blocks_of_limited_size() -> None:
    long: list[Row] = [(str(i), {"messages": [{"content": "x" * 400_000}]}) for i in range(7)]
    assert [*map(len, cutting.in_blocks(map(cutting._sized, long), 1000, cutting.BLOCK))] == [3, 3, 1]
