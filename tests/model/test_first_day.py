"""What other libraries read of a model before they use it: its config, its targets, its features, its code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.exported import tiny_pair, write_folder
from support.numerics import assert_close
from transformers import AutoModel, AutoTokenizer, pipeline

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.model import CausalQwenFeatures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("exported"), *tiny_pair())


def test_auto_model_gives_features(folder: Path) -> None:
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is CausalQwenFeatures
    batch = tokenizer(["tea costs 3.5", "milk costs 12 and more"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**batch, output_hidden_states=True, use_cache=True)
        z = model.model.features(**batch)
    assert torch.equal(found.last_hidden_state, z)
    assert torch.equal(found.hidden_states[-1], z)
    assert found[1].get_seq_length() == z.shape[1]
    extracted = pipeline("feature-extraction", model=str(folder))("tea costs 3.5", return_tensors=True)
    one = tokenizer("tea costs 3.5", return_tensors="pt")
    with torch.no_grad():
        assert_close(extracted, model(**one).last_hidden_state, 1e-5)
