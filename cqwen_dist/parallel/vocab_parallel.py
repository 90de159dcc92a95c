"""The OvR loss with the vocabulary rows sharded over the ranks of a group.

Each rank has different tokens and different rows. The group gathers the tokens, each rank computes the loss of *all*
tokens on *its* rows (`ops.ovr.loss`, a slice), and one sum gives each token its total. OvR has no normaliser, so no
other communication is needed; the softmax term beside it (`TermOptions`) has one, a number a token:

    forward    all-gather    loc_u, scale_u [N,C], labels, weights [N]; reduce-scatter of 3 numbers a token
               all-gather    log-normalisers [N], with a softmax term, and a fourth number a token
    backward   reduce-scatter of the gradients of loc_u, scale_u [N,C]

The traffic does not depend on V (`plan.comm` counts the bytes). It is not overlapped with compute: 8 (g-1) bytes for
12 V flops of the loss are 4 % of the time in a group of 8 inside a node (600 TFLOP/s, 450 GB/s; computed, not
measured). The row gradients are sums over the group's tokens; the caller sums them over the replica group.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.best import first_best
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.ovr.loss import PLAIN, OvrOptions, ovr_loss
from cqwen_dist.ops.ovr.scores import OvrScores, ovr_scores, prob_sums, probs
from cqwen_dist.ops.ovr.seen import RankBy, TopWord
from cqwen_dist.parallel.collectives import gather_rows
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens, sum_partials


def vocab_range(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of a rank's rows: ranges of ceil(V / size) rows, as torch.chunk; the last may be short or empty."""
    rows = -(-vocab_size // size)
    return min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size)


class VocabParallelOutput(NamedTuple):
    """loss: a differentiable scalar for all tokens of the group. The other fields describe this rank's tokens."""

    loss: Tensor
    per_token: Tensor  # [N_r] fp32, detached, over the full vocabulary
    prob_sum: Tensor  # [N_r] fp32, detached: sum of P over the full vocabulary
    nll: Tensor | None  # [N_r] fp32, detached: -log softmax(loc_S) of the label; None without a softmax term
    p_num: Tensor | None  # [N_r] P of <NUM>, differentiable; None without num_token_id
    best: Tensor | None  # [N_r] int64: the best word, if `OvrOptions.seen` asks for it


def vocab_parallel_loss(
    u: Cauchy,
    head: WordHead,
    labels: Tensor,
    token_weights: Tensor | None = None,
    options: OvrOptions = PLAIN,
    group: ProcessGroup | None = None,
    num_token_id: int | None = None,
    token_counts: list[int] | None = None,
) -> VocabParallelOutput:
    """`ovr_loss` of this rank's tokens, with the vocabulary sharded over a group.

    u: U' [N_r,C]; labels, token_weights [N_r] (N_r may differ between ranks, may be 0). head: this rank's rows.
    num_token_id: also return P of this word. token_counts: N_r of each rank of the group; None: the ranks exchange
    them. group: None for a single process. Forward and backward are collective over `group`.
    """
    # All-gather: the group's tokens, N = sum of N_r. Backward is the reduce-scatter of U's gradient.
    counts = token_counts or exchange_counts(len(u.loc), group, u.loc.device)
    every, labels = gather_law(u, counts, group), gather_tokens(labels, counts, group)
    if token_weights is not None:
        token_weights = gather_tokens(token_weights, counts, group)
    # The loss of all N tokens on this rank's v rows. If a label is outside of the slice, all rows are negatives.
    others = None if group is None or group.size() == 1 else group
    of_all = None if others is None else lambda norm: gather_rows(norm, others).logsumexp(0)
    out = ovr_loss(every, head, labels, token_weights, replace(options, want_prob_sum=True), of_all)
    assert out.prob_sum is not None
    # One reduce-scatter for all columns [N, 2 to 4]: totals over the vocabulary, for this rank's tokens
    p_num = None if num_token_id is None else _prob_of(num_token_id, every, head)
    columns = [c.float() for c in (out.per_token, out.prob_sum, out.nll, p_num) if c is not None]
    own = scatter_sum_tokens(torch.stack(columns, dim=1), counts, group)
    best = None if out.best is None else out.best.word
    if out.best is not None and others is not None:
        best = _best_of_ranks(out.best, counts, others).word
    return VocabParallelOutput(
        loss=sum_partials(out.loss, group),
        per_token=own[:, 0].detach(),
        prob_sum=own[:, 1].detach(),
        nll=None if out.nll is None else own[:, 2].detach(),
        p_num=None if p_num is None else own[:, -1],
        best=best,
    )


