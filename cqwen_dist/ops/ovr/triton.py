"""The tile maths as one Triton kernel between the GEMMs, for CUDA.

cuBLAS computes the six products. The kernel reads loc and scale once and writes both gradients once, in the dtype of
the GEMMs. One program handles BM tokens and loops over all n words of the tile in steps of BN. So the loss of a token
is summed by one program in a fixed order: no atomics, reproducible bits.

    reads   loc, scale [t, n], offset, class weights [n], token weights [t], all fp32; target [t] int64
    writes  d_loc, d_scale [t, n] (fp32 in place, or bf16/fp16)
    adds    per_token [t], prob_sum [t], label_loc [t] fp64
    writes  the sum of d_loc over each program's tokens [t / BM, n], without the softmax term, for C's gradient

A select is free here, so one angle (the smaller of pi P and pi (1-P)) and one logarithm of each kind are enough. atan
and log1p are polynomials (least squares at Chebyshev nodes, relative error below 1e-8 before rounding). Triton has
neither, and its interpreter, which tests this kernel on a CPU, has no libdevice.

Shape letters: t tokens and n words of the tile, BM x BN one step of a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cqwen_dist.ops.ovr.tile import MIN_DENOMINATOR, MIN_SCALE, Tile, TileMaths
from cqwen_dist.tiles import ROW_NUMBERS, WORK_BUFFERS

BLOCK_TOKENS, BLOCK_WORDS = 16, 128
_INV_PI = tl.constexpr(0.3183098861837907)
_HALF_PI = tl.constexpr(1.5707963267948966)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MIN_DENOMINATOR = tl.constexpr(MIN_DENOMINATOR)
_FAR = tl.constexpr(1e18)  # a gap of this size gives zero loss, slope and P, and its square is still finite
_LOG_2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _over(a, b):
    """a / b for b in [2^-126, 2^126]: two instructions instead of ten; error 2 ulp."""
    if _INTERPRETED:
        return a / b
    else:
        one = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
        return a * one


@triton.jit
def _log2(a):
    """log2 a for a > 0 in four instructions instead of twenty; relative error 2^-22 below 1/2."""
    if _INTERPRETED:
        return tl.log2(a)
    else:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _angle(y, x):
    """atan2(y, x) for y > 0, x >= 0: [0, pi/2], relative precision throughout."""
    r = _over(tl.minimum(y, x), tl.maximum(y, x))
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
    y = _over(x, 2.0 - x)
    u = y * y
    p = 0.1219878313 * u + 0.1069877408
    p = p * u + 0.1431015268
    p = p * u + 0.1999935369
    p = p * u + 0.3333333954
    p = p * u + 0.9999999999
    return -2.0 * y * p


@triton.jit
def _entries(
    d,  # [BM, BN] C - loc_S
    s,  # [BM, BN] scale_S
    is_label,  # [BM, BN]
    token_weights,  # [BM, 1] over pi: factor of the gradients
    class_weights,  # [1, BN], if HAS_CLASS_WEIGHTS
    WITH_GRAD: tl.constexpr,
    HAS_CLASS_WEIGHTS: tl.constexpr,
    SLOPE_LIMIT: tl.constexpr,
):
    """(class weight * log probability, P, dloss/dloc, dloss/dscale), [BM, BN] each.

    The gradients are undefined without WITH_GRAD. A column with d = FAR adds 0 to all sums.
    """
    s = tl.maximum(s, _MIN_SCALE)
    d = tl.where(is_label, -d, d)
    rare = d > 0.0
    small = _angle(s, tl.abs(d)) * _INV_PI  # the smaller of P and 1-P
    term = tl.where(rare, _log1m(small), _log2(small) * _LOG_2)
    p = tl.where(rare != is_label, small, 1.0 - small)  # of the word, on either side of C
    d_loc, d_scale = d, s
    if WITH_GRAD:
        rest = tl.where(rare, 1.0 - small, small)
        f = _over(token_weights, (d * d + s * s) * rest + _MIN_DENOMINATOR)
        slope = s * f
        if SLOPE_LIMIT > 0:  # the limit is per unit of weight, so it scales with the weights
            most = tl.abs(token_weights) * (SLOPE_LIMIT * 3.141592653589793)
            slope = tl.minimum(tl.maximum(slope, -most), most)
        if HAS_CLASS_WEIGHTS:
            f, slope = f * class_weights, slope * class_weights
        d_loc, d_scale = tl.where(is_label, -slope, slope), d * f
    if HAS_CLASS_WEIGHTS:
        term = term * class_weights
    return term, p, d_loc, d_scale


@triton.jit
def _add(at, value, mask):
    """Add fp32 values to fp64 memory."""
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
    gap_sums_ptr,  # [programs, n] fp32 out, if WANT_GAP_SUM
    bias_ptr,  # [n] fp32 in, if SOFTMAX_WEIGHT
    log_norm_ptr,  # [t] fp32 in, if SOFTMAX_WEIGHT
    label_loc_ptr,  # [t] fp64 added to, if SOFTMAX_WEIGHT
    t,
    n,
    stride,  # row stride of the four matrices
    WITH_GRAD: tl.constexpr,
    HAS_CLASS_WEIGHTS: tl.constexpr,
    WANT_PROB_SUM: tl.constexpr,
    WANT_GAP_SUM: tl.constexpr,
    SLOPE_LIMIT: tl.constexpr,
    SOFTMAX_WEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    in_rows = rows < t
    target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
    target = tl.where(target < n, target, -1)  # a label of a later tile must not match a padded column
    token_weights = tl.load(token_weights_ptr + rows, mask=in_rows, other=0.0) * _INV_PI
    loss = tl.zeros([BM], dtype=tl.float32)
    prob = tl.zeros([BM], dtype=tl.float32)
    own = tl.zeros([BM], dtype=tl.float32)
    log_norm = own
    if SOFTMAX_WEIGHT > 0:
        log_norm = tl.load(log_norm_ptr + rows, mask=in_rows, other=0.0)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        in_cols = cols < n
        inside = in_rows[:, None] & in_cols[None, :]
        at = rows[:, None].to(tl.int64) * stride + cols[None, :]
        loc = tl.load(loc_ptr + at, mask=inside, other=0.0)
        scale = tl.load(scale_ptr + at, mask=inside, other=1.0)
        offset = tl.load(offset_ptr + cols, mask=in_cols, other=_FAR)  # padded columns add 0
        w = offset
        if HAS_CLASS_WEIGHTS:
            w = tl.load(class_weights_ptr + cols, mask=in_cols, other=0.0)
        is_label = cols[None, :] == target[:, None]
        term, p, d_loc, d_scale = _entries(
            offset[None, :] - loc,
            scale,
            is_label,
            token_weights[:, None],
            w[None, :],
            WITH_GRAD,
            HAS_CLASS_WEIGHTS,
            SLOPE_LIMIT,
        )
        loss -= tl.sum(term, 1)
        if WANT_PROB_SUM:
            prob += tl.sum(p, 1)
        if WANT_GAP_SUM:
            tl.store(gap_sums_ptr + tl.program_id(0) * n + cols, tl.sum(d_loc, 0), mask=in_cols)
        if SOFTMAX_WEIGHT > 0:
            loc += tl.load(bias_ptr + cols, mask=in_cols, other=0.0)[None, :]
            own += tl.sum(tl.where(is_label, loc, 0.0), 1)
            soft = tl.exp(tl.where(inside, loc - log_norm[:, None], 0.0)) - tl.where(is_label, 1.0, 0.0)
            d_loc += soft * (token_weights * (SOFTMAX_WEIGHT * 3.141592653589793))[:, None]
        if WITH_GRAD:
            tl.store(d_loc_ptr + at, d_loc.to(d_loc_ptr.dtype.element_ty), mask=inside)
            tl.store(d_scale_ptr + at, d_scale.to(d_scale_ptr.dtype.element_ty), mask=inside)
    _add(per_token_ptr + rows, loss, in_rows)
    if WANT_PROB_SUM:
        _add(prob_sum_ptr + rows, prob, in_rows)
    if SOFTMAX_WEIGHT > 0:
        _add(label_loc_ptr + rows, own, in_rows)


@triton.jit
def _norm_kernel(
    loc_ptr,  # [t, n] fp32 in: loc_S without bias
    bias_ptr,  # [n] fp32 in
    norm_ptr,  # [t] fp32 out
    t,
    n,
    stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """log sum exp of each row in one pass: the sum is kept relative to the largest entry so far."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    in_rows = rows < t
    most = tl.full([BM], -3e38, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        inside = in_rows[:, None] & (cols < n)[None, :]
        at = rows[:, None].to(tl.int64) * stride + cols[None, :]
        bias = tl.load(bias_ptr + cols, mask=cols < n, other=0.0)
        loc = tl.load(loc_ptr + at, mask=inside, other=0.0) + bias[None, :]
        loc = tl.where(inside, loc, -3e38)
        new = tl.maximum(most, tl.max(loc, 1))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(loc - new[:, None]), 1)
        most = new
    tl.store(norm_ptr + rows, most + tl.log(total), mask=in_rows)


