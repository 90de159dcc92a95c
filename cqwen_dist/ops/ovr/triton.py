"""The tile's maths as one Triton kernel between the GEMMs, for CUDA.

The six products stay with cuBLAS. The kernel reads loc and scale once and writes both gradients once, in the GEMM's
dtype. A program owns BM tokens and visits all n words of the tile in steps of BN. So a token's loss is summed in one
place, in one order: no atomics, the same result every time.

    reads   loc, scale [t, n], offset, class weights [n], token weights [t], all fp32; target [t] int64
    writes  d_loc, d_scale [t, n] (fp32 in place, or bf16/fp16)
    adds    per_token [t], prob_sum [t] fp64

Here a select is free, so one angle is enough, the smaller of pi P and pi (1-P), and one logarithm of each kind. atan
and log1p are polynomials (least squares at Chebyshev nodes, relative error below 1e-8 before rounding): Triton has
neither, and its interpreter, which checks this kernel on a CPU, has no libdevice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cqwen_dist.ops.ovr.tile import FAR, MIN_DENOMINATOR, MIN_SCALE, Tile

BLOCK_TOKENS, BLOCK_WORDS = 16, 128
_INV_PI = tl.constexpr(0.3183098861837907)
_HALF_PI = tl.constexpr(1.5707963267948966)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MIN_DENOMINATOR = tl.constexpr(MIN_DENOMINATOR)
_FAR = tl.constexpr(FAR)


@triton.jit
def _angle(y, x):
    """atan2(y, x) for y > 0, x >= 0: [0, pi/2], relative precision throughout."""
    r = tl.minimum(y, x) / tl.maximum(y, x)
    u = r * r
    p = -0.00171113743 * u + 0.01053308235
    p = p * u - 0.03043831164
    p = p * u + 0.05717845684
    p = p * u - 0.08355068439
    p = p * u + 0.1093423499
    p = p * u - 0.1426039479
    p = p * u + 0.1999811347
    p = p * u - 0.3333327779
    p = p * u + 0.9999999973
    return tl.where(y > x, _HALF_PI - r * p, r * p)


@triton.jit
def _log1m(x):
    """log(1 - x) for 0 <= x <= 1/2, as -2 atanh(x / (2 - x))."""
    y = x / (2.0 - x)
    u = y * y
    p = 0.1219878313 * u + 0.1069877408
    p = p * u + 0.1431015268
    p = p * u + 0.1999935369
    p = p * u + 0.3333333954
    p = p * u + 0.9999999999
    return -2.0 * y * p


@triton.jit
def _limited(slope, weights, MOST: tl.constexpr):
    """A slope [BM, BN] with the token's weight [BM] (over pi) in it, cut to MOST before that weight; 0: as it is."""
    if MOST > 0:
        most = tl.abs(weights)[:, None] * (MOST * 3.141592653589793)
        slope = tl.minimum(tl.maximum(slope, -most), most)
    return slope


@triton.jit
def _label_side(d, is_label, SKIP_LABELS: tl.constexpr):
    """(d [BM, BN] negated at the labels, the labels); skipped ones are far below C, and no labels any more."""
    if SKIP_LABELS:
        d = tl.where(is_label, _FAR, d)
        is_label = is_label & False
    return tl.where(is_label, -d, d), is_label


@triton.jit
def _add(at, value, mask):
    """Add fp32 values to fp64 ones in memory."""
    tl.store(at, tl.load(at, mask=mask, other=0.0) + value.to(tl.float64), mask=mask)


