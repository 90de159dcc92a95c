"""A frozen base in 8 or 4 bits (QLoRA). bitsandbytes rounds and keeps its linear maps; the products are made here.

    forward    y = x W^T + b        backward   dx = g W        W: dequantised for this one product

bitsandbytes' own products are not equal in training and evaluation. Its int8 maps also round activations (on a CPU only
in evaluation). Its nf4 maps repack their weights at a CPU's first evaluation, and from then on no gradient passes them.
Here both give the same y, and the gradient of exactly this y.

`backbone` imports this module only for such a base, since bitsandbytes is optional.
"""

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import Tensor, nn

from cqwen_dist.config.errors import Said, UserError

_LIBRARY = torch.library.Library("cqwen_dist", "FRAGMENT")


def _operation(name: str, arguments: str, dense: Callable[..., Tensor]) -> Any:
    """The product x W^T + b, or x W in backward, with a weight W that `dense` makes inside, opaque to a compiler.

    A compiler that saw the dequantised weight would keep it from forward to backward: all of the base in full.
    """

    def product(x: Tensor, bias: Tensor | None, back: bool, *stored: Any) -> Tensor:
        weight = dense(x.dtype, *stored)
        return x @ weight if back else F.linear(x, weight, bias)

    def shape_of_product(x: Tensor, bias: Tensor | None, back: bool, *stored: Any) -> Tensor:
        out_features, in_features = stored[-1]
        return x.new_empty(*x.shape[:-1], in_features if back else out_features)

    _LIBRARY.define(f"{name}(Tensor x, Tensor? bias, bool back, Tensor weight, {arguments}, int[] shape) -> Tensor")
    _LIBRARY.impl(name, product, "CompositeExplicitAutograd")  # `torch.library.custom_op` takes three times as long
    torch.library.register_fake(f"cqwen_dist::{name}", shape_of_product, lib=_LIBRARY)
    return getattr(torch.ops.cqwen_dist, name).default


def _int8_dense(dtype: torch.dtype, weight: Tensor, scales: Tensor, shape: list[int]) -> Tensor:
    return weight.to(dtype).mul_(scales[:, None] / 127)


def _nf4_dense(
    dtype: torch.dtype, weight: Tensor, state: list[Tensor], sizes: list[int], kept: torch.dtype, shape: list[int]
) -> Tensor:
    """state: absmax, code and offset of the blocks; absmax and code of the blocks of these. sizes: of both blocks."""
    absmax, code, offset, absmax2, code2 = state
    of_blocks = QuantState(absmax=absmax2, code=code2, blocksize=sizes[1], dtype=torch.float32)
    found = QuantState(
        absmax=absmax,
        code=code,
        offset=offset,
        blocksize=sizes[0],
        shape=torch.Size(shape),
        dtype=kept,
        quant_type="nf4",
        state2=of_blocks,
    )
    return dequantize_4bit(weight, found).to(dtype)


_INT8_PRODUCT = _operation("int8_product", "Tensor scales", _int8_dense)
_NF4_PRODUCT = _operation("nf4_product", "Tensor[] state, int[] sizes, ScalarType kept", _nf4_dense)


class _FrozenProduct(torch.autograd.Function):
    """x [..., in] -> [..., out]. module: one of the classes below, whose dequantised weight is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return module.product(x, module.bias, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.module.product(upstream, None, True), None


class _OwnProduct:
    operation: Any  # on x, bias, back and what `stored` gives
    dequantise: Any
    stored: Any

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return _FrozenProduct.apply(x, self)

    def product(self, x: Tensor, bias: Tensor | None, back: bool) -> Tensor:
        """x W^T + b, or x W in backward."""
        return self.operation(x, bias, back, *self.stored())

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], dequantised."""
        return self.dequantise(dtype, *self.stored())


class Nf4Linear(_OwnProduct, bitsandbytes.nn.Linear4bit):
    """A linear map whose weights have 4 bits, in blocks of 64 with a scale each, which has 8 bits."""

    operation, dequantise = _NF4_PRODUCT, staticmethod(_nf4_dense)

    def stored(self) -> tuple[Any, ...]:
        s = self.weight.quant_state
        state = [s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code]
        return self.weight.data, state, [s.blocksize, s.state2.blocksize], s.dtype, list(s.shape)


class Int8Linear(_OwnProduct, bitsandbytes.nn.Linear8bitLt):
    """A linear map whose weights have 8 bits, with an fp32 scale for each output."""

    operation, dequantise = _INT8_PRODUCT, staticmethod(_int8_dense)

    def stored(self) -> tuple[Any, ...]:
        return self.weight.data, self.weight.SCB, list(self.weight.shape)

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
                allowed = "int8 or none: on a CPU bitsandbytes dequantises wrongly if 64 does not divide this number"
                raise UserError("model.quantize", found, allowed)