def gather_law(u: Cauchy, counts: list[int], group: ProcessGroup | None) -> Cauchy:
    """`gather_tokens` of location and scale."""
    return Cauchy(gather_tokens(u.loc, counts, group), gather_tokens(u.scale, counts, group))


def own_part(counts: list[int], rank: int) -> slice:
    """The slice of a rank's tokens in the gathered tokens; counts: the number of tokens of each rank."""
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _prob_of(word: int, u: Cauchy, head: WordHead) -> Tensor:
    """P of one word at each token [N] on the rank with its row; zeros on other ranks.

    The zeros require gradients if the owner's P does. Otherwise only the owner would enter the collective in backward,
    and hang.
    """
    row = word - head.start
    if 0 <= row < len(head.weight):
        return probs(u, head.take(slice(row, row + 1)))[:, 0]
    inputs = (*u, head.weight, head.bias, head.threshold)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return torch.zeros(len(u.loc), device=u.loc.device, requires_grad=needs_grad)


def _best_of_ranks(best: TopWord, counts: list[int], group: ProcessGroup) -> TopWord:
    """The best words of this rank's tokens, from those of all N tokens [N] in each rank's rows."""
    found = TopWord(*(gather_rows(part, group) for part in best))
    # The lower rank has the lower ids, so the first best row is the one that a single process would choose
    winner = first_best(found.score.T, found.loc.T)[None]
    mine = own_part(counts, group.rank())
    return TopWord(*(part.gather(0, winner)[0, mine] for part in found))


@torch.no_grad()
def vocab_parallel_scores(
    u: Cauchy,
    head: WordHead,
    labels: Tensor,
    group: ProcessGroup | None,
    prob_thresholds: Sequence[float] = (),
    rank_by: RankBy = "ovr",
) -> OvrScores:
    """`ovr_scores` of this rank's tokens U' [N_r,C], labels [N_r], over the sharded vocabulary of a group.

    head: this rank's rows. Each rank scores its rows for all tokens. The normalisers are combined by logsumexp, the
    best of the ranks' best words wins, all other values are summed. Raises as `ovr_scores`. Collective over `group`.
    """
    if group is None or group.size() == 1:
        return ovr_scores(u, head, labels, prob_thresholds, rank_by)
    counts = exchange_counts(len(u.loc), group, u.loc.device)
    every, labels = gather_law(u, counts, group), gather_tokens(labels, counts, group)
    part = ovr_scores(every, head, labels, prob_thresholds, rank_by)
    # Probabilities do not add up in the logarithm: each rank's normaliser covers its own rows only
    log_norm = gather_rows(part.log_norm, group).logsumexp(0)[own_part(counts, group.rank())]
    columns = [part.label_loc, part.label_log_p, part.per_token, part.prob_sum]
    own = scatter_sum_tokens(torch.cat([torch.stack(columns, 1).to(part.above), part.above], 1), counts, group)
    best = _best_of_ranks(part.best, counts, group)
    return OvrScores(log_norm, own[:, 0], own[:, 1], own[:, 4:], own[:, 2], own[:, 3], best)


@torch.no_grad()
def vocab_parallel_prob_sums(loc: Tensor, scale: Tensor, head: WordHead, group: ProcessGroup | None) -> Tensor:
    """`prob_sums` of this rank's tokens [N_r], over the sharded vocabulary of a group. Collective over `group`."""
    if group is None or group.size() == 1:
        return prob_sums(loc, scale, head)
    counts = exchange_counts(len(loc), group, loc.device)
    return scatter_sum_tokens(prob_sums(gather_tokens(loc, counts, group), scale, head)[:, None], counts, group)[:, 0]
