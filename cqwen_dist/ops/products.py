"""Matrix products of bf16 whose sums are not rounded to bf16.

A logit near 15 has steps of 1/16 in bf16, and its scale is 1e-3 or less: rounding it would change P of the best word by
half and more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = 448.0  # e4m3's largest number


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the backbone and of the products, by `train.precision`: fp32 or bf16."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in fp32 (fp64 for fp64), for a [N, C] and b [n, C] of one dtype; differentiable.

    Both are widened to fp32 first, except on a GPU where no gradient is needed. Autocast changes nothing.
    """
    real = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != real and not torch.is_grad_enabled():
        out = a.new_empty(a.shape[0], b.shape[0], dtype=real)
        mm_into(a, b.T, out)
        return out
    with torch.autocast(a.device.type, enabled=False):
        if 1 < a.shape[0] < 6 and not a.is_cuda:  # a few tokens: this order is 2 to 3 times as fast in MKL
            return (b.to(real) @ a.to(real).T).T
        return a.to(real) @ b.to(real).T


def mm_into(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a b, or out += a b; with three dimensions, of each pair of matrices, in one launch where that is possible.

    On CUDA out may be fp32 where a and b are bf16: the sum is then never rounded.
    """
    writes, adds, batches = _wide_products() if a.is_cuda and a.dtype != out.dtype else (a.is_cuda, a.is_cuda, True)
    if a.ndim == 3 and not batches:
        for one, other, into in zip(a, b, out, strict=True):
            mm_into(one, other, into, add)
        return
    plain, adding = (torch.ops.aten.mm, torch.ops.aten.addmm)
    if a.ndim == 3:
        plain, adding = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    if a.dtype == out.dtype:
        adding.out(out, a, b, out=out) if add else plain.out(a, b, out=out)
    elif add and adds:
        adding.dtype_out(out, a, b, out.dtype, out=out)
    elif add:
        out.add_(plain.dtype(a, b, out.dtype) if writes else plain(a, b))
    elif writes:
        plain.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(plain(a, b))


@cache
def _wide_products() -> tuple[bool, bool, bool]:
    """Whether this torch can, on CUDA, write a bf16 product as fp32, add it to an fp32 matrix, and do both in batches.

    Tried once. torch before 2.8 can do neither; some later versions need the matrix in bf16 too.
    """
    a = torch.ones(2, 16, 16, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(2, 16, 16, device="cuda")
    aten = torch.ops.aten

    def works(product: Callable[[], object]) -> bool:
        try:
            product()
        except (AttributeError, RuntimeError):
            return False
        return True

    return (
        works(lambda: aten.mm.dtype_out(a[0], a[0], out.dtype, out=out[0])),
        works(lambda: aten.addmm.dtype_out(out[0], a[0], a[0], out.dtype, out=out[0])),
        works(lambda: aten.bmm.dtype_out(a, a, out.dtype, out=out))
        and works(lambda: aten.baddbmm.dtype_out(out, a, a, out.dtype, out=out)),
    )


class ScaledRows(NamedTuple):
    """A matrix [r, C] as an operand of products: row r is factor_r * values_r."""

    values: Tensor  # [r, C]
    factor: Tensor | None = None  # [r] fp32 (fp64); None: 1

    def take(self, some: slice) -> ScaledRows:
        """Some of the rows."""
        return ScaledRows(self.values[some], None if self.factor is None else self.factor[some])


def fp8_rows(a: Tensor, holder: torch.dtype) -> ScaledRows:
    """Rows of numbers >= 0 [r, C], rounded to e4m3 (3 bits after the first), the largest of each row to 448.

    The factor keeps the sum of the row, so a product with it has no bias: measured on a head's shapes the error of
    scale_S is 0.1 % instead of 0.25 %. holder: the dtype that the values are kept in, float8_e4m3fn or a wider one
    (which holds them exactly), for devices that cannot multiply fp8.
    """
    real = torch.promote_types(a.dtype, torch.float32)
    top = a.amax(1, keepdim=True).to(real) if a.shape[1] else a.new_zeros(len(a), 1, dtype=real)
    rounded = (a * (FP8_MAX / top.clamp(min=1e-30))).to(torch.float8_e4m3fn)
    wide = rounded.to(real)
    factor = a.sum(1, dtype=real) / wide.sum(1).clamp(min=1e-30)
    return ScaledRows(rounded if holder == torch.float8_e4m3fn else wide.to(holder), factor)
