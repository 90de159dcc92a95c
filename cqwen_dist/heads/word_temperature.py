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
    value = z.new_full((len(z), len(_FACTORS), INDIVIDUALS), -math.inf)
    word, most = value.nan_to_num().long(), min(MOST, used.rows)
    for i, scale in enumerate(u.scale):
        eps = torch.rand(INDIVIDUALS, len(scale), generator=draw).to(scale)  # the same on all ranks
        drawn = Cauchy(torch.zeros_like(scale), scale).sample(eps.clamp(WORD_TAILS, 1 - WORD_TAILS))
        shift = product(drawn, head.weight) / wide
        # The best at some T is among the largest of one of the two
        own, moved = z[i].topk(most).indices.expand(INDIVIDUALS, most), shift.topk(most).indices
        words = torch.cat([own, moved], 1)
        base, slope = z[i][words], shift.gather(1, words)
        for j, factor in enumerate(_FACTORS if most else ()):
            value[i, j], best = (base + float(factor) * slope).max(1)
            word[i, j] = words.gather(1, best[:, None])[:, 0]
    if not one:
        best = gather_rows(value, vocab).argmax(0)[None]
        word = gather_rows(word + used.start, vocab).gather(0, best)[0]
    ordered = word.sort(-1).values
    distinct = 1.0 + (ordered.diff(dim=-1) != 0).double().sum(-1).mean(0).cpu().numpy()
    return float(np.exp(np.interp(softmax, np.maximum.accumulate(distinct), np.log(_FACTORS))))
