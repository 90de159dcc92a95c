"""The adapters' family: the start is exact, every member trains, merging keeps the function, odd wishes are refused."""

from collections.abc import Iterator

import pytest
import torch
from support.numerics import any_order
from support.tiny import random_batch, tiny_model
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.config import LoraConfig, UserError
from cqwen_dist.config.trainable import is_lora, is_magnitude
from cqwen_dist.model.backbone import adapters_disabled
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.layers import FusedLinear, fuse_adapters
from cqwen_dist.model.lora import inject_lora, merge_lora
from cqwen_dist.training.parameter_groups import feature_members

FAMILY = {
    "lora": {},
    "dora of all": {"dora": True, "target_modules": "all-linear"},
    "of a mistral": {"kind": "mistral", "dora": True},
}


def adapted(options: dict[str, object]) -> CausalQwenModel:
    options = dict(options)
    model = tiny_model(str(options.pop("kind", "qwen2")))
    inject_lora(model.transformer, LoraConfig.model_validate({"r": 4, "alpha": 6, **options}))
    return model


def z_of(model: CausalQwenModel, batch: Batch) -> Tensor:
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    return model.kept_features(batch, keep)


def move(model: CausalQwenModel) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.transformer.named_parameters():
            if is_lora(name):
                p.add_(torch.randn_like(p) * 0.1)


@pytest.mark.parametrize("options", FAMILY.values(), ids=FAMILY)
def test_new_adapters_change_nothing_and_disabling_gives_the_base(options: dict[str, object]) -> None:
    batch, plain = random_batch(), tiny_model(str(options.get("kind", "qwen2")))
    model = adapted(options)
    wanted = z_of(plain, batch)
    assert torch.equal(z_of(model, batch), wanted)
    move(model)
    assert not torch.allclose(z_of(model, batch), wanted, atol=1e-2)
    with adapters_disabled(model.transformer):
        assert torch.equal(z_of(model, batch), wanted)


@pytest.mark.parametrize("options", FAMILY.values(), ids=FAMILY)
def test_every_part_of_an_adapter_trains_and_merging_keeps_the_outputs(options: dict[str, object]) -> None:
    batch, model = random_batch(), adapted(options)
    move(model)
    before = z_of(model, batch)
    before.square().mean().backward()
    named = {m.name: m for m in feature_members(model.features) if m.group == "lora"}
    assert all(m.parameter.grad is not None and m.parameter.grad.any() for m in named.values())
    kinds = {m.kind for m in named.values()}
    assert kinds == ({"", "magnitude"} if options.get("dora") else {""})
    for name, member in named.items():
        assert (member.kind == "magnitude") == is_magnitude(name) == (member.parameter.ndim == 1)
    merge_lora(model.transformer)
    assert not any(is_lora(name) for name, _ in model.named_parameters())
    torch.testing.assert_close(z_of(model, batch), before.detach(), rtol=1e-4, atol=1e-4)


def test_unknown_target_modules_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="names out of down_proj, gate_proj, k_proj") as refusal:
        adapted({"target_modules": ["query"]})
    assert refusal.value.key == "model.lora.target_modules"


N, IN, OUT, R = 37, 20, 28, 3


class Holder(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj = nn.Linear(IN, OUT, bias=bias, dtype=dtype).requires_grad_(False)


def layers(bias: bool, dropout: float, dtype: torch.dtype) -> Iterator[nn.Module]:
    """PEFT's, the fused one, and PEFT's in float64, with the same weights."""
    for own, fuse in ((dtype, False), (dtype, True), (torch.float64, False)):
        torch.manual_seed(0)
        holder = Holder(bias, dtype)
        inject_lora(holder, LoraConfig(r=R, alpha=5, dropout=dropout, target_modules=["q_proj"]))
        for name, p in holder.named_parameters():
            if is_lora(name):
                p.data = torch.randn_like(p).to(dtype)
        holder = holder.to(own).train()
        if fuse:
            fuse_adapters(holder)
            assert type(holder.q_proj) is FusedLinear
        yield holder.q_proj


def run(layer: nn.Module, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x, g = torch.randn(*shape, IN), torch.randn(*shape, OUT)
    first = x.to(dtype).to(next(layer.parameters()).dtype).requires_grad_()
    torch.manual_seed(2)  # of dropout
    y = layer(first)
    y.backward(g.to(dtype).to(y.dtype))
    found = {"y": y.detach(), "x": first.grad}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    assert all(value is not None for value in found.values())
    return {name: value.double() for name, value in found.items()}  # type: ignore[union-attr]


# With dropout in one dtype: torch draws other masks for other dtypes, so float64 is no oracle of them.
@pytest.mark.parametrize(
    ("bias", "dropout", "dtype", "shape"),
    [
        (False, 0.0, torch.float32, (N,)),
        (True, 0.0, torch.float32, (2, 5)),
        (True, 0.0, torch.bfloat16, (N,)),
        (False, 0.0, torch.bfloat16, (1, 1)),
        (True, 0.4, torch.float32, (2, 5)),
        (False, 0.0, torch.float32, (0,)),
    ],
)
def test_fused_lora_error_is_at_most_pefts(bias, dropout, dtype, shape) -> None:
    plain, fused, wide = (run(layer, dtype, shape) for layer in layers(bias, dropout, dtype))
    assert set(fused) == set(plain)
    if dropout:
        wide = plain  # the same draws, equal to rounding
    rounding = 4 * torch.finfo(dtype).eps + any_order(N)
    for name, exact in wide.items():
        if not exact.numel():
            continue
        size = exact.abs().max()
        allowed = (plain[name] - exact).abs().max() + rounding * size
        assert (fused[name] - exact).abs().max() <= allowed, name
