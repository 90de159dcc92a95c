"""The fused linear map with an adapter is PEFT's: values, every gradient, dropout's draws, names."""

from collections.abc import Iterator

import pytest
import torch
from support.numerics import any_order
from torch import Tensor, nn

from cqwen_dist.config import LoraConfig
from cqwen_dist.model.layers import FusedLinear, fuse_adapters
from cqwen_dist.model.lora import inject_lora, is_lora

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
def test_fused_lora_error_is_at_most_pefts(
    bias: bool, dropout: float, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
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
