"""A base in 8 or 4 bits: products, gradients and refusals of `model.quantised`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICES
from support.numerics import assert_close
from support.tiny import NUM, random_batch, tiny_base

from cqwen_dist.config import UserError
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.base_loading import load_base

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install cqwen-dist[quant])")

from cqwen_dist.model.quantised import Int8Linear, Nf4Linear

KINDS = {"int8": Int8Linear, "nf4": Nf4Linear}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LARGEST_GAP = 0.152  # half the widest step of nf4 (-1 to -0.696)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_base(**WIDE).save_pretrained(path)
    return path


def maps(model: Any) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if type(m) in KINDS.values()}


def adapted(base: Any) -> CausalQwenForCausalLM:
    """With an adapter that is not zero on every map."""
    torch.manual_seed(3)
    settings = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
    model = CausalQwenModel.from_base_model(base, start="seed", num_token_id=NUM, lora=settings)
    with torch.no_grad():
        for name, parameter in model.features.named_parameters():
            if is_lora(name):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return CausalQwenForCausalLM(model.config, model)


def loss_and_gradients(model: CausalQwenForCausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = random_batch().to(model.device)
    labels = batch.input_ids.masked_fill(~batch.attention_mask, -100)
    loss = model(batch.input_ids, batch.numeric_values, batch.attention_mask, labels=labels).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_map_is_near_full_one_and_product_is_exact(folder: Path, kind: str, dtype: torch.dtype, device: str) -> None:
    full = load_base(folder, dtype).to(device)
    rounded = load_base(folder, dtype, quantize=kind, device=torch.device(device))
    found = maps(rounded.model)
    assert len(found) == 14
    for name, module in found.items():
        weight, dense = full.model.get_submodule(name).weight.float(), module.dense(torch.float32)
        if kind == "int8":
            limit = (
                weight.abs().amax(1, keepdim=True).expand_as(weight) * 0.6 / 127
            )  # bitsandbytes rounds halves in fp16
        else:  # blocks of 64 in rows of 64 or 128; the block's scale has 8 bits
            limit = weight.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape_as(weight) * LARGEST_GAP
            limit = limit + 0.01 * weight.abs().max()
        assert ((dense - weight).abs() <= limit + (0.004 * weight.abs() if dtype == torch.bfloat16 else 0)).all(), name
        x = torch.randn(2, 3, weight.shape[1], dtype=dtype, device=device)
        assert torch.equal(module(x), F.linear(x, module.dense(dtype), module.bias))
    assert rounded.get_output_embeddings().weight.dtype == rounded.get_input_embeddings().weight.dtype == dtype
    assert not hasattr(rounded.config, "quantization_config"), "an export of the full base would claim to be rounded"


@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_plain_base_with_the_dequantised_weights(folder: Path, kind: str, device: str) -> None:
    """Also after an evaluation, which bitsandbytes' own maps do not survive on some CPUs, and in evaluation mode."""
    rounded = load_base(folder, torch.float32, quantize=kind, device=torch.device(device))
    plain = load_base(folder, torch.float32).to(device)
    for name, module in maps(rounded.model).items():
        plain.model.get_submodule(name).weight.data = module.dense(torch.float32)
    model, wanted = adapted(rounded).to(device), adapted(plain).to(device)
    batch = random_batch().to(model.device)
    with torch.no_grad():
        seen = model.eval()(batch.input_ids, batch.numeric_values).logits
        assert torch.equal(model.train()(batch.input_ids, batch.numeric_values).logits, seen)
    for parameter in wanted.model.transformer.parameters():
        parameter.requires_grad_(False)
    for name, parameter in wanted.named_parameters():
        parameter.requires_grad_(is_lora(name) or "transformer" not in name)
    loss, gradients = loss_and_gradients(model)
    plain_loss, plain_gradients = loss_and_gradients(wanted)
    assert_close(loss, plain_loss, 1e-5, "loss")
    shared = {n for n in plain_gradients if n in gradients}
    assert len([n for n in shared if is_lora(n)]) == 28
    assert {n for n in plain_gradients if "transformer" not in n} <= shared
    for name in shared:
        assert_close(gradients[name], plain_gradients[name], 1e-4, name)


def test_a_rounded_base_is_neither_saved_nor_merged_into(folder: Path, tmp_path: Path) -> None:
    model = adapted(load_base(folder, torch.float32, quantize="int8"))
    for attempt in (lambda: model.save_pretrained(tmp_path / "out"), model.merge_adapters):
        with pytest.raises(UserError, match=r"8 or 4 bits.*cqwen export"):
            attempt()
    assert not (tmp_path / "out").exists()
