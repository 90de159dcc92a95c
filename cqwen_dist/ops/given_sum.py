"""The law of a sum of Cauchy variables, given a second sum of the same ones, in closed form.

    r = sum_j c_j t_j + n e        what is known            t_j, e, e' ~ Cauchy(0, 1), independent
    x = sum_j d_j t_j + m e'       what is asked for        c_j, d_j, n, m >= 0

One Fourier integral over the plane of (x, r) gives the joint law (Gil-Pelaez in x). With the second frequency s times
the first, the exponent is -(g(s) + i(r + s x)), g(s) = sum_j |d_j s + c_j| + m |s| + n, and the first frequency
integrates at once:

    P(x' <= x | r) = 1/2 - Im I / (2 pi^2 f(r)),   I = PV integral of ds / (s (g(s) + i(r + s x))),

f the density of r. Between two kinks s = -c_j/d_j the denominator is s (p + q s), whose integral is a logarithm.
"""

import math

import torch
from torch import Tensor

HALVINGS = 60  # of an angle: what float64 resolves
LITTLE = 1e-9  # the least noise, in scales: without any, x may be a point


def cdf_given_sum(x: Tensor, r: Tensor, c: Tensor, d: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """P(x' <= x | r) [...], float64. x, r, n, m [...]; c, d [...,J]; n and m above 0; all float64."""
    m, d = m + torch.where(c == 0, d, 0.0).sum(-1), torch.where(c == 0, 0.0, d)  # r says nothing of these
    at, order = torch.where(c > 0, d / c, 0.0).sort(-1)  # kinks in order of 1/|s|
    c, d = c.expand_as(order).gather(-1, order), d.expand_as(order).gather(-1, order)
    below = torch.cat([torch.zeros_like(at[..., :1]), at[..., :-1]], -1)
    (all_c, past_c), (all_d, past_d) = ((part.sum(-1, keepdim=True), 2 * (part.cumsum(-1) - part)) for part in (c, d))
    p = past_c - all_c + n.unsqueeze(-1) + 1j * r.unsqueeze(-1)
    minus_q = all_d - past_d + m.unsqueeze(-1) - 1j * x.unsqueeze(-1)
    start, step = minus_q + p * below, at - below
    y = p * step / start
    little = y.abs() < 1e-6  # p may be 0
    parts = torch.where(little, step / start * (1 - y / 2 + y * y / 3), torch.log1p(y) / torch.where(little, 1.0, p))
    p_0 = all_c[..., 0] + n + 1j * r
    last = m - all_d[..., 0] - 1j * x + p_0 * at[..., -1]
    integral = (last.log() - (all_d[..., 0] + m + 1j * x).log()) / p_0 - parts.sum(-1)
    return 0.5 - integral.imag / (2 * math.pi * p_0.reciprocal().real)


def quantile_given_sum(levels: Tensor, r: Tensor, c: Tensor, d: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """The x [B,K] with P(x' <= x | r) = levels [K], in float64. r, n, m [B]; c, d [B,J]; m may be 0, and n if a c is
    not."""
    c, d = c.double().unsqueeze(1), d.double().unsqueeze(1)
    unit = (d.sum(-1) + m.double().unsqueeze(-1)).clamp(min=1e-300)
    n = torch.maximum(n.double().unsqueeze(-1), LITTLE * c.sum(-1))
    m, levels = torch.maximum(m.double().unsqueeze(-1), LITTLE * unit), levels.double().expand(len(r), -1)
    r, low, step = r.double().unsqueeze(-1), torch.full_like(levels, -math.pi / 2), math.pi
    for _ in range(HALVINGS):
        step /= 2
        below = cdf_given_sum(unit * (low + step).tan(), r, c, d, n, m) < levels
        low = torch.where(below, low + step, low)
    return unit * (low + step / 2).tan()
