"""An abduction network and gates as a user would write them, and some that do not do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.ops.cauchy import Cauchy


class Bent(AbductionNetwork):
    """loc_U bends by tanh of a learnt factor, which begins at 0: the start is the linear network's."""

    def __init__(self, hidden_size: int, causal_hidden_size: int, **options: object) -> None:
        super().__init__(hidden_size, causal_hidden_size, **options)
        self.bend = nn.Parameter(torch.zeros(causal_hidden_size))

    def forward(self, features: Tensor) -> Cauchy:
        u = super().forward(features)
        return Cauchy(u.loc + self.bend * torch.tanh(u.loc), u.scale)


class HalfGate:
    """Half of m P."""

    counts_text = False

    def __call__(self, num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
        return 0.5 * num_mask.to(p_num.dtype) * p_num


class NoOptions(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()


class TooNarrow(AbductionNetwork):
    def forward(self, features: Tensor) -> Cauchy:
        u = super().forward(features)
        return Cauchy(u.loc[..., 1:], u.scale[..., 1:])


class SumGate(HalfGate):
    def __call__(self, num_mask: Tensor, p_num: Tensor, alpha: float) -> Tensor:
        return super().__call__(num_mask, p_num, alpha).sum()


class PairGate(HalfGate):
    def __call__(self, num_mask: Tensor, p_num: Tensor) -> Tensor:
        return p_num
