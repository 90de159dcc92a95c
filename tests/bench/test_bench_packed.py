"""`bench packed`: the same real texts in every contender, and shares that are counted from the batches."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.runs import cqwen_forked, write_config, write_texts

from cqwen_dist.bench.packed import texts_of
from cqwen_dist.config import load_config
from cqwen_dist.data.load import load_datasets
from cqwen_dist.report.prepared import tokenizer_of


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts.jsonl", 200)
    return write_config(tmp_path, data__pack=True, train__micro_batch_size=3, data__eval_fraction=0.0)


def test_rows_and_single_texts_are_the_same_texts(config: Path) -> None:
    checked = load_config(config, ["data.pack=false"])
    dataset = load_datasets(checked.data, tokenizer_of(checked)).train
    rows, texts = texts_of(dataset, 3, 48, 0)
    assert len(rows) == 3
    assert max(sum(len(document.ids) for document in row) for row in rows) <= 48
    packed, single = (sorted(d.ids.tolist() for sample in found for d in sample) for found in (rows, texts))
    assert packed == single
    assert len(single) > 3
    assert sum(map(len, packed)) > 0.9 * 3 * 48, "rows of many texts are full"


def test_the_command_counts_what_it_ran(config: Path) -> None:
    done = cqwen_forked("bench", "packed", config, "--rounds", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["rows"]] == ["padded", "packed, mask", "packed, varlen"]
    padded, *packed = found["rows"]
    for row in found["rows"]:
        places = sum(int(np.prod(shape)) for shape in row["shapes"])
        assert row["filled"] == pytest.approx(found["tokens"] / places)
        assert row["by_padding"] == pytest.approx(row["filled"] / padded["filled"])
        assert row["of_prediction"] == pytest.approx(row["backbone_over_padded"] / row["by_padding"])
        assert min(row["tokens_per_s"], row["backbone_ms_per_1000"]) > 0
    assert all(one["shapes"] == other["shapes"] for one, other in pairwise(packed))
    assert padded["backbone_over_padded"] == padded["by_padding"] == 1
