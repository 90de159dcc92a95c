"""`python -m benchmarks loss`: what it reports, and the promises about memory that it measures."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.runs import cqwen_forked, write_config, write_texts

from benchmarks import data
from benchmarks.loss import run
from cqwen_dist.config import DataConfig
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


def test_reports_every_contender_or_why_not():
    result = run(tokens=8, hidden=16, vocab=500, rounds=2)
    names = {row["name"] for row in result["rows"]}
    assert {"floor", "this", "seed", "stable", "softmax"} <= names
    assert names | result["skipped"].keys() >= {"liger", "cce", "triton", "chunked"}
    floor = result["rows"][0]
    assert floor["name"] == "floor"
    assert floor["ratio_to_floor"]["median"] == 1.0
    for row in result["rows"]:
        assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
        assert row["ratio_to_floor"]["best"] > 0
    json.dumps(result)


def test_extra_memory_is_at_most_64_mib_plus_a_few_token_sized_tensors():
    """64 MiB + O(N C), whatever V is; the seeds' formula holds several [N, V] (here 32 MiB each)."""
    result = run(tokens=128, hidden=64, vocab=65_536, rounds=1, only=["this", "seed"])
    extra = {row["name"]: row["extra_mib"] for row in result["rows"]}
    if extra["this"] is None:
        pytest.skip("not known on this system")
    assert extra["this"] < 64 + 12 * 128 * 64 * 4 / 2**20
    assert extra["seed"] > 4 * 32


def test_extra_memory_does_not_grow_with_the_tokens():
    """At 65,536 tokens, where one [N, V] fp32 would take 64 MiB, as at 512: a few tiles."""
    row = run(tokens=65_536, hidden=32, vocab=256, rounds=1, only=["this"])["rows"][1]
    if row["extra_mib"] is None:
        pytest.skip("not known on this system")
    assert row["extra_mib"] < 40


def test_a_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_works, loss

    right = loss._ours
    monkeypatch.setattr(loss, "_ours", lambda p, impl: lambda: [right(p, impl)(), p.weight.grad.mul_(2)])
    with pytest.raises(ArithmeticError, match="wrong against float64"):
        next(gpu_works.loss("this", gpu_works.TOY, 32)())


def test_both_tables_in_one_run() -> None:
    tokenizer = NumericalAwareTokenizer(train_tokenizer(diabetes_texts("train"), 400))
    made = {"prompt_template": "{a}", "text_template": "{b}", "target_field": "b"}  # what made the texts is no more
    found = data.run(DataConfig(train="bundled:diabetes/train", **made), tokenizer, 2, 1, [1])
    assert [row["name"] for row in found["rows"]] == ["plain tokenizer", "prepare, workers 1", "ten times, workers 1"]
    assert [row["cpu_ratio"] for row in found["rows"][::2]] == [1.0, 1.0]
    assert all(row["main_cpu_s"] > 0 and row["wall_s"] > 0 for row in found["rows"])
    sizes = [own["bytes"] for own in found["memory"].values()]
    assert sizes == [sizes[0], 10 * sizes[0]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts.jsonl", 200)
    return write_config(tmp_path, data__pack=True, train__micro_batch_size=3, data__eval_fraction=0.0)


@pytest.mark.slow
def test_the_command_reports_the_tokens_it_processed(config: Path) -> None:
    done = cqwen_forked("packed", config, "--rounds", 1, "--json", program="benchmarks")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["rows"]] == ["padded", "packed, mask", "packed, varlen"]
    padded, *packed = found["rows"]
    for row in found["rows"]:
        places = sum(int(np.prod(shape)) for shape in row["shapes"])
        assert row["filled"] == pytest.approx(row["tokens"] / places)
        assert row["by_padding"] == pytest.approx(row["filled"] / padded["filled"])
        assert row["of_prediction"] == pytest.approx(row["backbone_over_padded"] / row["by_padding"])
        assert 1 / row["backbone_s_per_token"] > row["tokens_per_s"] > 0
    assert all(one["shapes"] == other["shapes"] for one, other in pairwise(packed))
    assert padded["backbone_over_padded"] == padded["by_padding"] == 1