class TritonTile(TileMaths):
    """Runs the kernel above on the scores of a tile; fp32 only."""

    reads_gap = False
    buffers, multiple = WORK_BUFFERS["triton"], ROW_NUMBERS

    def log_norm(self, tile: Tile) -> Tensor:
        t, n = tile.work[0].shape
        norm = tile.work.new_full((t,), -math.inf)
        if t and n:
            grid, blocks = (triton.cdiv(t, BLOCK_TOKENS),), {"BM": BLOCK_TOKENS, "BN": BLOCK_WORDS}
            _norm_kernel[grid](tile.work[0], tile.bias, norm, t, n, tile.work[0].stride(0), **blocks)
        return norm

    def __call__(self, tile: Tile, with_grad: bool) -> Sequence[Tensor]:
        loc, scale = tile.work
        t, n = loc.shape
        programs, soft = triton.cdiv(t, BLOCK_TOKENS), tile.log_norm is not None
        gap_sums = loc.new_empty(programs if with_grad and tile.gap_sum is not None else 0, n)
        # In fp32 the gradients overwrite the scores: a program has read an entry before it writes it
        d_loc, d_scale = tile.low if len(tile.low) else (scale, loc)
        if t and n:
            _tile_kernel[(programs,)](
                loc,
                scale,
                d_loc,
                d_scale,
                tile.offset,
                tile.target,
                tile.token_weights,
                tile.offset if tile.class_weights is None else tile.class_weights,
                tile.per_token,
                tile.per_token if tile.prob_sum is None else tile.prob_sum,
                gap_sums if len(gap_sums) else loc,
                tile.bias,
                tile.log_norm if soft else loc,
                tile.label_loc if soft else tile.per_token,
                t,
                n,
                loc.stride(0),
                WITH_GRAD=with_grad,
                HAS_CLASS_WEIGHTS=tile.class_weights is not None,
                WANT_PROB_SUM=tile.prob_sum is not None,
                WANT_GAP_SUM=len(gap_sums) > 0,
                SLOPE_LIMIT=tile.terms.slope_limit,
                SOFTMAX_WEIGHT=tile.terms.softmax_weight if soft else 0.0,
                BM=BLOCK_TOKENS,
                BN=BLOCK_WORDS,
                enable_fp_fusion=True,  # off by default in Triton 3.10
            )
        if len(gap_sums) and tile.gap_sum is not None:
            tile.gap_sum.add_(gap_sums.sum(0))
        if tile.bias_sum is not None:
            tile.bias_sum.add_(d_loc.sum(0, dtype=tile.bias_sum.dtype))
        return d_loc, d_scale
