"""What other libraries read of a model before they use it: its config, its targets, its features, its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.exported import tiny_pair, write_folder
from support.numerics import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.model import CausalQwenFeatures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("exported"), *tiny_pair())


def test_the_config_states_what_libraries_ask_for(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, base = model.config, model.config.base_config
    assert config.use_cache is True
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (
        base.eos_token_id,
        base.bos_token_id,
        base.pad_token_id,
    )
    config.use_cache, config.eos_token_id = False, 3  # TRL writes both
    again = type(config).from_dict(config.to_dict())
    assert (again.use_cache, again.eos_token_id) == (False, 3)


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


def test_input_embeddings_have_the_trained_row_of_num(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("tea costs 3.5", return_tensors="pt")
    assert (batch["input_ids"] == tokenizer.num_token_id).any()
    with torch.no_grad():
        wanted = model(**batch, labels=batch["input_ids"], logits_to_keep=0)
        rows = model.get_input_embeddings()(batch.pop("input_ids"))
        found = model(**batch, inputs_embeds=rows, logits_to_keep=0)
    assert_close(found.logits, wanted.logits, 1e-5)


def test_a_folder_saved_again_has_the_files_that_its_auto_map_names(folder: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert not (tmp_path / "modeling_causal_qwen.py").exists(), "a tokenizer alone needs no model"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    for file in ("config.json", "tokenizer_config.json"):
        named = json.loads((tmp_path / file).read_text())["auto_map"].values()
        for place in named:
            module = (place[1] if isinstance(place, list) else place).partition(".")[0]
            assert (tmp_path / f"{module}.py").is_file(), place
