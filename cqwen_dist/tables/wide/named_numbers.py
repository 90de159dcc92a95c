"""Predicts the next number from the named numbers of a text: linearly, and jointly by a smooth kernel.

    q = sum over names k: v_k x_k + v'_k x'_k  +  sum over d: V_d cos(offset_d + sum over k: x_k frequency_kd)
    x_k = slope_k (phi(value_k) - centre_k),  x'_k = slope'_k (value_k - centre'_k),  at most FAR each

The raw values x' are for sums: a total is linear in its parts, not in their logarithms.

A number's name is the text before it in its line. Rare names do not count. If a text lacks a name, x_k = x'_k = 0, as
at the mean. The random Fourier features turn the ridge regression into a kernel regression (Rahimi and Recht 2007,
"Random Features for Large-Scale Kernel Machines"). The calibrated start sets all parameters (`wide_start`); training
never changes them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cqwen_dist.tables.wide.wide_size import NAMES

FAR = 4.0  # clip, in standard deviations: one year 0 among years near 2000 must not decide the fit
KEYS = 2**24  # hashes of names
_BOUND = 1e6  # bound of one number's x: sums over a text stay finite
_BYTES = (65536, 256, 1)
_AT_ONCE = 256  # features whose cosines are in memory for all positions at once


class NamedNumbers(nn.Module):
    """q of the numbers so far, for each of `tables` weight sets. All are 0 before calibration, so q = 0."""

    frequencies: Tensor | None
    offsets: Tensor | None
    weight: Tensor | None

    def __init__(self, tables: int, random_features: int) -> None:
        """random_features: 0 for the linear terms only."""
        super().__init__()
        self.names = _constant(NAMES, len(_BYTES))  # bytes of a name's key: exact in any dtype
        self.centre, self.slope = _constant(2, NAMES), _constant(2, NAMES)  # of phi, of values
        self.linear = _constant(tables, 2 * NAMES)
        random = {"frequencies": (NAMES, random_features), "offsets": (random_features,)}
        for name, shape in (random | {"weight": (tables, random_features)}).items():
            self.register_parameter(name, _constant(*shape) if random_features else None)

    def read(self, name: Tensor, phi: Tensor, value: Tensor, number: Tensor) -> Tensor:
        """The increment of x and x' at each position: [2*NAMES,B,T] float64.

        name [B,T]: key of a number's name. phi, value [B,T]: at numbers, 0 elsewhere. number [B,T]: 1 at numbers.
        """
        known = (self.names.long() * torch.tensor(_BYTES, device=name.device)).sum(-1)
        both = torch.stack([phi.double(), value.double()])[:, None]
        x = (both - self.centre[..., None, None] * number) * self.slope[..., None, None]
        return ((name == known[:, None, None]) * x.clamp(-_BOUND, _BOUND)).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x, x' [2*NAMES,...] of the numbers so far, before clipping -> q [tables,...] fp32."""
        x = x.float().clamp(-FAR, FAR)
        q = torch.tensordot(self.linear.float(), x, 1)
        if self.frequencies is None or self.offsets is None or self.weight is None:
            return q
        parts = (table.split(_AT_ONCE, -1) for table in (self.frequencies, self.offsets, self.weight))
        for frequencies, offsets, weight in zip(*parts, strict=True):
            phase = torch.tensordot(frequencies.float().T, x[:NAMES], 1) + offsets.view(-1, *[1] * (x.dim() - 1))
            q = q + torch.tensordot(weight.float(), phase.cos(), 1)
        return q


def bytes_of(keys: Tensor) -> Tensor:
    """[n] below KEYS -> [n,3], as in `NamedNumbers.names`."""
    return torch.stack([keys // size % 256 for size in _BYTES], -1).float()


def _constant(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)
