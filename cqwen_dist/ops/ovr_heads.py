"""What inference asks of the one-vs-rest head, over chunks of the vocabulary: never [N, v].

Shapes and dtypes as in ``cqwen_dist.ops.ovr.linear_ovr``: loc_u, scale_u [N, C], weight [v, C], bias [v] or None,
threshold [] or [v] or a float.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import prob_above
from cqwen_dist.ops.ovr_inputs import check_head, rows_in_use
from cqwen_dist.ops.products import product

CHUNK_BYTES = 8 << 20  # of one fp32 [N, n], a few of which are alive at once, and of |W|'s [n, C]


def chunk_rows(tokens: int, c: int) -> int:
    """Words n per chunk, so that neither [tokens, n] nor [n, c] in fp32 takes more than CHUNK_BYTES; at least 64."""
    return max(64, CHUNK_BYTES // (4 * max(1, tokens, c)))


def _scores(
    loc_u: Tensor, scale_u: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loc_S, scale_S, C - loc_S), [N, rows] in fp32 (fp64 for fp64), of the rows given, in the tokens' precision."""
    weight = weight.to(loc_u.dtype)
    loc, scale = product(loc_u, weight), product(scale_u, weight.abs())
    if bias is not None:
        loc = loc + bias.to(loc.dtype)
    return loc, scale, threshold.to(loc.dtype) - loc


def _tiles(
    loc_u: Tensor, scale_u: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor, rows: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(first row, loc_S, scale_S, gap) of each chunk of the first ``rows`` words."""
    step = chunk_rows(*loc_u.shape)
    for v0 in range(0, rows, step):
        part = slice(v0, min(rows, v0 + step))
        b = None if bias is None else bias[part]
        yield v0, *_scores(loc_u, scale_u, weight[part], b, threshold[part] if threshold.ndim else threshold)


@torch.no_grad()
def ovr_topk(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    k: int = 1,
    *,
    vocab_start: int = 0,
    used_rows: int | None = None,
    rank_by: Literal["ovr", "loc"] = "ovr",
) -> tuple[Tensor, Tensor]:
    """The k best words of each token.

    rank_by "ovr" ranks by the decision strength z = (loc_S - C)/scale_S (S4 3.3.3), which orders words as P does but
    does not saturate; scale 0 gives -+inf, or 0 where loc_S = C; equal z are told apart by the larger loc_S.
    "loc" ranks by loc_S alone. used_rows: words >= used_rows of the whole vocabulary are left out.

    Returns (scores [N, k] fp32: z or loc_S, best first; ids [N, k] int64 in the whole vocabulary). A slice of
    fewer than k words fills up with score -inf, id -1. P of a z is atan2(1, -z)/pi. No gradient.
    Raises ValueError for k < 1, an unknown rank_by and shapes that do not fit.
    """
    threshold = check_head(loc_u, scale_u, weight, bias, threshold)
    if k < 1 or rank_by not in ("ovr", "loc"):
        raise ValueError(f"k must be >= 1 and rank_by 'ovr' or 'loc', found {k}, {rank_by!r}")
    n = loc_u.shape[0]
    real = torch.promote_types(weight.dtype, torch.float32)
    best = loc_u.new_full((n, k), -torch.inf, dtype=real)  # key to rank by
    ties = best.clone()  # loc_S, which tells equal keys apart
    ids = torch.full((n, k), -1, dtype=torch.int64, device=loc_u.device)
    for v0, loc, scale, gap in _tiles(
        loc_u, scale_u, weight, bias, threshold, rows_in_use(weight.shape[0], vocab_start, used_rows)
    ):
        key = loc if rank_by == "loc" else torch.where(gap == 0, 0.0, -gap / scale)
        words = torch.arange(v0, v0 + loc.shape[1], device=loc.device).expand_as(loc) + vocab_start
        best, ties, ids = torch.cat([best, key], 1), torch.cat([ties, loc], 1), torch.cat([ids, words], 1)
        # The k-th best key, then by loc among the words that share it, then the k chosen in order.
        kth = best.topk(k, 1).values[:, -1:]
        pick = torch.where(best > kth, torch.inf, torch.where(best == kth, ties, -torch.inf)).topk(k, 1).indices
        best, ties, ids = best.gather(1, pick), ties.gather(1, pick), ids.gather(1, pick)
        order = torch.argsort(ties, dim=1, descending=True, stable=True)
        order = order.gather(1, torch.argsort(best.gather(1, order), dim=1, descending=True, stable=True))
        best, ties, ids = best.gather(1, order), ties.gather(1, order), ids.gather(1, order)
    return best.float(), ids


def ovr_prob_at(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    word_ids: Tensor,
    *,
    vocab_start: int = 0,
) -> Tensor:
    """P of the words ``word_ids`` [m] int64 (whole vocabulary, all inside the slice) at every token: [N, m].

    fp32 (fp64 for fp64), differentiable in all five inputs. For few words, such as <NUM>.
    Raises ValueError for shapes that do not fit and, on CPU, for a word outside the slice.
    """
    threshold = check_head(loc_u, scale_u, weight, bias, threshold)
    at = word_ids - vocab_start
    if at.device.type == "cpu" and bool(((at < 0) | (at >= weight.shape[0])).any()):
        stop = vocab_start + weight.shape[0]
        raise ValueError(f"word_ids must be in [{vocab_start}, {stop}), found {word_ids.tolist()}")
    b = None if bias is None else bias[at]
    _, scale, gap = _scores(loc_u, scale_u, weight[at], b, threshold[at] if threshold.ndim else threshold)
    return prob_above(scale, gap)


@torch.no_grad()
def ovr_prob_sum(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | float,
    *,
    vocab_start: int = 0,
    used_rows: int | None = None,
) -> Tensor:
    """sum_k P_ik over the slice's words in use: [N] fp32, no gradient. 1 is what a calibrated head comes to."""
    threshold = check_head(loc_u, scale_u, weight, bias, threshold)
    real = torch.promote_types(weight.dtype, torch.float32)
    total = loc_u.new_zeros(loc_u.shape[0], dtype=real)
    for _, _, scale, gap in _tiles(
        loc_u, scale_u, weight, bias, threshold, rows_in_use(weight.shape[0], vocab_start, used_rows)
    ):
        total += prob_above(scale, gap).sum(1)
    return total.float()
