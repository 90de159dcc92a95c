"""The number head: labels, law, loss, decision, start and metrics of numbers.

This module has the interface and the plain head. `heads.action.number_head_of` selects one by the model's config; no
other module makes this choice.

Letters: N positions, M numbers, C dimensions of U, K numbers in memory. Values are float64 in the raw unit;
laws and labels are fp32 in the target's unit (`CausalQwenConfig.target`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.ops.cauchy import Cauchy


@dataclass(frozen=True)
class NumberLabels:
    """The number labels of N positions. Kinds with more labels use a subclass."""

    values: Tensor  # [N] fp32, the target's unit; the target of 0 at text
    is_number: Tensor  # [N] bool: the value is a label


class Decision(NamedTuple):
    """The head's prediction of the next number at positions [...]. Generation and evaluation only use this."""

    y: Cauchy  # law of the number
    exact: Tensor | None = None  # [...] float64: an exact value; NaN if the value is the location of Y
    which: Tensor | None = None  # [...] int64: the likeliest of the head's `names`, written or not
    likeliest: Tensor | None = None  # [...] float64: its value
    p: Tensor | None = None  # [...] its probability; 0 if there is none

    @property
    def written(self) -> Tensor | None:
        """[...] int64: which of the head's `names` is written; -1 for the location of Y."""
        if self.exact is None:
            return None
        which = torch.zeros_like(self.exact, dtype=torch.int64) if self.which is None else self.which
        return which.masked_fill(self.exact.isnan(), -1)


