"""Rows of W_cls that are fitted before training: all of them levelled, and those that numerals are written with.

Levelling. Softmax does not feel what is added to all logits of one token; one-vs-rest does, since one threshold C has
to part the next word from all others at every token. A base's logits lie as a whole higher at one token and lower at
another, by their normaliser log sum_k exp loc_S,k. With the v whose product v . loc_U tells that normaliser best, rows
W_k - v give logits near log-probabilities: the same softmax, and P ranks words nearly as the base does. Rows also come
to more equal norms, and scale_S,k = sum_c |W_kc| scale_U,c with them.

Numerals. A base that never saw <NUM> knows where a numeral comes: it gives the tokens that it spells numerals with most
of the probability there. <NUM>'s row is fitted to that (the logarithm of their sum, at least the normaliser where a
number does follow, at least `APART` below it elsewhere), and their own rows lose `APART` where a number follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cqwen_dist.model.action import ActionNetwork
from cqwen_dist.model.initialise import Heads
from cqwen_dist.model.ridge import ridge_by_leave_one_out
from cqwen_dist.parallel.collectives import main_rank_says, sum_over
from cqwen_dist.parallel.groups import Groups

# Nats. 4 to 10 give <NUM> an F1 within 0.01 on SmolLM2 and GSM8K; less lets digits compete, more costs words.
APART = 6.0


@torch.no_grad()
def level_logits(
    action: ActionNetwork, loc: Tensor, log_norm: Tensor, groups: Groups | None = None
) -> tuple[float, Tensor]:
    """Take v [C_w] from every row of W_cls; returns (the share of the normaliser's variance that v tells of tokens left
    out, v).

    loc [n,C_w], log_norm [n]: loc_U and the normalisers of all ranks' tokens, alike on every rank (n may be 0). v is a
    ridge regression's; where even the best tells nothing (share 0), the rows stay and v is 0. All ranks take one v.
    """

    def fit() -> tuple[Tensor, float]:
        v, told = ridge_by_leave_one_out(loc.double(), log_norm.double())
        return v.cpu(), told

    v, share = fit() if groups is None else main_rank_says(fit)  # two machines may round apart
    if share <= 0:
        return 0.0, torch.zeros_like(v)
    action.cls_weight.sub_(v.to(action.cls_weight))
    return share, v


@torch.no_grad()
def fit_numeral_rows(
    heads: Heads,
    loc: Tensor,
    log_norm: Tensor,
    labels: Tensor,
    numerals: Sequence[int],
    groups: Groups | None = None,
) -> float:
    """<NUM>'s row of W_cls out of what the base knows of numerals, whose rows then compete no more where one follows.

    loc, log_norm: as `level_logits`'s, of the rows as they are. labels [n]. numerals: the tokens that the base spells
    numerals with. Returns the share of the target's variance that the row tells of tokens left out. No bias is used:
    what a row knows a plain export keeps.
    """
    action, num = heads.action, heads.config.num_token_id
    rows, bias = rows_of(action, numerals, groups)
    written = (loc @ rows.T + bias).double().logsumexp(1)
    follows = labels == num

    def fit() -> tuple[Tensor, Tensor, float]:
        target = written
        lower = torch.zeros(loc.shape[1], dtype=torch.float64)
        if bool(follows.any()):
            norm = log_norm.double()
            target = torch.where(follows, torch.maximum(written, norm), torch.minimum(written, norm - APART))
            lower = APART * ridge_by_leave_one_out(loc.double(), follows.double(), intercept=False)[0]
        row, told = ridge_by_leave_one_out(loc.double(), target, intercept=False)
        return row.cpu(), lower.cpu(), told

    row, lower, told = fit() if groups is None else main_rank_says(fit)
    if not bool(row.any()):
        return 0.0
    for word in numerals:
        if (at := word - action.vocab_start) in range(action.rows):
            action.cls_weight[at] -= lower.to(action.cls_weight)
    if (at := num - action.vocab_start) in range(action.rows):
        action.cls_weight[at] = row.to(action.cls_weight)
        action.cls_bias[at] = 0.0
    return told


@torch.no_grad()
def rows_of(action: ActionNetwork, words: Sequence[int], groups: Groups | None = None) -> tuple[Tensor, Tensor]:
    """(rows of W_cls [k,C_w], b_cls [k]) of some words, on every rank, whichever of the group holds them."""
    at = torch.tensor(words, dtype=torch.int64, device=action.cls_weight.device) - action.vocab_start
    here = (at >= 0) & (at < action.rows)
    rows = action.cls_weight.new_zeros(len(words), action.word_size + 1)
    rows[here] = torch.cat([action.cls_weight[at[here]], action.cls_bias[at[here], None]], 1)
    if groups is not None:
        sum_over(rows, groups.vocab)
    return rows[:, :-1], rows[:, -1]
