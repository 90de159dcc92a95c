"""How many times as wide as inferred an individual is drawn for its words.

One-vs-rest learns scales that are small beside the gaps between words, so all individuals would write one text. With
this factor T the words of individuals differ as much as those of softmax(loc_S): at a position, so many draws choose on
average as many different words,

    softmax        sum_k 1 - (1 - p_k)^n
    individuals    the different argmax P among n draws, z_k = (loc_S,k - C_k + T W_k (scale tan)) / (|W_k| |b_noise|)

z is linear in T, so two products serve all T. The tails of eps are cut (`WORD_TAILS`): a Cauchy's largest dimension
outweighs all other dimensions, and its individual repeats one odd word.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.heads.intervals import WORD_TAILS
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.products import product
from cqwen_dist.parallel.collectives import gather_rows
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.mappings import exchange_counts, sum_partials
from cqwen_dist.parallel.vocab_parallel import gather_law

POSITIONS, INDIVIDUALS = 64, 16
MOST = 2048  # words by z, and as many by what T multiplies
_FACTORS = np.logspace(-1, 7, 65)


@torch.no_grad()
def word_temperature(action: Any, u: Cauchy, used_rows: int | None, groups: Groups) -> float:
    """The factor, measured on at most `POSITIONS` of all ranks' positions.

    action: an `ActionNetwork`. u: U [N,C] at this rank's positions; N may differ and be 0. used_rows: words from this
    row on are never written. 1.0 without positions. Collective over the world; all ranks get the same.
    """
    u, vocab = action.word_part(u), groups.vocab
    u = gather_law(u, exchange_counts(len(u.loc), groups.world, u.loc.device), groups.world)
    if not len(u.loc):
        return 1.0
    at = torch.linspace(0, len(u.loc) - 1, min(len(u.loc), POSITIONS), device=u.loc.device).long()
    u, used = Cauchy(u.loc[at], u.scale[at]), action.word_head(used_rows)
    head = used.take(slice(0, used.rows))
    one = groups.vocab_size == 1

    loc = head.loc(u)
    norm = loc.logsumexp(1) if head.rows else loc.new_full((len(loc),), -math.inf)
    p = (loc - (norm if one else gather_rows(norm, vocab).logsumexp(0))[:, None]).double().exp().clamp(max=1 - 1e-12)
    softmax = float(sum_partials(-torch.expm1(INDIVIDUALS * torch.log1p(-p)).sum(), vocab)) / len(loc)

    wide = product(action.b_noise[None, : action.word_size].abs(), head.weight.abs())
    wide = wide.where(wide > 0, 1.0)  # without noise words are ranked by loc_S - C
    z, draw = (loc - head.threshold) / wide, torch.Generator().manual_seed(0)
    most, parts = min(MOST, used.rows), list[tuple[Tensor, Tensor, Tensor]]()
    for own, scale in zip(z, u.scale, strict=True):
        eps = torch.rand(INDIVIDUALS, len(scale), generator=draw).to(scale)  # the same on all ranks
        drawn = Cauchy(torch.zeros_like(scale), scale).sample(eps.clamp(WORD_TAILS, 1 - WORD_TAILS))
        shift = product(drawn, head.weight) / wide
        # The best at some T is among the largest of one of the two
        words = torch.cat([own.topk(most).indices.expand(INDIVIDUALS, most), shift.topk(most).indices], 1)
        parts.append((words, own[words], shift.gather(1, words)))
    words, base, slope = (torch.stack(part) for part in zip(*parts, strict=True))
    if not most:  # none of this rank's words is ever written
        words, base = words.new_zeros(*words.shape[:2], 1), base.new_full((*base.shape[:2], 1), -math.inf)
        slope = torch.zeros_like(base)

    def distinct(factor: float) -> float:
        value, best = (base + factor * slope).max(-1)
        word = words.gather(-1, best[..., None])[..., 0] + used.start
        if not one:
            at = gather_rows(value, vocab).argmax(0)[None]
            word = gather_rows(word, vocab).gather(0, at)[0]
        return 1.0 + float((word.sort(-1).values.diff(dim=-1) != 0).double().sum(-1).mean())

    # Between two neighbours of the grid: the number of different words rises with T
    counts, low, high = dict[int, float](), -1, len(_FACTORS)
    while high - low > 1:
        middle = (low + high) // 2
        counts[middle] = distinct(float(_FACTORS[middle]))
        low, high = (middle, high) if counts[middle] < softmax else (low, middle)
    near = [j for j in (low, high) if j in counts]
    return float(np.exp(np.interp(softmax, [counts[j] for j in near], np.log(_FACTORS[near]))))
