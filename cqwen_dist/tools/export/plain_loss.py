"""`mean_loss` in plain torch, for the code in an exported folder: no ranks, no kernels, and never a tensor [N,V]."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import AS_WRITTEN, Targets, TermOptions, WordHead
from cqwen_dist.ops.ovr.reference import ovr_reference

SCORES = 1 << 23  # at a time, so that each of the few tensors [n,V] of a chunk takes 32 MiB


def mean_loss(
    action: Any, u: Cauchy, words: Tensor, numbers: NumberLabels, num: int, terms: TermOptions = AS_WRITTEN
) -> Tensor:
    """As `heads.fused_loss.mean_loss`. A chunk's scores are computed again in backward, not kept."""
    u_prime = action.add_noise(u)
    seen, head = action.word_part(u_prime), action.word_head()
    total = u_prime.loc.sum() * 0.0  # in the graph without labels too
    size = max(1, SCORES // head.rows)
    for loc, scale, row in zip(seen.loc.split(size), seen.scale.split(size), words.split(size), strict=True):
        total = total + checkpoint(_word_loss, loc, scale, head, row, terms, use_reentrant=False)
    of_num = head.take(torch.full_like(words, num)).of_own(seen)
    p_num = Cauchy(torch.zeros_like(of_num[1]), of_num[0].scale).sf(of_num[1]).detach()
    nll, decided = action.number_head.loss(u_prime, numbers)
    gated = torch.where(numbers.is_number, p_num * nll, 0.0).sum()
    return (total + decided) / max(len(words), 1) + gated / numbers.is_number.sum().clamp(min=1)


def _word_loss(loc: Tensor, scale: Tensor, head: WordHead, words: Tensor, terms: TermOptions) -> Tensor:
    weights = torch.ones(len(words), dtype=head.real, device=words.device)
    targets = Targets(row=words, token_weights=weights, class_weights=None, want_prob_sum=False, terms=terms)
    return ovr_reference(Cauchy(loc, scale), head, targets).loss
