"""The number head: everything that a model learns, says and is measured by where the next token is a number.

The plain head stands here, and the interface of all. `heads.number_kinds` has the other kinds, and which one a model's
config asks for; nothing else in the package asks it.

Letters: N positions, M of them numbers, C dimensions of U, R values, K numbers in memory. Values are float64 in the raw
unit; laws and labels are fp32 in the target's unit (`CausalQwenConfig.target`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy

COPY_NOISE = 0.3  # the ridge regression of the start fits S_j to -1 and 1


@dataclass(frozen=True)
class NumberLabels:
    """What the numbers at N positions are. A kind that learns more has a subclass of this."""

    values: Tensor  # [N] fp32, the target's unit; of 0 at text
    is_number: Tensor  # [N] bool: the value is learnt


class Decision(NamedTuple):
    """What a head says of the next number at some positions [...]. Generation and evaluation read this alone."""

    y: Cauchy  # its law
    exact: Tensor | None = None  # [...] float64: the value to all its digits; NaN where it is Y's location
    kind: Tensor | None = None  # [...] int64: its type, an index of `NumberHead.types`
    more: Cauchy | None = None  # [...,R-1]: the laws of `NumberHead.more_values`


class NumberHead:
    """One value a number, and the base of the other kinds.

    Its parameters belong to the action network: checkpoints and exports have them as action.reg_weight and so on.
    """

    types: Sequence[str] = ()  # names of the types of a number
    more_values: Sequence[str] = ()  # names of the values that it has besides the first
    exact = False  # whether `Decision.exact` is given

    def __init__(self, net: Any, config: Any, *rows: int) -> None:
        """net: the action network, which gets the parameters. config: a `CausalQwenConfig`; None: a plain head's. rows:
        of W_reg, [C] without."""
        self.net, self.config = net, config
        net.reg_weight = nn.Parameter(torch.empty(*rows, net.causal_hidden_size))
        net.reg_bias = nn.Parameter(torch.zeros(rows))

    def add_scores(self) -> None:
        """Give the network the parameters of what the head decides besides values, if it has any."""

    @property
    def target(self) -> TargetTransform:
        return TargetTransform(**self.config.target)

    # ------------------------------------------------------------------------------- law and decision

    def value(self, u_prime: Cauchy) -> Cauchy:
        """Y of U' [...,C]: the law [...] of the number as far as it is computed, not copied."""
        return u_prime.affine(self.net.reg_weight, self.net.reg_bias)

    def decide(self, u_prime: Cauchy, memory: Tensor) -> Decision:
        """What to say of the next number; memory [...,K]: as `memory` gives it."""
        return Decision(self.value(u_prime))

    def memory(self, is_number: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """What the head knows at each position of the numbers so far, [B,T,K] float64; a plain head nothing, K = 0.

        is_number, values [B,T]; positions [B,T]: 0 where a text begins, and at padding before it.
        """
        return values.new_zeros(*values.shape, 0)

    def memory_at(self, batch: Batch, keep: Tensor) -> Tensor:
        """`memory` at the positions `keep` [N] of a training batch, [N,K]."""
        is_number = (batch.input_ids == self.config.num_token_id) & batch.attention_mask
        return self.memory(is_number, batch.numeric_values, batch.position_ids).flatten(0, 1)[keep]

    def remember(self, memory: Tensor, value: Tensor, is_number: Tensor) -> None:
        """Bring the memory [B,K] up to date, in place, with a value [B] where a number was written."""

    # --------------------------------------------------------------------------------- labels and loss

    def labels(self, batch: Batch, keep: Tensor, weights: Sequence[float] | None = None) -> NumberLabels:
        """What is learnt at the positions `keep` [N] of a batch. weights: of the values (`loss.value_weights`)."""
        return self.value_labels(batch, keep)

    def value_labels(self, batch: Batch, keep: Tensor) -> NumberLabels:
        """The same where numbers come as one value each, as Hugging Face's labels do: without types, without more."""
        values = batch.numeric_labels.flatten()[keep]
        return NumberLabels(self.target.forward(values), batch.numeric_mask.flatten()[keep])

    def loss(self, u_prime: Cauchy, labels: NumberLabels, stop: bool) -> tuple[Tensor, Tensor]:
        """(NLL of the numbers [N], sum of cross entropies []) of U' [N,C].

        The gate and the masks come later, so the NLL is finite at text too. The cross entropies are of decisions that
        the head makes besides, one against the rest, and belong to L_cls. stop: probabilities weigh without gradient.
        """
        nll = self.value(u_prime).nll(labels.values)
        return nll, nll.new_zeros(())

    # ------------------------------------------------------------------------------------------- start

    @torch.no_grad()
    def reset(self, columns: int | None = None) -> None:
        """Xavier for each row of W_reg by itself (S3 4 step 4), or for its first columns."""
        for row in self.net.reg_weight.view(-1, 1, self.net.causal_hidden_size):
            nn.init.xavier_uniform_(row[:, :columns])

    @torch.no_grad()
    def inherit(self, gain: float) -> None:
        """The start before any data: Xavier times `gain` for the word part, a mean of the number dimensions."""
        words, weight = self.net.word_size, self.net.reg_weight
        if dims := weight.shape[-1] - words:
            self.reset(words)
            weight[..., words:] = 1.0 / dims
        weight[..., :words] *= gain

    @torch.no_grad()
    def centre(self, value: Tensor | float) -> None:
        """Begin around this value, in the target's unit."""
        self.net.reg_bias.fill_(value)

    @torch.no_grad()
    def start(self, coefficients: Tensor, intercept: float) -> None:
        """Make the value a fit of the data: through the number dimensions, where W_loc has the coefficients, or without
        these by W_reg = coefficients [C]. Several rows start equal."""
        words, weight = self.net.word_size, self.net.reg_weight
        self.centre(intercept)
        if dims := weight.shape[-1] - words:
            weight[..., :words] = 0.0
            weight[..., words:] = 1.0 / dims
        elif bool(coefficients.any()):  # else W_reg stays as drawn: zeros would make scale_Y 0 and the loss infinite
            weight.copy_(coefficients.expand_as(weight))

    def score_targets(self, values: Tensor, memory: Tensor) -> Tensor:
        """[n,K] float64: what linear maps of U's word part are fitted to, of n numbers of the data with their memory.

        `start_scores` then receives the fits. A plain head has none, K = 0.
        """
        return memory.new_zeros(len(values), 0)

    def start_scores(self, weight: Tensor, bias: Tensor) -> None:
        """Take the fits to `score_targets`: weight [K,C_w], bias [K]."""

    # ------------------------------------------------------------------------------------------ metrics

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(sums, lists) of an evaluation's batch for `metrics`. found: decided at the numbers' positions `at` [M]."""
        return {}, {}

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The head's own metrics by name. sums and lists: of `measure`, over all batches and ranks; among the lists is
        `exact` [M], which numbers were decided exactly."""
        return {}
