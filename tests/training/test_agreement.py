"""Ranks whose config, data, weights or code differ are refused on every rank, by key, rank and host."""

import json
import platform
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.runs import as_rank, metrics, write_config, write_texts

import cqwen_dist.training.inputs as inputs
from cqwen_dist.config import Config, LossConfig, UserError, load_config
from cqwen_dist.config.reading import given_config
from cqwen_dist.parallel.collectives import agree
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.run.status import read_status
from cqwen_dist.training.frequency import BANDS, band_of, class_weights, mean_thresholds
from cqwen_dist.training.inputs import config_facts
from cqwen_dist.training.train import train_on

HOST = platform.node()


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def _compare(configs: list[dict[str, Any]]) -> str:
    config = Config.model_validate(configs[dist.get_rank()])
    return _refusal(lambda: agree(lambda: (None, config_facts(config))))


OTHER = [  # of every section
    ("model.lora.r", 3),
    ("data.sequence_length", 47),
    ("loss.reg_weight", 1 + 1e-6),
    ("stages.1.lr", 0.02),
    ("train.seed", 1),
    ("parallel.zero_stage", 2),
    ("run.name", "x"),
]


def test_another_value_of_any_key_is_refused_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    world, config = 3, load_config(write_config(tmp_path))
    assert {key.partition(".")[0] for key, _ in OTHER} == {*Config.model_fields} - {"start", "deepspeed"}
    for number, (key, value) in enumerate(OTHER):
        one, changed = number % world, given_config(config, {key: value})
        given = [(changed if rank == one else config).model_dump(mode="json") for rank in range(world)]
        said = pool(_compare, world, given)
        assert len(set(said)) == 1, "the same line on every rank"
        # rank 0 is what the others are compared with, so its own difference is told as that of rank 1
        assert f"rank {one or 1} ({HOST})" in said[0]
        assert key in said[0], said[0]
    assert pool(_compare, world, [config.model_dump(mode="json")] * world) == [""] * world


def _two_copies(tmp_path: Path, **overrides: Any) -> tuple[Path, Path]:
    """Two config files with one content, and data of their own at a path that each rank resolves by itself."""
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
        write_config(folder, data__train="texts.jsonl", run__dir=str(tmp_path / "run"), **overrides)
    return first, second


