"""Scores, maths and gradients of a tile in one persistent Triton kernel: no score is ever in memory.

A program makes both products of [BM tokens, BN words], loc = x W^T and scale = g |W|^T, in two fp32 accumulators that
stay in registers, does the maths of `triton` on them, and writes the two gradients in the GEMMs' dtype and nothing else
of size [t, n]. The four products of the gradients follow by cuBLAS, in two launches (`one_pass`).

    reads   x, g [t, C], w, abs_w [n, C]; offset, class weights [n], token weights [t] fp32; target [t] int64
    writes  d_loc, d_scale [t, n]
            loss, prob [n/BN, t], gap [t/BM, n] fp32: sums of a tile each, added up afterwards in a fixed order,
            so no atomics and the same bits every time

Operands come by TMA where the device has it (sm_90) and their rows are multiples of 16 bytes, else by pointers.
Programs walk GROUP blocks of words before the next tokens, so that those that run at once share rows in L2. The maths
is done in PARTS slices of BN/PARTS words: on a whole tile the compiler keeps too much alive and spills.

|W| is read as an operand of its own, not made of W in registers: a wgmma that takes an operand from registers may read
what the next step has overwritten (triton issue 9433: triton 3.6 with ptxas 12.9).

fp8: g and |W| are e4m3 with a factor a row, which is applied to the sum (`products.fp8_rows`). Hopper adds fp8 products
with about 14 bits, so every BK of them have a sum of their own, which is added in fp32. Only this product is in fp8: of
dloss/dscale a few entries weigh most, so their rounding does not average out (docs/decisions.md, D-fp8).

Not yet measured on GPU; what it should reach: docs/log/2026-11-24.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cqwen_dist.ops.ovr.tile import FAR, Tile, TileMaths
from cqwen_dist.ops.ovr.triton import _INTERPRETED, _INV_PI, _entries
from cqwen_dist.ops.products import ScaledRows, fp8_rows

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # triton before 3.4: pointers
    TensorDescriptor = None

GROUP = 16  # blocks of words; at 132 programs, the fewest bytes: x and g of a token block weigh as two blocks of words
_FAR = tl.constexpr(FAR)


class Shape(NamedTuple):
    """How the kernel is cut. Registers, spills and shared memory of each: docs/log/2026-11-24.md."""

    bm: int  # tokens of a program
    bn: int  # words of a program
    bk: int  # of C in a step
    parts: int  # slices of the maths
    warps: int
    stages: int
    programs: int  # on an SM


# None of them spills (docs/log/2026-11-24.md). `cqwen bench loss` times those of its device.
SHAPES = {
    "sm_90": Shape(128, 128, 64, 8, 8, 3, 1),
    "sm_90 fp8": Shape(128, 128, 128, 8, 8, 2, 1),
    "sm_90 two": Shape(64, 128, 64, 8, 4, 2, 2),
    "sm_90 two fp8": Shape(64, 128, 64, 8, 4, 2, 2),
    "sm_80": Shape(128, 64, 32, 4, 8, 4, 1),
    "interpreter": Shape(32, 32, 32, 4, 4, 1, 1),
}


@triton.jit
def _read(source, row, k, rows, C, BR: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """[BR, BK] of source [rows, C] from (row, k) on; zeros outside."""
    if TMA:
        return source.load([row, k])
    else:
        r = row + tl.arange(0, BR)
        c = k + tl.arange(0, BK)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        return tl.load(source + r[:, None].to(tl.int64) * C + c[None, :], mask=inside, other=0.0)


@triton.jit
def _write(to, value, row, col, rows, cols, stride, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    """value [BM, BN] into `to` [rows, cols] from (row, col) on; what lies outside is left out."""
    if TMA:
        to.store([row, col], value.to(to.dtype))
    else:
        r = row + tl.arange(0, BM)
        c = col + tl.arange(0, BN)
        inside = (r < rows)[:, None] & (c < cols)[None, :]
        tl.store(to + r[:, None].to(tl.int64) * stride + c[None, :], value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _add_product(to, a, b):
    """to + a b^T in fp32."""
    if _INTERPRETED:  # it cannot multiply bf16
        return tl.dot(a.to(tl.float32), b.to(tl.float32).T, to, input_precision="ieee")
    else:
        return tl.dot(a, b.T, to, input_precision="ieee")


@triton.jit
def _slices(a, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """[BM, BN] as a tuple of PARTS (a power of two) of [BM, BN / PARTS], from left to right."""
    if PARTS == 1:
        return (a,)
    else:
        left, right = a.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        return _slices(left, BM, BN // 2, PARTS // 2) + _slices(right, BM, BN // 2, PARTS // 2)


@triton.jit
def _scores(x, g, w, abs_w, row, col, t, n, C, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """x w^T and g abs_w^T of [BM, BN] from (row, col) on, fp32; factors of fp8 rows are not in them."""
    loc = tl.zeros([BM, BN], dtype=tl.float32)
    scale = tl.zeros([BM, BN], dtype=tl.float32)
    for k in tl.range(0, C, BK):
        a = _read(g, row, k, t, C, BM, BK, TMA)
        b = _read(abs_w, col, k, n, C, BN, BK, TMA)
        kept, step = scale, scale
        if g.dtype.is_fp8():  # a sum of its own for BK products, added while the tensor cores make the other
            step = tl.zeros([BM, BN], dtype=tl.float32)
        step = _add_product(step, a, b)
        a = _read(x, row, k, t, C, BM, BK, TMA)
        b = _read(w, col, k, n, C, BN, BK, TMA)
        loc = _add_product(loc, a, b)
        scale = step
        if g.dtype.is_fp8():
            scale = kept + step
    return loc, scale


@triton.jit(do_not_specialize=["t", "n"])
def _fused_kernel(
    x,  # [t, C] in: a descriptor of [BM, BK], or a pointer
    g,  # [t, C] in, as x
    w,  # [n, C] in: of [BN, BK]
    abs_w,  # [n, C] in, as w
    d_loc,  # [t, n] out: of [BM, BN / PARTS]
    d_scale,  # [t, n] out, as d_loc
    g_factor_ptr,  # [t] fp32 in, if FACTORS
    w_factor_ptr,  # [n] fp32 in, if FACTORS
    offset_ptr,  # [n] fp32 in
    target_ptr,  # [t] int64 in
    token_weights_ptr,  # [t] fp32 in, factor of the gradients
    class_weights_ptr,  # [n] fp32 in, if HAS_CLASS_WEIGHTS
    loss_ptr,  # [n/BN, t] fp32 out
    prob_ptr,  # [n/BN, t] fp32 out, if WANT_PROB_SUM
    gap_ptr,  # [t/BM, n] fp32 out, if WANT_GAP
    t,
    n,
    C,
    stride,  # of a row of d_loc, d_scale
    WITH_GRAD: tl.constexpr,
    FACTORS: tl.constexpr,
    HAS_CLASS_WEIGHTS: tl.constexpr,
    WANT_PROB_SUM: tl.constexpr,
    WANT_GAP: tl.constexpr,
    SLOPE_LIMIT: tl.constexpr,
    SKIP_LABELS: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    WIDTH: tl.constexpr = BN // PARTS
    token_blocks = tl.cdiv(t, BM)
    word_blocks = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), token_blocks * word_blocks, tl.num_programs(0)):
        first = tile // (GROUP * token_blocks) * GROUP
        together = tl.minimum(word_blocks - first, GROUP)
        within = tile % (GROUP * token_blocks)
        word_block = first + within % together
        token_block = within // together
        row = token_block * BM
        col = word_block * BN

        loc, scale = _scores(x, g, w, abs_w, row, col, t, n, C, BM, BN, BK, TMA)

        rows = row + tl.arange(0, BM)
        in_rows = rows < t
        target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
        # A label of a later tile is no column, not even a padded one
        target = tl.where(target < n, target, -1).to(tl.int32)
        token_weights = tl.load(token_weights_ptr + rows, mask=in_rows, other=0.0) * _INV_PI
        g_factor = token_weights
        if FACTORS:
            g_factor = tl.load(g_factor_ptr + rows, mask=in_rows, other=0.0)
        loss = tl.zeros([BM], dtype=tl.float32)
        prob = tl.zeros([BM], dtype=tl.float32)
        locs = _slices(loc, BM, BN, PARTS)
        scales = _slices(scale, BM, BN, PARTS)
        for part in tl.static_range(PARTS):
            at = col + part * WIDTH
            cols = at + tl.arange(0, WIDTH)
            in_cols = cols < n
            offset = tl.load(offset_ptr + cols, mask=in_cols, other=_FAR)  # a padded column adds nothing
            s = scales[part]
            if FACTORS:
                s = s * g_factor[:, None] * tl.load(w_factor_ptr + cols, mask=in_cols, other=0.0)[None, :]
            class_weights = offset
            if HAS_CLASS_WEIGHTS:
                class_weights = tl.load(class_weights_ptr + cols, mask=in_cols, other=0.0)
            term, p, slope_loc, slope_scale = _entries(
                offset[None, :] - locs[part],
                s,
                cols[None, :] == target[:, None],
                token_weights[:, None],
                class_weights[None, :],
                WITH_GRAD,
                HAS_CLASS_WEIGHTS,
                SLOPE_LIMIT,
                SKIP_LABELS,
            )
            loss -= tl.sum(term, 1)
            if WANT_PROB_SUM:
                prob += tl.sum(p, 1)
            if WANT_GAP:
                tl.store(gap_ptr + token_block * n + cols, tl.sum(slope_loc, 0), mask=in_cols)
            if WITH_GRAD:
                _write(d_loc, slope_loc, row, at, t, n, stride, BM, WIDTH, TMA)
                _write(d_scale, slope_scale, row, at, t, n, stride, BM, WIDTH, TMA)
        tl.store(loss_ptr + word_block * t + rows, loss, mask=in_rows)
        if WANT_PROB_SUM:
            tl.store(prob_ptr + word_block * t + rows, prob, mask=in_rows)


class FusedTile(TileMaths):
    """`TileMaths` by the kernel above: no scores in memory, both gradients in one tensor."""

    stacked = True

    def __init__(self, fp8: bool = False, shape: Shape | None = None) -> None:
        super().__init__(fp8)
        self.shape = shape

    def rows(self, a: Tensor) -> ScaledRows:
        """e4m3 in its own dtype where the device multiplies it (from sm_89 on)."""
        if not self.fp8:
            return ScaledRows(a)
        own = a.is_cuda and torch.cuda.get_device_capability(a.device) >= (8, 9)
        return fp8_rows(a, torch.float8_e4m3fn if own else a.dtype)

    def __call__(self, tile: Tile, with_grad: bool) -> Tensor:  # [2, t, n]
        (t, c), n = tile.x.shape, len(tile.w)
        d = tile.low
        if not (t and n):
            return d
        device = tile.x.device
        shape = self.shape or default_shape(device, tile.g.values.dtype.itemsize == 1)
        word_blocks, token_blocks = triton.cdiv(n, shape.bn), triton.cdiv(t, shape.bm)
        new = lambda *size: tile.offset.new_empty(size)  # noqa: E731
        loss, prob = new(word_blocks, t), new(word_blocks, t if tile.prob_sum is not None else 0)
        gap = new(token_blocks, n if tile.gap_sum is not None else 0)
        operands = (tile.x, tile.g.values, tile.w, tile.abs_w.values)
        tma = _can_tma(operands)
        boxes = ([shape.bm, shape.bk],) * 2 + ([shape.bn, shape.bk],) * 2 + ([shape.bm, shape.bn // shape.parts],) * 2
        tensors = (*operands, *(d if with_grad else (tile.x, tile.x)))
        _fused_kernel[(min(token_blocks * word_blocks, _processors(device) * shape.programs),)](
            *(TensorDescriptor.from_tensor(a, box) if tma else a for a, box in zip(tensors, boxes, strict=True)),
            tile.g.factor,
            tile.abs_w.factor,
            tile.offset,
            tile.target,
            tile.token_weights,
            tile.offset if tile.class_weights is None else tile.class_weights,
            loss,
            prob,
            gap,
            t,
            n,
            c,
            d.stride(1),
            WITH_GRAD=with_grad,
            FACTORS=tile.g.factor is not None,
            HAS_CLASS_WEIGHTS=tile.class_weights is not None,
            WANT_PROB_SUM=tile.prob_sum is not None,
            WANT_GAP=tile.gap_sum is not None,
            SLOPE_LIMIT=tile.slope_limit,
            SKIP_LABELS=tile.skip_labels,
            TMA=tma,
            BM=shape.bm,
            BN=shape.bn,
            BK=shape.bk,
            PARTS=shape.parts,
            GROUP=GROUP,
            num_warps=shape.warps,
            num_stages=shape.stages,
            enable_fp_fusion=True,  # triton 3.10 leaves it off
        )
        tile.per_token.add_(loss.sum(0, dtype=torch.float64))
        for total, parts in ((tile.prob_sum, prob), (tile.gap_sum, gap)):
            if total is not None:
                total.add_(parts.sum(0, dtype=total.dtype))
        return d


def default_shape(device: torch.device, fp8: bool = False) -> Shape:
    """The cut for a device; off CUDA that of the interpreter."""
    if device.type != "cuda":
        return SHAPES["interpreter"]
    if not _is_hopper(device):
        return SHAPES["sm_80"]
    return SHAPES["sm_90 fp8" if fp8 else "sm_90"]


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether it has TMA and 228 KiB of shared memory, as sm_90 and sm_100 have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _can_tma(operands: Sequence[Tensor]) -> bool:
    """Whether the operands can be read by descriptors. The interpreter knows them too."""
    device = operands[0].device
    able = TensorDescriptor is not None and (device.type != "cuda" or _is_hopper(device))
    return able and all(a.stride(0) * a.itemsize % 16 == 0 for a in operands)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
