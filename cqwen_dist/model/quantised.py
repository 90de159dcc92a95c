"""A frozen base in 8 or 4 bits (QLoRA). bitsandbytes rounds and keeps its linear maps; the products are made here.

    forward    y = x W^T + b        backward   dx = g W        W: dequantised for this one product

bitsandbytes' own products are not equal in training and evaluation. Its int8 maps also round activations (on a CPU only
in evaluation). Its nf4 maps repack their weights at a CPU's first evaluation, and from then on no gradient passes them.
Here both give the same y, and the gradient of exactly this y.

`backbone` imports this module only for such a base, since bitsandbytes is optional.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn

from cqwen_dist.config.errors import Said, UserError


class _FrozenProduct(torch.autograd.Function):
    """x [..., in] -> [..., out]. module: has `dense(dtype)` [out, in], which is not kept until backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return F.linear(x, module.dense(x.dtype), module.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream @ ctx.module.dense(upstream.dtype), None


class _OwnProduct:
    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return _FrozenProduct.apply(x, self)


class Nf4Linear(_OwnProduct, bitsandbytes.nn.Linear4bit):
    """A linear map whose weights have 4 bits, in blocks of 64 with a scale each, which has 8 bits."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], dequantised."""
        return dequantize_4bit(self.weight.data, self.weight.quant_state).to(dtype)


class Int8Linear(_OwnProduct, bitsandbytes.nn.Linear8bitLt):
    """A linear map whose weights have 8 bits, with an fp32 scale for each output."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], dequantised."""
        return self.weight.data.to(dtype).mul_(self.weight.SCB[:, None] / 127)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = self.weight.SCB
        super()._apply(fn, recurse)
        self.weight.SCB, self.weight.CB = scales.to(self.weight.device), None  # neither is a parameter
        return self


OWN: dict[type, Any] = {bitsandbytes.nn.Linear4bit: Nf4Linear, bitsandbytes.nn.Linear8bitLt: Int8Linear}


def use_own_products(transformer: nn.Module) -> None:
    """Turn the maps that transformers loaded with bitsandbytes into those of this module. Raises `UserError`."""
    for module in transformer.modules():
        if type(module) in OWN:
            module.__class__ = OWN[type(module)]
            module._apply(lambda part: part)
            if isinstance(module, Nf4Linear) and module.weight.device.type == "cpu" and module.in_features % 64:
                found = Said(f"nf4 with a linear map that reads {module.in_features} numbers")
                allowed = "int8 or none: on a CPU bitsandbytes dequantises wrongly where 64 does not divide this number"
                raise UserError("model.quantize", found, allowed)
