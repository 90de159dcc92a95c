"""Quantisers of transformers, with their defaults, leave the heads alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import random_batch, tiny_causal_lm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.config import UserError


def test_a_quantiser_leaves_the_heads_alone(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = tmp_path / "a"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    tiny_causal_lm(number_dims=2, base=sizes).save_pretrained(folder)
    full, quantised = (
        AutoModelForCausalLM.from_pretrained(folder),
        {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    )
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **quantised).eval()
    wanted = full.state_dict()
    for name, head in model.model.heads.items():
        for part, value in head.named_parameters():
            assert torch.equal(value, wanted[f"model.{name}.{part}"]), f"{name}.{part}"
    assert model.dtype.is_floating_point
    model.save_pretrained(tmp_path / "b")
    batch = random_batch(2, 9)
    with torch.no_grad():
        found = model(batch.input_ids, batch.numeric_values).logits
        assert not torch.equal(found, full(batch.input_ids, batch.numeric_values).logits)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", device_map="cpu").eval()
        assert torch.equal(again(batch.input_ids, batch.numeric_values).logits, found)


def test_heads_that_are_quantised_by_hand_are_refused(tmp_path: Path) -> None:
    model = tiny_causal_lm()
    weight = model.model.abduction.loc_net.weight
    weight.requires_grad_(False)
    weight.data = weight.data.to(torch.int8)  # as a quantiser that goes past transformers leaves it
    with pytest.raises(
        UserError, match=r'model.abduction.loc_net.weight of torch.int8.*\["model.abduction", "model.act'
    ):
        model(random_batch(1, 4).input_ids)
