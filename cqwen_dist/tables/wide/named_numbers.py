"""What a text's numbers, each known by its name, say of the next number: linearly, and together in any smooth way.

    q = sum over names k: v_k x_k + v'_k x'_k  +  sum over d: V_d cos(offset_d + sum over k: x_k frequency_kd)
    x_k = slope_k (phi(value_k) - centre_k),  x'_k = slope'_k (value_k - centre'_k),  at most FAR each

The values themselves, x', are for sums: a total is linear in its parts, not in their logarithms.

A number's name is the words before it in its line. Names that few texts hold do not count, nor does a name that the
text lacks: x_k = x'_k = 0, as at the mean. The sum, of random Fourier features, makes a ridge regression one with a
kernel (Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines"). All is set by the calibrated start
(`wide_start`) and never trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cqwen_dist.tables.wide.wide_size import NAMES

FAR = 4.0  # standard deviations: a year of 0 among years of which all are near 2000 must not decide alone
KEYS = 2**24  # hashes of names
_BOUND = 1e6  # of one number's x: sums of a text stay finite
_BYTES = (65536, 256, 1)
_AT_ONCE = 256  # features whose cosines are held for all positions


class NamedNumbers(nn.Module):
    """q of the numbers so far, one for each of `tables` weights. All are 0 until the start is calibrated: q = 0."""

    frequencies: Tensor | None
    offsets: Tensor | None
    weight: Tensor | None

    def __init__(self, tables: int, random_features: int) -> None:
        """random_features: 0: x counts linearly alone."""
        super().__init__()
        self.names = _constant(NAMES, len(_BYTES))  # bytes of a name's key: exact in any dtype
        self.centre, self.slope = _constant(2, NAMES), _constant(2, NAMES)  # of phi, of values
        self.linear = _constant(tables, 2 * NAMES)
        random = {"frequencies": (NAMES, random_features), "offsets": (random_features,)}
        for name, shape in (random | {"weight": (tables, random_features)}).items():
            self.register_parameter(name, _constant(*shape) if random_features else None)

    def read(self, name: Tensor, phi: Tensor, value: Tensor, number: Tensor) -> Tensor:
        """What each position adds to x and x' of its text: [2*NAMES,B,T] float64.

        name [B,T]: the key of a number's name. phi, value [B,T]: of it, 0 elsewhere. number [B,T]: 1 at numbers.
        """
        known = (self.names.long() * torch.tensor(_BYTES, device=name.device)).sum(-1)
        both = torch.stack([phi.double(), value.double()])[:, None]
        x = (both - self.centre[..., None, None] * number) * self.slope[..., None, None]
        return ((name == known[:, None, None]) * x.clamp(-_BOUND, _BOUND)).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x, x' [2*NAMES,...] of the numbers so far, not limited yet -> q [tables,...] fp32."""
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