@triton.jit
def _tile_kernel(
    loc_ptr,  # [t, n] fp32 in
    scale_ptr,  # [t, n] fp32 in
    d_loc_ptr,  # [t, n] out; may be scale_ptr
    d_scale_ptr,  # [t, n] out; may be loc_ptr
    offset_ptr,  # [n] fp32 in
    target_ptr,  # [t] int64 in
    token_weights_ptr,  # [t] fp32 in, factor of the gradients
    class_weights_ptr,  # [n] fp32 in, if HAS_CLASS_WEIGHTS
    per_token_ptr,  # [t] fp64 added to
    prob_sum_ptr,  # [t] fp64 added to, if WANT_PROB_SUM
    t,
    n,
    WITH_GRAD: tl.constexpr,
    HAS_CLASS_WEIGHTS: tl.constexpr,
    WANT_PROB_SUM: tl.constexpr,
    SLOPE_LIMIT: tl.constexpr,
    SKIP_LABELS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    in_rows = rows < t
    target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
    token_weights = tl.load(token_weights_ptr + rows, mask=in_rows, other=0.0) * _INV_PI
    loss = tl.zeros([BM], dtype=tl.float32)
    prob = tl.zeros([BM], dtype=tl.float32)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        in_cols = cols < n
        inside = in_rows[:, None] & in_cols[None, :]
        at = rows[:, None].to(tl.int64) * n + cols[None, :]
        loc = tl.load(loc_ptr + at, mask=inside, other=0.0)
        s = tl.maximum(tl.load(scale_ptr + at, mask=inside, other=1.0), _MIN_SCALE)
        offset = tl.load(offset_ptr + cols, mask=in_cols, other=0.0)
        is_label = cols[None, :] == target[:, None]
        d, is_label = _label_side(offset[None, :] - loc, is_label, SKIP_LABELS)
        rare = d > 0.0
        small = _angle(s, tl.abs(d)) * _INV_PI  # the smaller of P and 1-P (of this entry: 1-P and P at a label)
        log_small = tl.log(small)
        term = tl.where(rare, _log1m(small), log_small)
        if HAS_CLASS_WEIGHTS:
            w = tl.load(class_weights_ptr + cols, mask=in_cols, other=0.0)
            term = term * w[None, :]
        loss -= tl.sum(tl.where(inside, term, 0.0), 1)
        if WANT_PROB_SUM:
            p = tl.where(rare != is_label, small, 1.0 - small)
            prob += tl.sum(tl.where(inside, p, 0.0), 1)
        if WITH_GRAD:
            rest = tl.where(rare, 1.0 - small, small)
            f = token_weights[:, None] / ((d * d + s * s) * rest + _MIN_DENOMINATOR)
            slope = _limited(s * f, token_weights, SLOPE_LIMIT)
            if HAS_CLASS_WEIGHTS:
                f, slope = f * w[None, :], slope * w[None, :]
            d_loc = tl.where(is_label, -slope, slope)
            tl.store(d_loc_ptr + at, d_loc.to(d_loc_ptr.dtype.element_ty), mask=inside)
            tl.store(d_scale_ptr + at, (d * f).to(d_scale_ptr.dtype.element_ty), mask=inside)
    _add(per_token_ptr + rows, loss, in_rows)
    if WANT_PROB_SUM:
        _add(prob_sum_ptr + rows, prob, in_rows)


class TritonTile:
    """`TileMaths` by the kernel above; no work buffers. fp32 only."""

    buffers = 0

    def __call__(self, tile: Tile, with_grad: bool) -> tuple[Tensor, Tensor]:
        t, n = tile.loc.shape
        d_loc, d_scale = tile.low if tile.low else (tile.scale, tile.loc)
        if t and n:
            _tile_kernel[(triton.cdiv(t, BLOCK_TOKENS),)](
                tile.loc,
                tile.scale,
                d_loc,
                d_scale,
                tile.offset,
                tile.target,
                tile.token_weights,
                tile.offset if tile.class_weights is None else tile.class_weights,
                tile.per_token,
                tile.per_token if tile.prob_sum is None else tile.prob_sum,
                t,
                n,
                WITH_GRAD=with_grad,
                HAS_CLASS_WEIGHTS=tile.class_weights is not None,
                WANT_PROB_SUM=tile.prob_sum is not None,
                SLOPE_LIMIT=tile.slope_limit,
                SKIP_LABELS=tile.skip_labels,
                BM=BLOCK_TOKENS,
                BN=BLOCK_WORDS,
            )
        return d_loc, d_scale
