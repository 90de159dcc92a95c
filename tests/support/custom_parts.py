"""An abduction network, a number head and gates as a user would write them, and some that do not do."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.number_head import Decision, NumberHead, NumberLabels
from cqwen_dist.ops.cauchy import Cauchy


class Bent(AbductionNetwork):
    """loc_U bends by tanh of a learnt factor, which begins at 0: the start is the linear network's."""

    def __init__(self, hidden_size: int, causal_hidden_size: int, **options: object) -> None:
        super().__init__(hidden_size, causal_hidden_size, **options)
        self.bend = nn.Parameter(torch.zeros(causal_hidden_size))

    def forward(self, features: Tensor) -> Cauchy:
        u = super().forward(features)
        return Cauchy(u.loc + self.bend * torch.tanh(u.loc), u.scale)


@dataclass(frozen=True)
class WholeLabels(NumberLabels):
    is_whole: Tensor  # [N] bool


class WholeNumbers(NumberHead):
    """It also decides whether a number is whole, by a score of U's word part, and then rounds it."""

    exact = True

    def add_scores(self) -> None:
        self.net.whole_weight = nn.Parameter(torch.zeros(1, self.net.word_size))
        self.net.whole_bias = nn.Parameter(torch.zeros(1))

    def score(self, u_prime: Cauchy) -> Cauchy:
        s = self.net.word_part(u_prime).affine(self.net.whole_weight, self.net.whole_bias)
        return Cauchy(s.loc[..., 0], s.scale[..., 0] + 0.3)

    def decide(self, u_prime: Cauchy, memory: Tensor, bar: float = 0.5) -> Decision:
        y, whole = self.value(u_prime), self.score(u_prime).loc > 0
        value = self.target.inverse(y.loc).round().masked_fill(~whole, torch.nan)
        return Decision(Cauchy(self.target.forward(value).where(whole, y.loc), y.scale), exact=value)

    def labels(self, batch: Batch, keep: Tensor) -> WholeLabels:
        own, raw = super().labels(batch, keep), batch.numeric_labels.flatten()[keep]
        return WholeLabels(own.values, own.is_number, raw == raw.round())

    def loss(self, u_prime: Cauchy, labels: NumberLabels) -> tuple[Tensor, Tensor]:
        nll, _ = super().loss(u_prime, labels)
        score = self.score(u_prime)
        entropy = -torch.where(labels.is_whole, score.log_sf(0.0), score.log_cdf(0.0))
        return nll, torch.where(labels.is_number, entropy, 0.0).sum()

    def score_targets(self, values: Tensor, memory: Tensor) -> Tensor:
        return (values == values.round()).double().unsqueeze(-1) * 2 - 1

    @torch.no_grad()
    def start_scores(self, weight: Tensor, bias: Tensor) -> None:
        self.net.whole_weight.copy_(weight)
        self.net.whole_bias.copy_(bias)

    def measure(self, found: Decision, batch: Batch, at: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raw = batch.numeric_labels.flatten()[at]
        return {
            "whole_right": (~found.exact.isnan() == (raw == raw.round())).sum(),
            "whole_seen": (raw == raw).sum(),
        }, {}

    def metrics(self, sums: Mapping[str, float], lists: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"eval/whole_accuracy": sums["whole_right"] / max(sums["whole_seen"], 1)}


class HalfGate:
    """Half of m P."""

    counts_text = False

    def __call__(self, num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
        return 0.5 * num_mask.to(p_num.dtype) * p_num


class TooNarrow(AbductionNetwork):
    def forward(self, features: Tensor) -> Cauchy:
        u = super().forward(features)
        return Cauchy(u.loc[..., 1:], u.scale[..., 1:])


class SumGate(HalfGate):
    def __call__(self, num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
        return super().__call__(num_mask, p_num, alpha).sum()
