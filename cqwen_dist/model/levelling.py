"""Levelled logits: one vector less in every row of W_cls, so that a word's logit says how likely it is.

Softmax does not feel what is added to all logits of one token; one-vs-rest does, since one threshold C has to part the
next word from all others at every token. A base's logits lie as a whole higher at one token and lower at another, by
their normaliser log sum_k exp loc_S,k. With the v whose product v . loc_U tells that normaliser best, rows W_k - v give
logits near log-probabilities: the same softmax, and P ranks words nearly as the base does. Rows also come to more equal
norms, and scale_S,k = sum_c |W_kc| scale_U,c with them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import main_rank_says
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens
from cqwen_dist.parallel.vocab_scores import vocab_parallel_scores

if TYPE_CHECKING:
    from cqwen_dist.model.causal_qwen import CausalQwenModel

LEVEL_TOKENS = 4096  # of all ranks, about: the fit decomposes a matrix of them
# Tried, in units of the mean over loc_U's dimensions of their squares summed over the tokens.
RIDGES = torch.logspace(-5, 2, 15, dtype=torch.float64)


@torch.no_grad()
def level_logits(model: CausalQwenModel, loc: Tensor, groups: Groups | None = None) -> float:
    """Take v from every row of W_cls; returns the share of the normaliser's variance that v tells of tokens left out.

    loc: [N,C_w] loc_U of this rank's tokens (N may be 0). v is a ridge regression's, its strength by leave-one-out;
    where even the best tells nothing (share <= 0), the rows stay. Collective over the world; all ranks take the same v.
    """
    world = 1 if groups is None else groups.world_size
    own = loc[: 2 * LEVEL_TOKENS // world]  # texts are of unequal lengths: a rank may have more than its share
    action = model.action
    norm = vocab_parallel_scores(
        own,
        torch.ones_like(own),
        action.cls_weight,
        action.cls_bias,
        action.threshold,
        torch.zeros(own.shape[0], dtype=torch.int64, device=own.device),
        group=None if groups is None else groups.vocab,
        vocab_start=action.vocab_start,
    ).log_norm
    seen = torch.cat([own, norm[:, None]], 1)
    if groups is not None:
        seen = gather_tokens(seen, exchange_counts(own.shape[0], groups.world, own.device), groups.world)

    def fit() -> tuple[Tensor, float]:
        v, told = ridge_by_leave_one_out(seen[:, :-1].double(), seen[:, -1].double())
        return v.cpu(), told

    v, share = fit() if groups is None else main_rank_says(fit)  # two machines may round apart
    if share > 0:
        action.cls_weight.sub_(v.to(action.cls_weight))
    return share


def ridge_by_leave_one_out(x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """The ridge regression of y [n] on x [n,p] that tells left-out points best: (coefficients [p], share of variance).

    As scikit-learn's RidgeCV(RIDGES in units of x's mean square sum), by one decomposition of the smaller product and
    on x's device (its own takes minutes at p = 3,584). Zeros where nothing can be told. fp64.
    """
    nothing = torch.zeros_like(x[:1]).sum(0), 0.0
    if len(y) < 3:
        return nothing
    centred, told = x - x.mean(0), y - y.mean()
    total, variance = float(centred.square().sum()), float(told.square().mean())
    if not (0 < total < math.inf and 0 < variance < math.inf):
        return nothing
    n, p = x.shape
    values, vectors = torch.linalg.eigh(centred.T @ centred if n > p else centred @ centred.T)
    values = values.clamp(min=0)
    scores = centred @ vectors if n > p else vectors * values.sqrt()  # the principal components [n, min(n,p)]
    along = scores.T @ told
    best, least = 0.0, math.inf
    for ridge in (RIDGES * total / p).tolist():
        shrunk = 1 / (values + ridge)
        own = scores.square() @ shrunk + 1 / n  # how much a point tells of itself; the mean's share with it
        error = float((((told - scores @ (shrunk * along)) / (1 - own)).square()).mean())
        if error < least:
            best, least = ridge, error
    if n > p:
        found = vectors @ (along / (values + best))
    else:
        found = centred.T @ (vectors @ (vectors.T @ told / (values + best)))
    return found, 1 - least / variance
