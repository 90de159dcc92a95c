"""Matrix products of bf16 inputs with fp32 results; only this module decides their dtype and precision.

A logit near 15 has steps of 1/16 in bf16, and its scale is 1e-3 or less. Rounding the logit to bf16 would change P of
the best word by half and more. A GPU writes bf16 products as fp32. A CPU can multiply bf16 (AMX, AVX512-BF16), but
torch then rounds the result to bf16. So there the product starts from the threshold and gives C - logit (`gap_into`).
Near the threshold this is small, and so is its rounding.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of backbone and products for `train.precision`: "fp32" or "bf16"."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def gemm_dtype(asked: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of `asked` inputs run: fp32 instead of bf16 on a CPU that cannot multiply bf16."""
    return asked if device.type != "cpu" or _bf16_cpu() else torch.promote_types(asked, torch.float32)


@cache
def _bf16_cpu() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T [N, n] in fp32 (fp64 for fp64) for a [N, C] and b [n, C] of one dtype; differentiable.

    Converts both to fp32 first, except on a GPU without gradients. Autocast has no effect.
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


def gap_into(offset: Tensor, leading: Tensor, a: Tensor, b: Tensor, out: Tensor, low: Tensor) -> None:
    """out [t, n] = offset - a b in fp32, for offset [n].

    leading [n]: for bf16 inputs on a CPU, a bf16 part of the offset, such that `leading - a b` is small where it
    matters. low: scratch [1 or more, t, n] in bf16, used there.
    """
    if a.is_cuda or a.dtype == out.dtype:
        mm_into(a, b, out)
        torch.sub(offset, out, out=out)
    else:  # the sum with `leading` is fp32, and only then rounded
        torch.addmm(leading, a, b, alpha=-1.0, out=low[0])
        out.copy_(low[0]).add_(offset - leading)


def mm_into(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a b, or out += a b. On CUDA, out may be fp32 with bf16 inputs; the result is then not rounded to bf16."""
    aten = torch.ops.aten
    writes, adds = _wide_products() if a.is_cuda and a.dtype != out.dtype else (a.is_cuda, a.is_cuda)
    if a.dtype == out.dtype:
        aten.addmm.out(out, a, b, out=out) if add else aten.mm.out(a, b, out=out)
    elif add and adds:
        aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    elif add:
        out.add_(aten.mm.dtype(a, b, out.dtype) if writes else a @ b)
    elif writes:
        aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        out.copy_(a @ b)


@cache
def _wide_products() -> tuple[bool, bool]:
    """Whether this torch, on CUDA, can (write a bf16 product as fp32, add it to an fp32 matrix).

    Tested once by calling it: torch before 2.8 supports neither, and some later versions need a bf16 matrix to add to.
    """
    a = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(16, 16, device="cuda")
    aten = torch.ops.aten

    def works(product: Callable[[], object]) -> bool:
        try:
            product()
        except (AttributeError, RuntimeError):
            return False
        return True

    return (
        works(lambda: aten.mm.dtype_out(a, a, out.dtype, out=out)),
        works(lambda: aten.addmm.dtype_out(out, a, a, out.dtype, out=out)),
    )