class NumberHead:
    """One value per number; base class of the other kinds.

    The parameters belong to the action network: in checkpoints and exports they are action.reg_weight and so on.
    """

    exact = False  # whether `Decision` has more than a law
    names: Sequence[str] = ("an exact value",)  # what each of its exact values is
    memory_size = 0  # K

    def __init__(self, net: Any, config: Any) -> None:
        """net: the action network, which gets the parameters. config: a `CausalQwenConfig`; None: a plain head's."""
        self.net, self.config = net, config
        net.reg_weight = nn.Parameter(torch.empty(net.causal_hidden_size))
        net.reg_bias = nn.Parameter(torch.zeros(1))  # never 0-dimensional: DeepSpeed cannot view such a tensor

    def add_scores(self) -> None:
        """Create the parameters for decisions other than values, if the head has any."""

    @property
    def target(self) -> TargetTransform:
        return TargetTransform(**self.config.target)

    # ------------------------------------------------------------------------------- law and decision

    def value(self, u_prime: Cauchy) -> Cauchy:
        """The law Y [...] of a computed (not copied) number, from U' [...,C]."""
        return self.kind(*u_prime.affine(self.net.reg_weight, self.net.reg_bias[0]))

    @property
    def kind(self) -> type[Cauchy]:
        """The class of Y's law; Cauchy without a config."""
        return self.target.kind if getattr(self.config, "target", None) else Cauchy

    def individual(self, u: Cauchy, drawn: Tensor) -> Tensor:
        """A draw [...,C] from U, moved so that it has the same quantile of Y's own law as of the Cauchy. Only number
        dimensions move, which words do not see."""
        dims = u.loc.shape[-1] - self.net.word_size
        if self.kind is Cauchy or not dims:
            return drawn
        y, at, step = self.value(u).to(torch.float64), self.value(Cauchy(drawn, u.scale)).loc, torch.zeros_like(drawn)
        step[..., -dims:] = 1.0
        gain = self.value(Cauchy(drawn + step, u.scale)).loc - at
        wanted = y.quantile(Cauchy(*y).cdf(at.double()))
        return drawn + ((wanted - at) / gain).to(drawn.dtype).unsqueeze(-1) * step

    def decide(self, u_prime: Cauchy, memory: Tensor, bar: float = 0.5) -> Decision:
        """The prediction of the next number; memory [...,K]: from `memory`. bar: an exact value needs a larger P."""
        return Decision(self.value(u_prime))

    def memory(self, ids: Tensor, is_number: Tensor, values: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """What the head keeps of the text up to and including the tokens `at` [N], [N,K] float64.

        ids, is_number, values [B,T]; positions [B,T]: 0 at the start of a text and at padding before it. at: indices
        into the flat batch.
        """
        return values.new_zeros(len(at), self.memory_size)

    def memory_at(self, batch: Batch, keep: Tensor) -> Tensor:
        """`memory` at the positions `keep` [N] of a training batch, [N,K]."""
        is_number = (batch.input_ids == self.config.num_token_id) & batch.attention_mask
        return self.memory(batch.input_ids, is_number, batch.numeric_values, batch.position_ids, keep)

    def remember(self, memory: Tensor, ids: Tensor, value: Tensor, is_number: Tensor) -> None:
        """Update the memory [B,K] in place with the words [B], and the values [B] of the rows that wrote a number."""

    # --------------------------------------------------------------------------------- labels and loss

    def labels(self, batch: Batch, keep: Tensor) -> NumberLabels:
        """The labels at positions `keep` [N] of a batch."""
        values = batch.numeric_labels.flatten()[keep]
        return NumberLabels(self.target.forward(values), batch.numeric_mask.flatten()[keep])

    def loss(self, u_prime: Cauchy, labels: NumberLabels) -> tuple[Tensor, Tensor]:
        """(NLL of the numbers [N], sum of cross entropies []) for U' [N,C].

        The caller applies gate and masks, so the NLL is also finite at text. The one-vs-rest cross entropies of other
        decisions of the head belong to L_cls.
        """
        nll = self.value(u_prime).nll(labels.values)
        return nll, nll.new_zeros(())

    # ------------------------------------------------------------------------------------------- start

    @torch.no_grad()
    def reset(self, columns: int | None = None) -> None:
        """Xavier for W_reg (S3 4 step 4), or for its first columns."""
        nn.init.xavier_uniform_(self.net.reg_weight[None, :columns])

    @torch.no_grad()
    def inherit(self, gain: float) -> None:
        """Initial W_reg without data: Xavier times `gain` on the word part, a mean over the number dimensions."""
        words, weight = self.net.word_size, self.net.reg_weight
        if dims := weight.shape[-1] - words:
            self.reset(words)
            weight[words:] = 1.0 / dims
        weight[:words] *= gain

    @torch.no_grad()
    def centre(self, value: Tensor | float) -> None:
        """Set the initial value, in the target's unit."""
        self.net.reg_bias.fill_(value)

    @torch.no_grad()
    def widen(self, scale: float, u_scale: Tensor) -> None:
        """Multiply W_reg so that Y has this scale, in the target's unit, if U' has the scales u_scale [C]."""
        weight = self.net.reg_weight
        weight.mul_(scale / (weight.abs() @ u_scale))

    @torch.no_grad()
    def start(self, coefficients: Tensor, intercept: float) -> None:
        """Start from a fit of the data: through the number dimensions, if W_loc has the coefficients, otherwise by
        W_reg = coefficients [C]."""
        words, weight = self.net.word_size, self.net.reg_weight
        self.centre(intercept)
        if dims := weight.shape[-1] - words:
            weight[:words] = 0.0
            weight[words:] = 1.0 / dims
        elif bool(coefficients.any()):  # else W_reg stays as drawn: zeros would make scale_Y 0 and the loss infinite
            weight.copy_(coefficients)

    def score_targets(self, values: Tensor, memory: Tensor) -> Tensor:
        """Regression targets [n,K] float64 for scores of n numbers with their memory. A plain head has K = 0.

        Linear maps of U's word part are fitted to these targets and passed to `start_scores`.
        """
        return memory.new_zeros(len(values), 0)

    def start_scores(self, weight: Tensor, bias: Tensor) -> None:
        """Take the fits to `score_targets`: weight [K,C_w], bias [K]."""

    def sharpened(self, x: Tensor, values: Tensor, memory: Tensor, characters: Tensor | None) -> dict[str, Tensor]:
        """The parameters after a last fit of the started scores to n numbers, by name. x [n,C_w]: loc_U's word part.
        characters: W_cls' rows of a numeral's characters [12,C_w], if digits are kept in view."""
        return {}

    # ------------------------------------------------------------------------------------------ metrics

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(sums, lists) of an evaluation batch for `metrics`. found: the laws at number positions `at` [M]."""
        return {}, {}

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Metrics of the head by name. sums and lists: from `measure`, over all batches and ranks."""
        return {}


def decision_strength(scores: Cauchy) -> Tensor:
    """Decision strength of S > 0, ordered like P. The clamp is for individuals without noise, whose scale is 0."""
    return scores.loc / scores.scale.clamp(min=1e-30)


def one_against_the_rest(scores: Cauchy, true: Tensor) -> Tensor:
    """The cross entropy of each decision S > 0."""
    return -torch.where(true, scores.log_sf(0.0), scores.log_cdf(0.0))
