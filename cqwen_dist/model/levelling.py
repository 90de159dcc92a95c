"""Rows of W_cls that are fitted before training: all of them (levelling), <NUM>'s, and those that spell numerals.

Levelling. Softmax ignores a constant added to all logits of a token. One-vs-rest does not: one threshold C separates
the next word from all others at every token, while a base's logits shift from token to token with their normaliser
log sum_k exp loc_S,k. Let v be the vector whose product v . loc_U predicts that normaliser best. Rows W_k - v then give
logits near log-probabilities: the same softmax, and P ranks words nearly as the base does. The rows' norms become more
equal too, and with them scale_S,k = sum_c |W_kc| scale_U,c.

Numerals. A base that never saw <NUM> still knows where a numeral comes: most of the probability is on the tokens that
spell numerals. <NUM>'s row is fitted to the logarithm of their sum, raised to the normaliser where a number follows and
held `APART` below it elsewhere. Their own rows lose `APART` where a number follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.model.initialise import Heads
from cqwen_dist.model.ridge import ridge_by_leave_one_out
from cqwen_dist.parallel.groups import ALONE, Groups
from cqwen_dist.parallel.mappings import sum_partials

# Nats. On SmolLM2 and GSM8K 4 to 10 change <NUM>'s F1 by less than 0.01; less lets digits compete, more costs words.
APART = 6.0


@torch.no_grad()
def level_logits(action: ActionNetwork, loc: Tensor, log_norm: Tensor, groups: Groups = ALONE) -> tuple[float, Tensor]:
    """Subtract v [C_w], the ridge regression of log_norm on loc, from every row of W_cls; returns (share, v).

    loc [n,C_w], log_norm [n]: loc_U and the normalisers of all ranks' tokens, the same on every rank (n may be 0).
    share: how much of the normaliser's variance v predicts on tokens left out. At 0 or less the rows stay and v is 0.
    """

    def fit() -> tuple[Tensor, float]:
        v, share = ridge_by_leave_one_out(loc.double(), log_norm.double())
        return v.cpu(), share

    v, share = groups.agreed(fit)  # two machines may round apart
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
    groups: Groups = ALONE,
) -> float:
    """Fit <NUM>'s row of W_cls to the base's numerals, and lower the numerals' rows where a number follows.

    loc, log_norm: as in `level_logits`, of the rows before this call. labels [n]. numerals: the tokens that the base
    spells numerals with. Returns the share of the target's variance that the row explains on tokens left out. No bias
    is fitted, as a plain export has none.
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
        row, share = ridge_by_leave_one_out(loc.double(), target, intercept=False)
        return row.cpu(), lower.cpu(), share

    row, lower, share = groups.agreed(fit)
    if not bool(row.any()):
        return 0.0
    for word in numerals:
        if (at := word - action.vocab_start) in range(action.rows):
            action.cls_weight[at] -= lower.to(action.cls_weight)
    if (at := num - action.vocab_start) in range(action.rows):
        action.cls_weight[at] = row.to(action.cls_weight)
        action.cls_bias[at] = 0.0
    return share


@torch.no_grad()
def rows_of(action: ActionNetwork, words: Sequence[int], groups: Groups = ALONE) -> tuple[Tensor, Tensor]:
    """(rows of W_cls [k,C_w], b_cls [k]) of some words, on every rank, whichever of the group holds them."""
    at = torch.tensor(words, dtype=torch.int64, device=action.cls_weight.device) - action.vocab_start
    here = (at >= 0) & (at < action.rows)
    rows = action.cls_weight.new_zeros(len(words), action.word_size + 1)
    rows[here] = torch.cat([action.cls_weight[at[here]], action.cls_bias[at[here], None]], 1)
    rows = sum_partials(rows, groups.vocab)
    return rows[:, :-1], rows[:, -1]
