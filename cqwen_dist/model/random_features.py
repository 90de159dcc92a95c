"""Random Fourier features of a text's numbers: a ridge regression on them is one with a kernel (Rahimi and Recht 2007,
"Random Features for Large-Scale Kernel Machines"), so that numbers may act on the next one in any smooth way, together.

    q = sum over d: V_d cos(offset_d + sum over names k: x_k frequency_kd),    x_k = slope_k (phi(value_k) - centre_k)

A number is known by its name, the words before it in its line. Numbers with other names do not count, nor does a name
that the text lacks: x_k = 0, as at the mean. Everything here is set by the calibrated start (`model.wide_start`) and
never trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NAMES = 64
_BYTES = (65536, 256, 1)
_AT_ONCE = 256  # features whose cosines are held for all positions


class RandomFeatures(nn.Module):
    """q of the numbers so far, one for each of `tables` weights V. All are 0 until the start is calibrated: q = 0."""

    def __init__(self, tables: int, count: int) -> None:
        super().__init__()
        self.names = _constant(NAMES, len(_BYTES))  # bytes of a name's column: exact in any dtype
        self.centre, self.slope = _constant(NAMES), _constant(NAMES)
        self.frequencies, self.offsets = _constant(NAMES, count), _constant(count)
        self.weight = _constant(tables, count)

    def read(self, name: Tensor, phi: Tensor, number: Tensor) -> Tensor:
        """What each position adds to the x of its text: [NAMES,B,T] float64.

        name [B,T]: the column of a number's name. phi [B,T]: of its value, 0 elsewhere. number [B,T]: 1 at numbers.
        """
        known = (self.names.long() * torch.tensor(_BYTES, device=name.device)).sum(-1)
        centred = phi.double() - self.centre[:, None, None] * number
        return (name == known[:, None, None]) * self.slope[:, None, None] * centred

    def forward(self, x: Tensor) -> Tensor:
        """x [NAMES,B,T] of the numbers so far -> q [tables,B,T] fp32."""
        q = x.new_zeros(len(self.weight), *x.shape[1:], dtype=torch.float32)
        parts = (table.split(_AT_ONCE, -1) for table in (self.frequencies, self.offsets, self.weight))
        for frequencies, offsets, weight in zip(*parts, strict=True):
            phase = torch.tensordot(frequencies.float().T, x.float(), 1) + offsets[:, None, None]
            q = q + torch.tensordot(weight.float(), phase.cos(), 1)
        return q


def bytes_of(columns: Tensor) -> Tensor:
    """[n] below 2^24 -> [n,3], as `RandomFeatures.names` holds them."""
    return torch.stack([columns // size % 256 for size in _BYTES], -1).float()


def _constant(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)
