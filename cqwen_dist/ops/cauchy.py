"""The Cauchy law in stable closed form.

With ``gap = c - loc`` each probability is an angle: P(X > c) = atan2(scale, gap)/pi and P(X < c) =
atan2(scale, -gap)/pi. There is no quotient, so both stay accurate as scale -> 0. The logarithm of a probability near 1
is computed by log1p from its complement. The seed's form (S0 5.1), 1/2 + atan((loc - c)/scale)/pi, is equal, but loses
precision in fp32 once |c - loc| is about 1e5 scales.

At scale = 0 the law is a point mass and P(X > c) is 0, 1/2 or 1.

The law of a sum of Cauchy variables, given a second sum of the same ones, is a closed form too (`cdf_given_sum`):

    r = sum_j c_j t_j + n e        what is known            t_j, e, e' ~ Cauchy(0, 1), independent
    x = sum_j d_j t_j + m e'       what is asked for        c_j, d_j, n, m >= 0

One Fourier integral over the plane of (x, r) gives the joint law (Gil-Pelaez in x). With the second frequency s times
the first, the exponent is -(g(s) + i(r + s x)), g(s) = sum_j |d_j s + c_j| + m |s| + n, and the first frequency
integrates at once:

    P(x' <= x | r) = 1/2 - Im I / (2 pi^2 f(r)),   I = PV integral of ds / (s (g(s) + i(r + s x))),

f the density of r. Between two kinks s = -c_j/d_j the denominator is s (p + q s), whose integral is a logarithm.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HALVINGS = 60  # of an angle: what float64 resolves
LITTLE = 1e-9  # the least noise, in scales: without any, x may be a point
EPS_UNIFORM = 1e-7  # uniforms are clamped to this distance from 0 and 1; torch.rand can return exactly 0


def prob_above(scale: Tensor, gap: Tensor) -> Tensor:
    """P(X > c) for X ~ Cauchy(c - gap, scale): atan2(scale, gap)/pi, and 1/2 if both are 0.

    scale (>= 0) and gap: any floating dtype, broadcast together. Keeps relative precision down to P ~ 1e-38.
    """
    either = torch.logical_or(scale, gap)  # is not 0
    gap = torch.where(either, gap, 1.0) if torch.is_grad_enabled() else gap  # at 0 and 0 atan2 has no gradient
    return torch.where(either, torch.atan2(scale, gap) / math.pi, 0.5)


def log_prob_above(scale: Tensor, gap: Tensor) -> Tensor:
    """log P(X > c) for X ~ Cauchy(c - gap, scale), without cancellation on either side.

    gap > 0 (P < 1/2): log(atan2(scale, gap)/pi); else log1p(-atan2(scale, -gap)/pi). scale (>= 0) and gap
    broadcast together. Gradients are finite wherever the value is finite; the value is -inf if P is exactly 0.
    """
    rare = gap > 0
    tail = prob_above(scale, torch.where(rare, gap, -gap))  # the smaller of P and 1-P, in [0, 1/2]
    # The unused branch computes log(1/2). With its real input, its gradient could be 0 * inf = NaN.
    log_small = torch.log(torch.where(rare, tail, 0.5))
    log_large = torch.log1p(-torch.where(rare, 0.5, tail))
    return torch.where(rare, log_small, log_large)


class Cauchy(NamedTuple):
    """Independent Cauchy variables: ``loc`` and ``scale`` (>= 0), tensors of one shape [..., C] and one dtype."""

    loc: Tensor
    scale: Tensor

    def to(self, where: torch.dtype | torch.device) -> "Cauchy":
        """The same law in a different dtype or on a different device."""
        return self._replace(loc=self.loc.to(where), scale=self.scale.to(where))

    def affine(self, weight: Tensor, bias: Tensor | None = None) -> "Cauchy":
        """The law of W X + b: location W loc + b, scale |W| scale (S0 4, S3 2.4).

        weight [K, C] gives [..., K]; weight [C] gives [...]. bias [K] or scalar.
        Exact for each output's marginal law; the K outputs are dependent.
        """
        # Autocast would round the location to bf16, which is far coarser than the scale
        with torch.autocast(self.loc.device.type, enabled=False):
            if weight.ndim == 1:
                loc, scale = self.loc @ weight, self.scale @ weight.abs()
            else:
                loc, scale = F.linear(self.loc, weight), F.linear(self.scale, weight.abs())
        return Cauchy(loc if bias is None else loc + bias, scale)

    def log_sf(self, c: Tensor | float) -> Tensor:
        """log P(X > c); c broadcasts. See ``log_prob_above``."""
        return log_prob_above(self.scale, c - self.loc)

    def log_cdf(self, c: Tensor | float) -> Tensor:
        """log P(X < c); c broadcasts."""
        return log_prob_above(self.scale, self.loc - c)

    def sf(self, c: Tensor | float) -> Tensor:
        """P(X > c) (S0 5.1 formula 3); c broadcasts."""
        return prob_above(self.scale, c - self.loc)

    def cdf(self, c: Tensor | float) -> Tensor:
        """P(X < c); c broadcasts."""
        return prob_above(self.scale, self.loc - c)

    def nll(self, x: Tensor | float) -> Tensor:
        """-log density at x: log(pi scale) + log(1 + ((x - loc)/scale)^2) (S0 5.2), in nats; x broadcasts.

        Computed as log(pi) - log(scale) + 2 log hypot(scale, x - loc), without squares or quotients. Value and
        gradients are finite for all finite x.
        """
        return math.log(math.pi) - self.scale.log() + 2.0 * torch.hypot(self.scale, x - self.loc).log()

    def crps(self, x: Tensor | float) -> Tensor:
        """Continuous ranked probability score at x: the integral of (F(t) - 1[t >= x])^2 dt, in x's unit; x broadcasts.

        The usual form, E|X - x| - E|X - X'|/2, is inf - inf, as a Cauchy has no mean. The integral is finite, as F^2
        falls like 1/t^2. With r = (x - loc)/scale and the standard law F, its derivative by r is
        2 F(r) - 1 = 2 atan(r)/pi, and its value at r = 0 is 2 ln(2)/pi, so

            crps = scale (2/pi) (r atan(r) - ln(1 + r^2)/2 + ln 2).

        At scale 0 it is |x - loc|.
        """
        gap = (x - self.loc).abs()
        angle = torch.atan2(gap, self.scale)
        # scale ln sqrt(1 + r^2) = scale ln(hypot(scale, gap) / scale); xlogy: 0 ln 0 = 0
        spread = torch.xlogy(self.scale, torch.hypot(self.scale, gap)) - torch.xlogy(self.scale, self.scale)
        return 2.0 / math.pi * (gap * angle - spread + math.log(2.0) * self.scale)

    def quantile(self, p: Tensor | float) -> Tensor:
        """The x with P(X < x) = p: loc + scale tan(pi (p - 1/2)). p in [0, 1] broadcasts; the ends give -+inf.

        Within 1/4 of an end this uses the cotangent of the distance to the end, which keeps relative precision.
        """
        p = torch.as_tensor(p, dtype=self.loc.dtype, device=self.loc.device)
        low = p < 0.5
        end = torch.where(low, p, 1.0 - p)  # distance to the nearer end
        outer = end < 0.25
        cot = 1.0 / torch.tan(math.pi * torch.where(outer, end, 0.25))
        inner = torch.tan(math.pi * (torch.where(outer, 0.5, p) - 0.5))
        return self.loc + self.scale * torch.where(outer, torch.where(low, -cot, cot), inner)

    @staticmethod
    def half_width(level: float) -> float:
        """Half the width of the central interval that contains this probability in (0, 1), in scales."""
        return math.tan(math.pi * level / 2)

    def sample(self, eps: Tensor) -> Tensor:
        """Reparameterised draw from uniforms ``eps`` in [0, 1): the quantile at eps, clamped 1e-7 from both ends.

        eps: shape of loc (or broadcastable). Differentiable in loc and scale (S4 1.5.3).
        """
        return self.quantile(eps.clamp(EPS_UNIFORM, 1.0 - EPS_UNIFORM))

    def kl(self, other: "Cauchy", unit: Tensor | float | None = None) -> Tensor:
        """KL divergence to ``other``, in nats, elementwise; symmetric.

        log(((g1+g2)^2 + (m1-m2)^2)/(4 g1 g2)), written as log1p(((g1-g2)^2 + (m1-m2)^2)/(4 g1 g2)) to keep
        relative precision for close laws. Both scales > 0.

        unit (> 0, broadcasts): measures the shift in this unit, log1p((g1-g2)^2/(4 g1 g2) + (m1-m2)^2/(4 unit^2)). This
        is the exact KL after multiplying both scales by one factor that makes their geometric mean equal the unit. Use
        it for narrow laws, for which any shift is thousands of scales.
        """
        spread = self.scale - other.scale
        shift = self.loc - other.loc
        inv1, inv2 = 0.25 / self.scale, 1.0 / other.scale
        moved = (shift * inv1) * (shift * inv2) if unit is None else (shift / (2.0 * unit)) ** 2
        return torch.log1p((spread * inv1) * (spread * inv2) + moved)


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
