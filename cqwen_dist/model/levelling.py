"""Fits rows of W_cls before training: all rows (levelling), the <NUM> row, and rows of numeral tokens.

Levelling. Softmax ignores a constant added to all logits of a token; one-vs-rest does not. One threshold C must
separate the next word from every other word at each token, but a base's logits shift from token to token with their
normaliser log sum_k exp loc_S,k. Let v be the vector for which v . loc_U predicts the normaliser best. The rows W_k - v
give logits near log-probabilities, with the same softmax, so P ranks words nearly like the base. The row norms also
become more equal, and so does scale_S,k = sum_c |W_kc| scale_U,c.

Numerals. A base that never saw <NUM> still predicts numerals: there most of the probability is on tokens that spell
numerals. The <NUM> row is fitted to the log of their total, raised to the normaliser if a number follows, and at most
the normaliser minus `APART` otherwise. The rows of these tokens lose `APART` if a number follows. Where numbers are
rare, the tokens before them weigh more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cqwen_dist.heads.action import ActionNetwork, rows_of
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.model.ridge import ridges_by_leave_one_out
from cqwen_dist.parallel.groups import ALONE, Groups

# In nats. On SmolLM2 with GSM8K, 4 to 10 change the F1 of <NUM> by less than 0.01. Smaller values let digits compete
# with <NUM>; larger values cost accuracy on words.
APART = 6.0
# Tokens that a number follows count as at least this share of all. In Chinese reviews they are 3 %: without the weight
# the start said 1 of 20 numbers, with it 1 of 3; GSM8K has 12 % and hardly changes (docs/measurements.md).
FOLLOWED = 0.15


@torch.no_grad()
def level_logits(action: ActionNetwork, loc: Tensor, log_norm: Tensor, groups: Groups = ALONE) -> tuple[float, Tensor]:
    """Subtract v [C_w], the ridge regression of log_norm on loc, from all rows of W_cls. Returns (share, v).

    loc [n,C_w], log_norm [n]: loc_U and normalisers of the tokens of all ranks, equal on all ranks (n may be 0).
    share: fraction of the normaliser's variance that v predicts on held-out tokens. If it is not positive, the rows do
    not change and v is 0.
    """

    def fit() -> tuple[Tensor, float]:
        v, share = ridges_by_leave_one_out(loc.double(), log_norm.double()[:, None])
        return v[0].cpu(), float(share[0])

    v, share = groups.agreed(fit)  # from rank 0: machines may round differently, and the rows must stay equal
    if share <= 0:
        return 0.0, torch.zeros_like(v)
    action.cls_weight.sub_(v.to(action.cls_weight))
    return share, v


@torch.no_grad()
def fit_numeral_rows(
    heads: CausalModules, loc: Tensor, log_norm: Tensor, labels: Tensor, numerals: Sequence[int], groups: Groups = ALONE
) -> float:
    """Fit the <NUM> row of W_cls to the base's numerals, and lower the numeral rows if a number follows.

    loc, log_norm: as in `level_logits`, for the rows before this call. labels [n]. numerals: tokens with which the base
    spells numerals. Returns the fraction of the target's variance that the row explains on held-out tokens. There is no
    bias, as plain exports do not have one.
    """
    action, num = heads.action, heads.config.num_token_id
    rows, bias = rows_of(action.word_head(), numerals, groups)
    written = (loc @ rows.T + bias).double().logsumexp(1)
    follows = labels == num

    def fit() -> tuple[Tensor, Tensor, float]:
        norm, followed, count = log_norm.double(), follows.double(), int(follows.sum())
        target = torch.where(follows, written.maximum(norm), written.minimum(norm - APART)) if count else written
        times = max(1.0, FOLLOWED / (1 - FOLLOWED) * (len(labels) - count) / max(count, 1))
        root = (1 + (times - 1) * followed).sqrt()[:, None]
        targets = torch.stack([target, followed], 1)
        found, shares = ridges_by_leave_one_out(root * loc.double(), root * targets, intercept=False)
        row, lower = found.cpu()
        return row, APART * lower, float(shares[0])

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
