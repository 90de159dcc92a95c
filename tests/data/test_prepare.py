"""Prepared data: the same samples as in memory, made once, whole or not at all."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from support.ranks import run_ranks

from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data import load
from cqwen_dist.data.dataset import TextDataset
from cqwen_dist.data.load import Datasets, load_datasets, open_prepared
from cqwen_dist.data.prepare import prepare
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """300 texts: plain, long, without numbers, twice."""
    texts = [
        *diabetes_texts("train")[:240],
        *(f"short {i}" for i in range(40)),
        "no number",
        " ".join(diabetes_texts("test")[:9]),
        *diabetes_texts("train")[:18],
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)), encoding="utf-8"
    )
    return str(path)


def _samples(dataset: TextDataset | None) -> list[Any]:
    assert dataset is not None
    return [
        [[None if a is None else a.tolist() for a in document] for document in dataset[i]] for i in range(len(dataset))
    ]


def _both(corpus: str, folder: Path, tokenizer: NumericalAwareTokenizer, **config: Any) -> tuple[Datasets, Datasets]:
    plain = DataConfig(train=corpus, **config)
    return load_datasets(plain, tokenizer), load_datasets(
        plain.model_copy(update={"cache_dir": str(folder)}), tokenizer
    )


@pytest.mark.parametrize(
    "config",
    [
        {"sequence_length": 64},
        {"sequence_length": 200, "pack": True, "eval_fraction": 0.1},
        {"sequence_length": 80, "pack": True, "eval_fraction": 0.1, "long_texts": "truncate"},
        {"sequence_length": 80, "eval_fraction": 0.1, "long_texts": "drop"},
        {"sequence_length": 200, "pack": True, "eval": "bundled:diabetes/test"},
        {"sequence_length": 100, "eval": "bundled:diabetes/test", "numeric_targets": "last", "prompt_template": "{n}:"},
        {"eval_fraction": 0.2, "limit": 290},
    ],
)
def test_prepared_samples_equal_samples_in_memory(corpus, tmp_path, tokenizer, config) -> None:
    memory, mapped = _both(corpus, tmp_path / "cache", tokenizer, **config)
    assert _samples(mapped.train) == _samples(memory.train)
    assert mapped.train.report == memory.train.report
    assert mapped.reading == memory.reading
    assert mapped.train.digest() == memory.train.digest(), "a run may go on with data.cache_dir, or without"
    assert (mapped.eval is None) == (memory.eval is None)
    if mapped.eval is not None and memory.eval is not None:
        assert _samples(mapped.eval) == _samples(memory.eval)
        assert mapped.eval.report.targets == memory.eval.report.targets
        assert mapped.eval.digest() == memory.eval.digest() != mapped.train.digest()
    assert mapped.train.statistics() == memory.train.statistics()
    assert mapped.train.word_counts(401).tolist() == memory.train.word_counts(401).tolist()
    assert mapped.train.lengths().tolist() == [
        sum(len(d.ids) for d in mapped.train[i]) for i in range(len(mapped.train))
    ]
    longer, other = memory.train.with_length(150), mapped.train.with_length(150)
    assert _samples(other) == _samples(longer)
    assert other.digest() != mapped.train.digest()
    again = load_datasets(DataConfig(train=corpus, cache_dir=str(tmp_path / "cache"), **config), tokenizer)
    assert again.train.digest() == mapped.train.digest()


def test_held_out_texts_that_are_training_texts_too_are_counted_and_told(tmp_path, tokenizer) -> None:
    (tmp_path / "train.txt").write_text("".join(f"text {i}\n" for i in range(1500)))
    (tmp_path / "eval.txt").write_text("text 1\ntext 01\ntext 1499\ntext 1500\ntext 1\n")
    for data in _both(str(tmp_path / "train.txt"), tmp_path / "cache", tokenizer, eval=str(tmp_path / "eval.txt")):
        assert data.eval is not None
        assert data.eval.report.learnt_too == 3
        assert any("eval: 3 of 5 texts are in data.train too" in line for line in data.lines())
    for data in _both(str(tmp_path / "train.txt"), tmp_path / "cache", tokenizer, eval_fraction=0.01):
        assert data.eval is not None
        assert data.eval.report.learnt_too == 0


def test_the_cache_key_depends_on_contents_and_settings_that_change_tokens(corpus, tmp_path, tokenizer) -> None:
    config = DataConfig(train=corpus, cache_dir=str(tmp_path / "cache"))
    first = prepare(config, tokenizer)
    stamp = (first / "train.arrow").stat().st_mtime_ns
    cut = {"sequence_length": 7, "long_texts": "truncate", "pack": True}
    assert prepare(config.model_copy(update=cut), tokenizer, workers=1) == first
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(corpus).read_bytes())
    assert prepare(config.model_copy(update={"train": str(moved)}), tokenizer) == first
    assert (first / "train.arrow").stat().st_mtime_ns == stamp
    others = {first}
    moved.write_bytes(Path(corpus).read_bytes() + b'{"text": "more"}\n')
    others.add(prepare(config.model_copy(update={"train": str(moved)}), tokenizer))
    both = config.model_copy(update={"train": str(tmp_path / "*.jsonl")})
    of_both = prepare(both, tokenizer)
    assert prepare(both, tokenizer) == of_both
    (tmp_path / "corpus.jsonl").rename(tmp_path / "a corpus.jsonl")
    assert prepare(both, tokenizer) == of_both, "contents count, not names"
    (tmp_path / "a corpus.jsonl").rename(tmp_path / "z corpus.jsonl")
    others |= {of_both, prepare(both, tokenizer)}  # the order counts
    (tmp_path / "z corpus.jsonl").rename(corpus)
    others.add(prepare(config.model_copy(update={"numeric_targets": "last"}), tokenizer))
    others.add(prepare(config, NumericalAwareTokenizer(train_tokenizer(diabetes_texts("train"), 300))))
    assert len(others) == 6
    assert set(json.loads((first / "manifest.json").read_text())["files"]) == {"train.arrow"}


def test_float64_values_are_stored_exactly_and_datasets_opens_the_file(tmp_path, tokenizer) -> None:
    values = [0.1, 1 / 3, 1e300, 5e-324, -2.5, 9007199254740993.0, 123456.789, -0.0, 1e22]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": " , ".join(repr(v) for v in values)}) + "\n")
    folder = prepare(DataConfig(train=str(path), cache_dir=str(tmp_path / "cache")), tokenizer)
    table = datasets.Dataset.from_file(str(folder / "train.arrow"))
    assert [repr(v) for v in table[0]["numbers"]] == [repr(v) for v in values]
    assert table[0]["ids"].count(tokenizer.num_token_id) == len(values)


def test_partial_folders_are_removed_and_a_damaged_folder_is_an_error(corpus, tmp_path, tokenizer) -> None:
    config = DataConfig(train=corpus, cache_dir=str(tmp_path / "cache"))
    folder = prepare(config, tokenizer)
    left = folder.with_name(f".{folder.name}.0123abcd.partial")
    left.mkdir()
    (left / "train.arrow").write_bytes(b"half")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert prepare(config, tokenizer) == folder
    assert not left.exists()
    data = (folder / "train.arrow").read_bytes()
    (folder / "train.arrow").write_bytes(data[:-5])
    with pytest.raises(UserError, match=r"prepared data: found 'train.arrow of another size', allowed: a whole folder"):
        open_prepared(prepare(config, tokenizer), config, tokenizer)


def test_an_unwritable_cache_is_an_error(corpus: str, tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir: found .*file/cache', allowed: a folder to write to"):
        prepare(DataConfig(train=corpus, cache_dir=str(tmp_path / "file" / "cache")), tokenizer)


def _bad(folder: Path) -> dict[str, tuple[Path, dict[str, Any], str]]:
    """Bad input by name: the file, the config, what is told."""
    good = "".join(f'{{"text": "good {i}"}}\n' for i in range(50)).encode()
    cut = gzip.compress(good * 50)
    files = {
        "truncated gzip": ("a.jsonl.gz", cut[: len(cut) // 2], {}, "broken gzip: found no whole file"),
        "no gzip": ("b.jsonl.gz", good, {}, "broken gzip"),
        "a line of 50 MB": ("e.jsonl", good + b'{"text": "' + b"x" * 50_000_000 + b'"}\n' + good, {}, "text too long"),
        "a row of other cells": ("h.csv", b"text,n\na,1\nb\n", {}, ":3: wrong number of cells: found 1, allowed: 2"),
        "a quote without end": ("i.csv", b'text\ngood\n"a', {}, "broken CSV"),
        "no Parquet": ("j.parquet", b"PAR1 not", {}, "broken Parquet"),
    }
    found = {}
    for name, (file, data, config, told) in files.items():
        (folder / file).write_bytes(data)
        found[name] = (folder / file, config, told)
    return found


BAD = ("truncated gzip", "no gzip", "a line of 50 MB", "a row of other cells", "a quote without end", "no Parquet")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_or_a_counted_skip_and_leaves_no_folder(name, tmp_path, tokenizer) -> None:
    path, extra, told = _bad(tmp_path)[name]
    cache = tmp_path / "cache"
    config = DataConfig(train=str(path), cache_dir=str(cache), **extra)
    with pytest.raises(UserError) as error:
        load_datasets(config, tokenizer)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert [path for path in cache.iterdir() if path.is_dir() and path.name != "contents"] == []
    skipping = config.model_copy(update={"on_bad_line": "skip"})
    if name in ("no Parquet", "no gzip"):  # then nothing is left
        with pytest.raises(UserError, match=r"data\.train: found no usable text"):
            load_datasets(skipping, tokenizer)
        return
    found = load_datasets(skipping, tokenizer)
    assert found.train.report.texts >= 1
    assert found.lines()[0].startswith("skipped: 1 x ")


def test_prepares_empty_files_and_data_without_or_with_equal_numbers(tmp_path, tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    config = DataConfig(train=str(path), cache_dir=str(tmp_path / "cache"))
    for ending in (".jsonl", ".csv", ".txt", ".jsonl.gz"):
        empty = tmp_path / f"empty{ending}"
        empty.write_bytes(gzip.compress(b"") if ending.endswith("gz") else b"")
        with pytest.raises(UserError, match=r"data\.train: found no usable text"):
            load_datasets(config.model_copy(update={"train": str(empty)}), tokenizer)
    path.write_text('{"text": "no number"}\n{"text": "none"}\n')
    none = load_datasets(config, tokenizer).train
    assert (none.report.numbers, none.statistics().count, none.statistics().scale) == (0, 0, 1.0)
    path.write_text('{"text": "a 7 b 7"}\n' * 9)
    equal = load_datasets(config, tokenizer).train.statistics()
    assert (equal.median, equal.scale, equal.count) == (7.0, 1.0, 18)


def _load(corpus: str, tokenizer: str, cache: str) -> tuple[str, Any, int]:
    import torch.distributed as dist

    from cqwen_dist.parallel.collectives import from_main_rank, main_rank_first

    config = DataConfig(train=corpus, cache_dir=f"{cache}-{dist.get_rank() % 2}")  # rank 1 has a disk of its own
    found = load_datasets(config, NumericalAwareTokenizer.from_pretrained(tokenizer), main_rank_first)
    return found.train.digest(), from_main_rank(found.train.statistics), found.train.report.targets


def _prepare(corpus: str, tokenizer: str, cache: str) -> str:
    return str(prepare(DataConfig(train=corpus, cache_dir=cache), NumericalAwareTokenizer.from_pretrained(tokenizer)))


def test_two_processes_prepare_one_folder(corpus: str, tmp_path: Path, tokenizer: NumericalAwareTokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    one, other = run_ranks(_prepare, 2, corpus, str(tmp_path / "tokenizer"), str(tmp_path / "cache"))
    whole = [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name != "contents"]
    assert [str(path) for path in whole] == [one] == [other]


def test_ranks_on_one_disk_share_the_folder_and_the_statistics(corpus, tmp_path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = run_ranks(_load, 3, corpus, str(tmp_path / "tokenizer"), str(tmp_path / "cache"))
    assert found[0] == found[1] == found[2]
    whole = load_datasets(DataConfig(train=corpus), tokenizer).train
    assert found[0][1] == whole.statistics()


def test_large_files_are_prepared_and_small_ones_are_not(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load.is_prepared(DataConfig(train=corpus, eval="bundled:diabetes/test"))
    monkeypatch.setattr(load, "IN_MEMORY", 100)
    assert load.is_prepared(DataConfig(train=corpus))
    assert load.is_prepared(DataConfig(train=corpus.replace("corpus.", "co*.")))
    assert load.is_prepared(DataConfig(train="hf:openai/gsm8k/main"))
    assert not np.any([load.is_prepared(DataConfig(train="bundled:diabetes"))])