def _train_apart(folders: list[str], overrides: list[str]) -> str:
    """`train_on` in this rank's own working directory, as if each host had a disk of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folders[dist.get_rank()])
        return _refusal(lambda: train_on(load_config("config.yaml", overrides), as_rank()))


@pytest.mark.parametrize("how", ["equal length", "missing"])
def test_other_texts_on_one_rank_are_refused(pool: Any, tmp_path: Path, how: str) -> None:
    first, second = _two_copies(tmp_path)
    if how == "missing":
        (second / "texts.jsonl").unlink()
    else:
        text = (second / "texts.jsonl").read_text()
        (second / "texts.jsonl").write_text(text.translate(str.maketrans("123456789", "234567891")))
    said = pool(_train_apart, 2, [str(first), str(second)], [])
    assert len(set(said)) == 1
    assert "data.train" in said[0]
    assert f"rank 1 on {HOST}" in said[0] if how == "missing" else f"rank 1 ({HOST})" in said[0]
    assert read_status(tmp_path / "run")["status"] == "fatal", "so that SLURM does not requeue it"
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step was taken"


def test_other_watched_texts_are_refused(pool: Any, tmp_path: Path) -> None:
    first, second = _two_copies(tmp_path, data__watch={"kept": "kept.jsonl"})
    for n, folder in enumerate((first, second)):
        write_texts(folder / "kept.jsonl", 6, seed=n)
    said = pool(_train_apart, 2, [str(first), str(second)], [])
    assert said[0].startswith("data.watch.kept: ")


def test_other_code_or_another_version_is_refused(pool: Any, tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    for what in ("versions", "source_of"):
        said = pool(_compare_with_other, 2, config, what)
        assert len(set(said)) == 1
        assert said[0].startswith({"versions": "package torch", "source_of": "model.abduction (code)"}[what])


def _compare_with_other(config: str, what: str) -> str:
    other = {"versions": lambda: {"torch": f"2.{dist.get_rank()}"}, "source_of": _own_source}[what]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, what, other)
        return _refusal(lambda: agree(lambda: (None, config_facts(load_config(config)))))


def _own_source(value: str | None) -> Path:
    return Path(json.__file__ if dist.get_rank() else random.__file__)


def test_a_stale_checkpoint_is_refused_when_a_run_resumes(pool: Any, two_ranks: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        shutil.copytree(two_ranks.parent, folder)
    manifest = second / "run" / (second / "run" / "latest").read_text().strip() / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    given = ["run.dir=run", "data.train=texts.jsonl"]
    said = pool(_train_apart, 2, [str(first), str(second)], given)
    assert said[0].startswith("run.resume: ")
    assert f"rank 1 ({HOST})" in said[0]


def _fail_on_last(world: int) -> str:
    def read() -> tuple[None, dict[str, str]]:
        if dist.get_rank() == world - 1:
            raise PermissionError(13, "Permission denied", "/locked")
        return None, {"data.train": "x"}

    return _refusal(lambda: agree(read))


def test_a_rank_that_cannot_read_ends_all_of_them(pool: Any) -> None:
    said = pool(_fail_on_last, 3, 3)
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank 2 on {HOST}: inputs: ")
    assert "Permission denied" in said[0]


COUNTS = np.array([0, 1, 4, 16, 64, 0, 1])


def test_class_weights_fall_with_the_count_and_average_one() -> None:
    weights = class_weights(LossConfig(class_weights="frequency"), COUNTS, 0, 7, 7)
    assert weights is not None
    ratios = weights[[1, 2, 3, 4, 6]] / weights[4]
    assert ratios.tolist() == pytest.approx([8, 4, 2, 1, 8])
    assert float((weights * torch.from_numpy(COUNTS)).sum() / COUNTS.sum()) == pytest.approx(1.0)
    assert weights[[0, 5]].tolist() == [1, 1], "words that never occur are only ever negatives"


def test_class_weights_are_limited() -> None:
    weights = class_weights(LossConfig(class_weights="frequency"), np.array([1, 10**6, 10**9]), 0, 3, 3)
    assert weights is not None
    assert float(weights.max()) == 10.0
    assert float(weights.min()) >= 0.1


def test_a_rank_gets_its_rows_weights_and_named_words_override() -> None:
    loss = LossConfig(class_weights={2: 3.0, 5: 0.0})
    whole, part = class_weights(loss, COUNTS, 0, 7, 7), class_weights(loss, COUNTS, 4, 3, 7)
    assert whole is not None
    assert part is not None
    assert whole.tolist() == [1, 1, 3, 1, 1, 0, 1]
    assert part.tolist() == whole[4:].tolist()
    assert class_weights(LossConfig(), COUNTS, 0, 7, 7) is None
    with pytest.raises(UserError, match=r"loss\.class_weights\.7"):
        class_weights(LossConfig(class_weights={7: 1.0}), COUNTS, 0, 7, 7)


def banded(size: int) -> dict[str, float]:
    """Bands of 12,345 words whose threshold is their rank, spread over a vocabulary group."""
    counts = np.random.RandomState(0).permutation(12_345)
    groups = build_groups(size)
    start, stop = vocab_range(len(counts), groups.vocab_rank, size)
    ranks = torch.from_numpy(len(counts) - 1 - counts).float()  # the most frequent word has rank 0
    return mean_thresholds(ranks[start:stop], torch.from_numpy(band_of(counts)[start:stop]), groups)


def test_frequency_bands_do_not_depend_on_the_ranks() -> None:
    alone, spread = run_ranks(banded, 1, 1)[0], run_ranks(banded, 2, 2)
    edges = (0, *BANDS, 12_344)
    expected = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    names = ["1_100", "101_1000", "1001_10000", "10001_up"]
    assert [alone[f"dist/C_words_{name}"] for name in names] == pytest.approx(expected)
    assert alone["dist/C_words_unseen"] == 12_344, "one word has count 0"
    assert spread[0] == pytest.approx(alone)
    assert spread[1] == pytest.approx(alone)


def test_a_run_logs_frequency_bands_with_its_evaluations(two_ranks: Path) -> None:
    evaluated = [record for record in metrics(two_ranks) if "eval/accuracy" in record]
    assert evaluated
    assert all("dist/C_words_1_100" in record and "dist/C_words_unseen" in record for record in evaluated)
