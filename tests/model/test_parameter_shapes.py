"""No parameter has 0 dimensions: DeepSpeed cannot flatten one. What earlier versions wrote so still loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exported import tiny_pair, write_folder
from support.tiny import NUM, VOCAB, random_batch, tiny_causal_lm
from transformers import AutoModelForCausalLM

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.checkpoint.trained import load_exported
from cqwen_dist.heads.seed_losses import CausalQwenLoss

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scalar C": {"scalar_threshold": True},
    "several values": {"more_values": ["high"]},
    "types": {"number_types": ["other", "price"]},
    "copies": {"copies": 2},
    "wide, two layers": {"wide": 64, "random_features": 8, "number_dims": 2, "abduction": "two_layer"},
    "periods, adapters": {
        "value_periods": [10.0],
        "lora": {"r": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj"], "dora": True},
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_every_parameter_has_a_dimension(shape: dict[str, Any]) -> None:
    model = tiny_causal_lm(**shape)
    assert [name for name, p in model.named_parameters() if p.ndim == 0] == []
    assert [name for name, p in CausalQwenLoss(VOCAB, NUM).named_parameters() if p.ndim == 0] == []


def test_an_earlier_export_loads_with_its_values(tmp_path: Path) -> None:
    model, tokenizer = tiny_pair()
    folder = write_folder(tmp_path, model, tokenizer)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith("action.reg_bias")]
    assert len(names) == 1
    tensors |= {name: tensors[name].reshape(()) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for again in (AutoModelForCausalLM.from_pretrained(folder), load_exported(folder)):
        assert torch.equal(again.model.action.reg_bias, model.model.action.reg_bias)
        again.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors")[names[0]].shape == (1,)


def test_an_earlier_checkpoint_loads_with_its_values(tmp_path: Path) -> None:
    for name, tensors in {
        "heads": {"action.reg_bias": torch.tensor(3.5)},
        "heads.moments": {"action.reg_bias.exp_avg": torch.tensor(0.5)},
        "features": {"embedding.w_num": torch.ones(4)},
        "features.moments": {"embedding.w_num.exp_avg": torch.ones(4)},
    }.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "state.json").write_text("{}")
    found = load_checkpoint(tmp_path, (0, 0))
    assert found.heads["action.reg_bias"].tolist() == [3.5]
    assert found.head_moments["action.reg_bias.exp_avg"].tolist() == [0.5]


def test_a_scalar_threshold_counts_for_every_word() -> None:
    model, batch = tiny_causal_lm(scalar_threshold=True), random_batch()
    words = tiny_causal_lm()
    words.load_state_dict(model.state_dict() | {"model.action.threshold": torch.full((VOCAB,), 1.5)})
    model.model.action.threshold.data.fill_(1.5)
    losses = [m(batch.input_ids, batch.numeric_values, labels=batch.input_ids).loss for m in (model, words)]
    torch.stack(losses).sum().backward()
    assert torch.allclose(*losses, rtol=1e-6)
    per_word = words.model.action.threshold.grad.sum()
    assert torch.allclose(model.model.action.threshold.grad, per_word, rtol=1e-4)


def test_a_loaded_head_is_not_drawn_anew() -> None:
    """transformers before 5.12 initialises modules also after it has loaded all of their tensors, which it marks."""
    model = tiny_causal_lm()
    for part in (model.model.abduction, model.model.action):
        before = {name: tensor.clone() for name, tensor in part.state_dict().items()}
        for tensor in part.parameters():
            tensor._is_hf_initialized = True
        model._init_weights(part)
        assert all(torch.equal(tensor, before[name]) for name, tensor in part.state_dict().items())
    del model.model.action.reg_weight._is_hf_initialized
    model._init_weights(model.model.action)
    assert not torch.equal(model.model.action.reg_weight, before["reg_weight"]), "a checkpoint lacks it"
