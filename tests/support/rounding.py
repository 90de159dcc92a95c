"""Products and sums rounded as another CPU may round them: what `pytest --rounding` runs the tests under.

A BLAS picks its kernel by instruction set and by shape, and each kernel sums in an order of its own. The least exact
order that is allowed adds one term after another, each sum rounded to fp32 (to float64, if the terms are that wide):

- `--rounding=in-order` begins at the first term, on every shape,
- `--rounding` alone at a term that the shape picks, and goes from there in a direction that the shape picks too.

So under the last a product over a part of the rows does not have the bits of that part of the whole, as on some CPUs.
The same shapes give the same bits, so what is promised still holds; what a test takes for granted does not.
All of this holds in this process and in the ranks and runs that the tests start. What torch adds up within one
operation (softmax, norms of vectors, a layer norm) it does itself, and attention is made of products.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

ASKED = "CQWEN_TEST_ROUNDING"
_kept: list[torch.library.Library] = []  # the kernels go when it goes


def install_if_asked() -> None:
    """In a process whose environment has `ASKED`, the order: from here on."""
    if not os.environ.get(ASKED) or _kept:
        return
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's too
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    add = dict.fromkeys(("addmm", "baddbmm", "addmv"), _add)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces torch's own
        for name, kernel in {"mm": _product, "bmm": _product, "dot": _product, "sum.dim_IntList": _sum, **add}.items():
            library.impl(name, kernel, "CPU")
            out = "sum.IntList_out" if kernel is _sum else name + ".out"
            if name != "dot":  # has none
                library.impl(out, partial(_into, kernel), "CPU")
        for name in add:
            library.impl(name + "_", lambda c, *ab, **scales: c.copy_(_add(c, *ab, **scales)), "CPU")


def _into(kernel: Callable[..., Tensor], *args: Any, out: Tensor, **more: Any) -> Tensor:
    found = kernel(*args, **more)
    return out.resize_(found.shape).copy_(found)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _wide_product(a, b).to(a.dtype)


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return (alpha * _wide_product(a, b) + (beta * c if beta else 0.0)).to(c.dtype)


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64))
    if not x.dim():
        return x.clone()
    over = {each % x.dim() for each in dim or range(x.dim())}
    kept = [each for each in range(x.dim()) if each not in over]
    shape = [x.shape[each] for each in kept]
    terms = x.permute((*over, *kept)).reshape(x.numel() // max(math.prod(shape), 1), math.prod(shape))
    whole = _product(terms.new_ones(1, len(terms)), terms)
    return whole.reshape([1 if each in over else x.shape[each] for each in range(x.dim())] if keepdim else shape)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b for [m,k] and [k,n] or [k], for [k] and [k], or for batches of matrices; at least in fp32."""
    if a.dim() == 1:
        return _wide_product(a[None], b)[0]
    if a.dim() == 2:
        return _wide_product(a[None], b[None])[0] if b.dim() == 2 else _wide_product(a[None], b[None, :, None])[0, :, 0]
    wide = torch.float32 if a.dtype in (torch.bfloat16, torch.float16) else a.dtype
    order = _order(a.shape[2], a.shape[1], b.shape[2])
    left, right = (x.detach().to(wide).numpy()[:, order] for x in (a.transpose(1, 2), b))
    if left.shape[2] == right.shape[2] == 1 and left.size:  # of these einsum adds several at once
        return torch.from_numpy(np.add.accumulate(left * right, axis=1)[:, -1:])
    # einsum has no BLAS: it goes through memory, so here it adds the whole outer product of one term, then the next
    return torch.from_numpy(np.einsum("zkm,zkn->zmn", left, right))


def _order(k: int, m: int, n: int) -> np.ndarray:
    """In which order the k terms of each sum of an [m,n] product are added."""
    if os.environ[ASKED] == "in-order":
        return np.arange(k)
    first = (7 * m + 13 * n) % max(k, 1)
    return np.roll(np.arange(k), first)[:: -1 if (m + n) % 2 else 1]
