"""loc_S and scale_S of all words for a few tokens, in one pass over W_cls.

    loc = u W^T        scale = s |W|^T        u, s [N, C], W [v, C] fp32 or bf16; loc, scale [N, v] fp32

Decoding one token is bound by reading W: v C elements, 545 MB in fp32 for V = 151,936 and C = 896. Two products would
read W twice, and also write and read |W|. Here each piece of W is read once for both products. On a CPU a piece is a
block that stays in a core's cache; on CUDA it is a tile of a Triton kernel. Shapes are fixed, the host never waits, and
a compiler sees one operation.

Sums are fp32. For two or more tokens Triton uses tensor cores and splits each fp32 value into tf32 parts (`tf32x3`),
which keeps the error of fp32. bf16 tokens and words are multiplied directly, which is exact. As three tf32 products,
64 bf16 tokens would take longer than reading W.

Shape letters: N tokens, C causal dimensions, v words, BM x BN x BK a tile of tokens, words and dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy

BLOCK_BYTES = 1 << 20  # size of a block of |W|, which stays in a core's cache
# Kernel tiles: {bytes per element: {most tokens: (tokens, words, dimensions, warps)}}. Tensor cores need 16 tokens. No
# tile spills registers on sm_90. Wide tiles read the tokens fewer times from L2.
TILES = {
    4: {1: (1, 32, 256, 4), 16: (16, 64, 32, 4), 32: (32, 64, 32, 4), 64: (64, 64, 32, 4)},
    2: {1: (1, 16, 512, 4), 16: (16, 64, 64, 4), 32: (32, 64, 64, 4), 64: (64, 128, 64, 8)},
}


@torch.no_grad()
def word_scores(u: Cauchy, weight: Tensor) -> Cauchy:
    """S of all words, without bias: Cauchy [N, v], fp32 (fp64 for an fp64 weight). No gradient.

    u: U' [N, C]; weight [v, C].
    """
    both_bf16 = u.loc.dtype == weight.dtype == torch.bfloat16
    tokens = weight.dtype if both_bf16 else torch.promote_types(weight.dtype, torch.float32)
    both = _BOTH_PRODUCTS if torch.compiler.is_compiling() else _both  # 80 us less for the host
    return Cauchy(*both(u.loc.to(tokens), u.scale.to(tokens), weight))


def abs_blocks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(slice, |W[slice]|) for all rows. All blocks share one buffer: each is valid until the next one."""
    rows, real = len(weight), torch.promote_types(weight.dtype, torch.float32)
    step = max(64, BLOCK_BYTES // (4 * max(1, weight.shape[1])))
    if weight.is_cuda:
        step *= 16
    buffer = torch.empty(min(step, rows), weight.shape[1], dtype=real, device=weight.device)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        block = buffer[: part.stop - part.start]
        if weight.dtype == real:
            torch.abs(weight[part], out=block)
        else:
            block.copy_(weight[part]).abs_()
        yield part, block


def product_into(x: Tensor, block: Tensor, out: Tensor) -> None:
    """out = x block^T for x [N, C], block [n, C]; out [N, n] may be a view."""
    if len(x) == 1:  # twice as fast as `mm` with one row
        torch.mv(block, x[0], out=out[0])
    else:
        torch.mm(x, block.T, out=out)


def both_by_blocks(loc: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Both products [2, N, v] as torch operations, on any device."""
    found = _shapes(loc, scale, weight)
    loc, scale = loc.to(found.dtype), scale.to(found.dtype)
    for part, block in abs_blocks(weight):
        product_into(loc, weight[part].to(loc.dtype), found[0, :, part])
        product_into(scale, block, found[1, :, part])
    return found


def both_by_triton(loc: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Both products [2, N, v] by the kernel. Tokens are fp32, or bf16 if the words are bf16."""
    (n, c), rows = loc.shape, len(weight)
    found = _shapes(loc, scale, weight)
    if n and rows:
        tiles = TILES[loc.itemsize]
        if os.environ.get("TRITON_INTERPRET"):  # the interpreter multiplies the bits of bf16 as integers
            loc, scale = loc.float(), scale.float()
        tokens, words, width, warps = next(tile for most, tile in tiles.items() if n <= most or most == 64)
        grid = (-(-rows // words), -(-n // tokens))
        shape = {"N": n, "C": c, "BM": tokens, "BN": words, "BK": width}
        own = loc.contiguous(), scale.contiguous(), weight, found, weight.stride(0), rows
        with torch.cuda.device_of(weight):  # Triton launches on the current device, not on that of the tensors
            _kernel()[grid](*own, **shape, num_warps=warps, enable_fp_fusion=True)  # off by default in Triton 3.10
    return found


@cache
def _kernel() -> Any:
    """The kernel: each program computes both products for BM tokens and BN words, over C in steps of BK."""
    # On a machine without triton, transformers refuses exported code with the text `import triton`
    triton, tl = import_module("triton"), import_module("triton.language")

    def both(
        loc_ptr,  # [N, C] fp32 in, or bf16 with bf16 words
        scale_ptr,  # [N, C] as loc_ptr
        weight_ptr,  # [v, C] fp32 or bf16 in
        out_ptr,  # [2, N, rows] fp32 out
        stride,  # elements from a word's row to the next
        rows,
        N: tl.constexpr,  # type: ignore[name-defined]
        C: tl.constexpr,  # type: ignore[name-defined]
        BM: tl.constexpr,  # type: ignore[name-defined]
        BN: tl.constexpr,  # type: ignore[name-defined]
        BK: tl.constexpr,  # type: ignore[name-defined]
    ):
        words = tl.program_id(0) * BN + tl.arange(0, BN)
        tokens = tl.program_id(1) * BM + tl.arange(0, BM)
        of_words, of_tokens = words < rows, tokens < N
        loc = tl.zeros([BM, BN], dtype=tl.float32)
        scale = tl.zeros([BM, BN], dtype=tl.float32)
        for start in range(0, C, BK):
            dims = start + tl.arange(0, BK)
            in_c = dims < C
            w_at = weight_ptr + words[:, None].to(tl.int64) * stride + dims[None, :]
            w = tl.load(w_at, mask=of_words[:, None] & in_c[None, :], other=0.0).to(loc_ptr.dtype.element_ty)
            u_at, inside = tokens[:, None] * C + dims[None, :], of_tokens[:, None] & in_c[None, :]
            u = tl.load(loc_ptr + u_at, mask=inside, other=0.0)
            s = tl.load(scale_ptr + u_at, mask=inside, other=0.0)
            if BM == 1:  # a single token cannot fill a tensor core
                loc += tl.sum(w.to(tl.float32) * u, 1)[None, :]
                scale += tl.sum(tl.abs(w.to(tl.float32)) * s, 1)[None, :]
            else:
                loc = tl.dot(u, tl.trans(w), loc, input_precision="tf32x3")
                scale = tl.dot(s, tl.trans(tl.abs(w)), scale, input_precision="tf32x3")
        at = out_ptr + tokens[:, None].to(tl.int64) * rows + words[None, :]
        inside = of_tokens[:, None] & of_words[None, :]
        tl.store(at, loc, mask=inside)
        tl.store(at + tl.full([], N, tl.int64) * rows, scale, mask=inside)

    return triton.jit(both)


def _both(loc: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    by_triton = weight.is_cuda and loc.dtype != torch.float64 and weight.stride(1) == 1 and find_spec("triton")
    return (both_by_triton if by_triton else both_by_blocks)(loc, scale, weight)


def _shapes(loc: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    real = torch.promote_types(loc.dtype, torch.float32)
    return loc.new_empty(2, len(loc), len(weight), dtype=real)


def _one_operation() -> Any:
    """`_both` as a custom operation, opaque to a compiler."""
    schema = "(Tensor loc, Tensor scale, Tensor weight) -> Tensor"
    operation = torch.library.custom_op("cqwen_dist::both_products", _both, mutates_args=(), schema=schema)
    operation.register_fake(_shapes)
    return operation


_BOTH_PRODUCTS = _one_operation()
