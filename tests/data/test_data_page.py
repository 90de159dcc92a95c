"""docs/data.md: every example is a config that is taken, every source of its table is one that is read."""

import re
from pathlib import Path

import pytest
import yaml

from cqwen_dist.config import DataConfig
from cqwen_dist.data import sources

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_an_example_is_a_config(example: str) -> None:
    DataConfig.model_validate(yaml.safe_load(example))


def test_the_sources_are_those_of_the_reader() -> None:
    for ending in (".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".gz", "hf:", "bundled:"):
        assert ending in PAGE
        assert ending in (sources.__doc__ or "")
