"""`bench packed`: rows as a run packs them, texts of the same data, and shares that are counted from the batches."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.runs import cqwen_forked, write_config, write_texts


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
