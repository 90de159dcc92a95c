"""Fits rows of W_cls before training: to fewer dimensions than the features have (projection), all rows (levelling),
the <NUM> row, and rows of numeral tokens.

Projection. With C_w < H words see z through C_w directions. Those that keep most of W alone lose nearly all words, as a
base's features have very unequal spreads. Here they keep most of the logits W z of real features: the best W' of rank
C_w by E |W z - W' z|^2 is the singular value decomposition of W S^1/2, with S = E z z^T (Eckart and Young 1936).

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
from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.parallel.groups import ALONE, Groups

# In nats. On SmolLM2 with GSM8K, 4 to 10 change the F1 of <NUM> by less than 0.01. Smaller values let digits compete
# with <NUM>; larger values cost accuracy on words.
APART = 6.0
# Tokens that a number follows count as at least this share of all. In Chinese reviews they are 3 %: without the weight
# the start said 1 of 20 numbers, with it 1 of 3; GSM8K has 12 % and hardly changes (docs/measurements.md).
FOLLOWED = 0.15
LITTLE = 1e-4  # of a feature's mean square, for those that do not move on a few tokens


@torch.no_grad()
def project_by_features(heads: CausalModules, z: Tensor, groups: Groups = ALONE) -> None:
    """Set W_loc and W_cls to the projection, and `projection_error` to its relative error; nothing for C_w = H.

    z [N,>=H]: features of this rank's positions. <NUM>'s row stays if it is not the base's. Collective over the world.
    """
    action, head = heads.action, heads.action.base_head
    if head is None:
        return
    words, weight = action.word_size, head.weight.to(action.cls_weight.device).double()
    z, gram = z[:, : weight.shape[1]].to(weight), weight.T @ weight
    moment = z.T @ z
    if groups.world is not None:
        sum_over(moment, groups.world)
    if groups.vocab is not None:
        sum_over(gram, groups.vocab)

    def fit() -> tuple[Tensor, Tensor, float]:
        least = LITTLE * moment.diagonal().mean() * torch.ones_like(moment[0]).diag()
        energies, vectors = torch.linalg.eigh(moment + least)
        root = vectors * energies.sqrt() @ vectors.T
        kept, directions = torch.linalg.eigh(root @ gram @ root)  # ascending
        top = directions[:, -words:]
        back = torch.linalg.solve(root, top).T
        size = back.norm(dim=1, keepdim=True)  # U in the unit of z
        error = float((kept[:-words].clamp(min=0).sum() / kept.sum()).sqrt())
        return (back / size).cpu(), (root @ top * size.T).cpu(), error

    into, out, action.projection_error = groups.agreed(fit)
    heads.abduction.loc_net.weight[:words] = into.to(heads.abduction.loc_net.weight)
    row, own = heads.config.num_token_id - action.vocab_start, None
    if row in range(action.rows) and not torch.equal(action.cls_weight[row], action.base_row[0]):
        own = action.cls_weight[row].clone()
    action.cls_weight[:, :words] = (weight @ out.to(weight)).to(action.cls_weight)
    if row in range(action.rows):
        action.base_row[0] = action.cls_weight[row].clone()
        if own is not None:
            action.cls_weight[row] = own


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
    spells numerals. Returns the fraction of the target's variance that the row explains on held-out tokens, without a
    bias.
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
