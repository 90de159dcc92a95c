"""Module 5 as used in training: the loss at label positions from U, without scores [B,T,V] (seed S0 5.3).

The vocabulary may be sharded over ranks. Labels are already shifted. `heads.seed_losses` has the seeds' modules.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.config.custom import find_custom, unusable
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import AS_WRITTEN, TermOptions
from cqwen_dist.ops.ovr.loss import PLAIN, OvrOptions
from cqwen_dist.ops.regression import GATES, Gate, gate_of
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_loss


def gate_named(name: str, outside: str | Path = "") -> Gate:
    """The gate of a name in `GATES`, or of an import path (a class is called without arguments). Raises `UserError`.

    A custom gate is tested on three positions. outside: as in `config.custom.find_custom`.
    """
    if name in GATES:
        return GATES[name]
    key, p_num = "loss.gate", torch.tensor([0.2, 0.9, 0.5])
    found = find_custom(key, name, outside)
    try:
        gate: Gate = found() if isinstance(found, type) else found
        factor = gate(torch.tensor([True, False, True]), p_num, 0.0)
        if factor.shape != p_num.shape or factor.dtype != p_num.dtype:
            raise ValueError(f"it gave {factor.dtype} {list(factor.shape)} for P(<NUM>) torch.float32 [3]")
    except Exception as error:  # user code may raise anything
        raise unusable(key, name, error, "a gate (num_mask [N], p_num [N], alpha) -> [N]: docs/training.md") from error
    return gate


@dataclass(frozen=True)
class TokenLabels:
    """The labels of N positions."""

    words: Tensor  # [N] int64, ids in the full vocabulary
    numbers: NumberLabels  # labels of the number head


@dataclass(frozen=True)
class LossOptions:
    """The loss options of a run: the gate of the numbers, and the computation of the word loss."""

    num_token_id: int
    alpha: float = 0.0
    gate: str | Gate = "alpha"  # a name of `GATES`, or a function
    gate_grad: str = "stop"  # "full": gradients flow through the gate's probabilities
    gemm_dtype: torch.dtype = torch.float32  # dtype of GEMMs and communicated tokens; the rows stay fp32
    ovr: OvrOptions = PLAIN
    words: bool = True  # False: only numbers have a loss, and P(<NUM>) counts as 1


@dataclass(frozen=True)
class LossTerms:
    """The result for one micro-batch: the scalar to differentiate, and sums (not means) over this rank's tokens."""

    loss: Tensor  # scalar, weighted: word loss of the vocabulary group plus number loss of this rank
    cls_sum: Tensor  # [] detached, unweighted
    nll_sum: Tensor  # [] detached, unweighted: -log softmax(loc_S) of the labels; 0 without a softmax term
    reg_sum: Tensor  # [] detached, gated, unweighted
    prob_sum: Tensor | None  # [N] detached: sum of P over the vocabulary; None without words
    p_num: Tensor  # [N] detached
    best: Tensor | None  # [N] the best words, if the options ask for them


def fused_loss(
    action: ActionNetwork,
    u: Cauchy,
    labels: TokenLabels,
    options: LossOptions,
    token_weight: float,
    number_weight: float,
    group: ProcessGroup | None = None,
    token_counts: list[int] | None = None,
) -> LossTerms:
    """The loss of N label positions (S0 5.3). No [N,V] tensor exists.

    u: U [N,C] of this rank's tokens; N may be 0. token_weight, number_weight: reciprocals of global counts, times the
    divisor of the engine. group: the vocabulary group; None if this rank has the full vocabulary. token_counts: N of
    each rank of the group, if known. Collective over `group` in forward and backward. Raises as `linear_ovr`.
    Without words (`LossOptions.words`) nothing crosses ranks, and cls_sum has only the number head's own decisions.
    """
    u_prime = action.add_noise(u)
    if not options.words:
        nll, decided = action.number_head.loss(u_prime, labels.numbers)
        sure, none = torch.ones_like(nll), nll.new_zeros(())
        reg_sum = (gate_of(options.gate)(labels.numbers.is_number, sure, options.alpha) * nll).sum()
        loss = token_weight * decided + number_weight * reg_sum
        return LossTerms(loss, decided.detach(), none, reg_sum.detach(), None, sure, None)
    # Words: all tokens of the group on this rank's rows. Only here U and P of <NUM> cross ranks.
    out = vocab_parallel_loss(
        action.word_part(u_prime).to(options.gemm_dtype),
        action.word_head(),
        labels.words,
        torch.full(labels.words.shape, token_weight, device=labels.words.device),
        options.ovr,
        group,
        options.num_token_id,
        token_counts,
    )
    assert out.p_num is not None
    # Numbers: local to this rank, since W_reg is replicated. The gate weights each NLL by P of <NUM>.
    p_num = out.p_num.detach() if options.gate_grad == "stop" else out.p_num
    nll, decided = action.number_head.loss(u_prime, labels.numbers)
    gates = gate_of(options.gate)(labels.numbers.is_number, p_num, options.alpha)
    reg_sum = (gates * nll).sum()  # 0 without numbers, but in the graph: all ranks need gradients for W_reg
    return LossTerms(
        loss=out.loss + token_weight * decided + number_weight * reg_sum,
        cls_sum=out.per_token.sum() + decided.detach(),
        nll_sum=reg_sum.new_zeros(()) if out.nll is None else out.nll.sum(),
        reg_sum=reg_sum.detach(),
        prob_sum=out.prob_sum,
        p_num=out.p_num.detach(),
        best=out.best,
    )


def mean_loss(
    action: ActionNetwork, u: Cauchy, words: Tensor, numbers: NumberLabels, num: int, terms: TermOptions = AS_WRITTEN
) -> Tensor:
    """The loss of N label positions in one process: the mean of the words' plus the mean of the gated numbers'.

    u: U [N,C]; words [N]; num: row of <NUM>. An export has it in plain torch (`tools.export.plain_loss`).
    """
    count = max(int(numbers.is_number.sum()), 1)
    labels = TokenLabels(words, numbers)
    options = LossOptions(num, ovr=OvrOptions(terms=terms))
    return fused_loss(action, u, labels, options, 1.0 / max(len(words), 1), 1.0 / count).loss
