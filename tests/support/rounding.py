"""Products whose rounding depends on their shape, on any CPU: what `pytest --rounding` runs the tests under.

A BLAS picks its kernel by instruction set and by shape, and each kernel sums in an order of its own: a product over a
part of the rows has the bits of that part of the whole on one CPU and not on the next. Here the inner dimension is
cut in two at a place that the shape decides, in this process and in the ranks that `run_ranks` starts. The same shapes
give the same bits, so what is promised still holds; what a test takes for granted does not.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

ASKED = "CQWEN_TEST_ROUNDING"
_kept: list[torch.library.Library] = []  # the kernels go when it goes


def install_if_asked() -> None:
    """In a process whose environment has `ASKED`: from here on."""
    if not os.environ.get(ASKED) or _kept:
        return
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's too: attention is made of products then
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces torch's own
        for name, kernel in {"mm": _product, "bmm": _product, "addmm": _add, "baddbmm": _add, "addmv": _add}.items():
            library.impl(name, kernel, "CPU")
            if name != "bmm":  # `_product` is made of bmm.out
                library.impl(name + ".out", lambda *a, out, f=kernel, **scales: out.copy_(f(*a, **scales)), "CPU")
            if kernel is _add:
                library.impl(name + "_", lambda c, *ab, **scales: c.copy_(_add(c, *ab, **scales)), "CPU")


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _wide_product(a, b).to(a.dtype)


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return (alpha * _wide_product(a, b) + (beta * c if beta else 0.0)).to(c.dtype)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b for [m,k] and [k,n] or [k], or batches of matrices; at least in fp32."""
    if a.dim() == 2:
        return _wide_product(a[None], b[None])[0] if b.dim() == 2 else _wide_product(a[None], b[None, :, None])[0, :, 0]
    (size, m, k), n = a.shape, b.shape[-1]
    cut = 1 + (7 * m + 13 * n) % (k - 1) if k > 1 else k
    whole = a.new_zeros(size, m, n, dtype=torch.float32 if a.dtype in (torch.bfloat16, torch.float16) else a.dtype)
    for part in (slice(0, cut), slice(cut, k)):
        whole += torch.bmm(a[:, :, part].to(whole), b[:, part].to(whole), out=torch.empty_like(whole))
    return whole
