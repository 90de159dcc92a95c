"""PEFT on every linear map, the heads' included: an adapter counts from the first forward pass on, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.exported import tiny_pair, write_folder
from support.numerics import assert_close
from support.tiny import random_batch
from transformers import AutoModelForCausalLM

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.config import UserError
from cqwen_dist.model import CausalQwenForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("exported"), *tiny_pair(abduction="two_layer", number_dims=2))


def given(model: CausalQwenForCausalLM) -> dict[str, torch.Tensor]:
    batch = random_batch(3, 10, num=model.config.num_token_id)
    labels = batch.input_ids.masked_fill(~batch.attention_mask, -100)
    return {"input_ids": batch.input_ids, "numeric_values": batch.numeric_values, "labels": labels}


def answers(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model.eval()(**inputs, logits_to_keep=0, output_scales=True)
    return [found.logits, found.scale_U, found.loc_Y, found.loss]


def test_an_adapter_on_every_linear_map_counts(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    inputs = given(plain)
    before = answers(plain, inputs)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=4, target_modules="all-linear")
    adapted = get_peft_model(plain, config)
    for found, wanted in zip(answers(adapted, inputs), before, strict=True):
        assert_close(found, wanted, 1e-5, "before the first step")
    adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.split(".")[4] for name in adapters if ".abduction." in name} == {"loc_net", "scale_net", "up", "down"}
    with torch.no_grad():  # of B = 0, A has no gradient
        for p in adapters.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    adapted(**inputs).loss.backward()
    assert [name for name, p in adapters.items() if p.grad is None or not p.grad.any()] == []
    moved = answers(adapted, inputs)
    assert float((moved[0] - before[0]).abs().max()) > 1e-2
    for found, wanted in zip(answers(adapted.merge_and_unload(), inputs), moved, strict=True):
        assert_close(found, wanted, 1e-4, "merged")


def test_an_adapter_that_the_loss_would_not_see_is_refused(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    inputs = given(plain)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[], target_parameters=["action.cls_weight"])
    with pytest.raises(UserError, match=r"target_parameters: found 'action.cls_weight', allowed: modules_to_save"):
        get_peft_model(plain, config)(**inputs)
