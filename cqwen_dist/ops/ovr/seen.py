"""Statistics collected in the loss pass: the best word, the softmax normaliser, counts above thresholds.

The pass hands over each tile's scores before the loss overwrites them, so an evaluation multiplies by W_cls once.

Shape letters: N tokens, v words of the slice, t x n a tile, B blocks of words.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import LISTED, first_best, strength
from cqwen_dist.ops.ovr.head import WordHead, chunk_rows
from cqwen_dist.ops.products import gemm_dtype
from cqwen_dist.tiles import CHUNK_BYTES, kind_of

RankBy = Literal["ovr", "loc"]


class Wanted(NamedTuple):
    """Options: statistics besides the best word."""

    below: int | None = None  # ids from this one on are neither the best word nor counted
    norm: bool = False  # also the normaliser
    thresholds: Sequence[float] = ()  # each in (0, 1): count the words with a larger P


class TopWord(NamedTuple):
    """The best word of each token."""

    score: Tensor  # [N] fp32: the ranking score
    loc: Tensor  # [N] fp32: loc_S
    word: Tensor  # [N] int64, id in the full vocabulary


class Seen:
    """Finds it for N tokens, tile by tile.

    The best word has the largest decision strength z = (loc_S - C)/scale_S (S4 3.3.3), which orders words like P but
    does not saturate; P = atan2(1, -z)/pi. Scale 0 gives -+inf, or 0 if loc_S = C. Ties are broken by loc_S, then by
    the lower id. Without words the score is -inf and the word -1.
    """

    def __init__(self, n: int, head: WordHead, wanted: Wanted) -> None:
        self.head, self.used, self.wanted = head, head._replace(used_rows=wanted.below).rows, wanted
        real, device = head.real, head.weight.device
        self.log_norm = torch.full((n,), -torch.inf, dtype=real, device=device)  # log sum_k exp(loc_S,k)
        self.above = torch.zeros(n, len(wanted.thresholds), dtype=real, device=device)  # [N, thresholds]
        self.slopes = [math.tan(math.pi * (p - 0.5)) for p in wanted.thresholds]
        self.of_blocks: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # the best word of each block, by pieces of N
        self.work = torch.empty(2, 0, dtype=real, device=device)  # scratch: new memory for each tile costs a product

    @torch.no_grad()
    def add(self, some: slice, first: int, gap: Tensor, scale: Tensor | None, offset: Tensor | None = None) -> None:
        """Add a tile: C - loc_S and scale_S [t, n] of the tokens `some` and of n words from the row `first`.

        All tokens of a block of words come before those of the next. scale: None ranks by loc_S; gap is then -loc_S.
        offset [n]: if given, C - loc_S is `offset - gap`.
        """
        if some.start == 0:
            self.of_blocks.append([])
        threshold = self.head.threshold.detach().to(gap.dtype)
        threshold = threshold[first : first + gap.shape[1]] if threshold.ndim else threshold
        threshold = torch.zeros_like(threshold) if scale is None else threshold
        used = max(0, min(gap.shape[1], self.used - first))
        step = max(1, CHUNK_BYTES[kind_of(gap.device.type)] // (4 * max(1, gap.shape[1])))
        for at in range(0, len(gap), step):
            rows, own = slice(at, at + step), slice(some.start + at, min(some.stop, some.start + at + step))
            part = gap[rows] if offset is None else offset - gap[rows]
            self._add(own, first, part, None if scale is None else scale[rows], threshold, used)

    def _add(self, own: slice, first: int, gap: Tensor, scale: Tensor | None, threshold: Tensor, used: int) -> None:
        if self.work.shape[1] < gap.numel():
            self.work = gap.new_empty(2, gap.numel())
        loc, z = self.work[:, : gap.numel()].view(2, *gap.shape)
        torch.sub(threshold, gap, out=loc)
        if self.wanted.norm:  # the largest logit minus its log-probability; on a CPU twice as fast as logsumexp
            torch.log_softmax(loc, 1, out=z)
            self.log_norm[own] = torch.logaddexp(self.log_norm[own], loc.amax(1) - z.amax(1))
        if not used:
            return
        loc, gap, z = loc[:, :used], gap[:, :used], z[:, :used]
        least = torch.finfo(gap.dtype).tiny * torch.finfo(gap.dtype).eps  # by scale 0 z is -+inf, or 0 where the gap is
        z = loc if scale is None else torch.div(gap, torch.clamp(scale[:, :used], min=least, out=z), out=z).neg_()
        for i, slope in enumerate(self.slopes):  # P > p is z > tan(pi (p - 1/2))
            self.above[own, i] += (z > slope).sum(1)
        at = first_best(z, loc)[:, None]
        self.of_blocks[-1].append((z.gather(1, at)[:, 0], loc.gather(1, at)[:, 0], at[:, 0] + first))

    @torch.no_grad()
    def finish(self, u: Cauchy, passed: WordHead) -> TopWord:
        """The best words after a pass over `passed`, for U' [N, C]; adds the other rows to the normaliser.

        If scores were rounded to bf16 (`gap_into`), the best few are compared in fp32.
        """
        rest = self.head.take(slice(passed.rows, None))
        if self.wanted.norm and len(u.loc):
            for v0 in range(0, len(rest.weight), step := chunk_rows(u.loc)):
                loc = rest.take(slice(v0, v0 + step)).loc(u)
                self.log_norm = torch.logaddexp(self.log_norm, loc.logsumexp(1))
        return self.best(u, u.loc.device.type == "cpu" and gemm_dtype(u.loc.dtype, u.loc.device) != self.head.real)

    def best(self, u: Cauchy, rounded: bool = False) -> TopWord:
        """The best words so far."""
        blocks = [tuple(torch.cat(part) for part in zip(*block, strict=True)) for block in self.of_blocks if block]
        if not blocks:
            none = self.log_norm.new_full((len(self.log_norm),), -torch.inf).float()
            return TopWord(none, none, torch.full(none.shape, -1, device=none.device))
        key, loc, word = (torch.stack(part, 1) for part in zip(*blocks, strict=True))
        if rounded:
            few = key.topk(min(LISTED, key.shape[1]), 1).indices.sort(1).values
            word = word.gather(1, few)
            law, gap = self.head.take(word).of_own(Cauchy(u.loc[:, None], u.scale[:, None]))
            key, loc = strength(gap, law.scale), law.loc
        at = first_best(key, loc)[:, None]
        key, loc, word = (part.gather(1, at)[:, 0] for part in (key, loc, word))
        return TopWord(key.float(), loc.float(), word + self.head.start)
