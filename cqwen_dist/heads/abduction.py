"""Module 3: from features to the individual, U ~ Cauchy(loc, scale) (seed S0 section 3)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from cqwen_dist.config.custom import find_custom, unusable
from cqwen_dist.ops.cauchy import Cauchy


class HeadLinear(NonDynamicallyQuantizableLinear):
    """A linear map whose weights are fp32 whatever its input is. torchao and torch's quantisers leave this class alone.

    bf16 features are multiplied in bf16. The bias is added in fp32: a bf16 b_scale near -9 would have steps of 6 %.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the bias' dtype, at least fp32."""
        real = torch.promote_types(self.bias.dtype, torch.float32)
        return F.linear(input, self.weight.to(input.dtype)).to(real) + self.bias.to(real)


class AbductionNetwork(nn.Module):
    """loc_U = W_loc z + b_loc; scale_U = act(W_scale z + b_scale) + floor, element-wise (S0 3, S3 2.3).

    The initial law is U ~ Cauchy(z, gamma_init): W_loc = I (zero rows below if C > H), b_loc = 0, W_scale = 0, and
    b_scale the inverse activation of gamma_init (S3 4 step 2; gamma_init is the scale, not the bias). The floor is
    added; a clamp would have no gradient below it.
    """

    def __init__(
        self,
        hidden_size: int,
        causal_hidden_size: int,
        gamma_init: float = 1.3133,
        *,
        scale_activation: str = "softplus",
        scale_floor: float = 1e-6,
        number_dims: int = 0,
    ) -> None:
        """number_dims: the last dimensions of U, whose law also depends on the columns after z (`heads.beside`): the
        first two are added to its location, the exponential of the third is a factor of its scale."""
        super().__init__()
        self.number_dims = number_dims
        self.loc_net: nn.Linear = HeadLinear(hidden_size, causal_hidden_size)
        self.scale_net = HeadLinear(hidden_size, causal_hidden_size)
        self.scale_activation = scale_activation
        self.scale_floor = scale_floor
        self.reset(gamma_init)

    @torch.no_grad()
    def reset(self, gamma_init: float = 1.3133) -> None:
        """Reset to the identity; if C differs from H, in the shared dimensions (S1 3.1)."""
        nn.init.eye_(self.loc_net.weight)
        nn.init.zeros_(self.loc_net.bias)
        nn.init.zeros_(self.scale_net.weight)
        self.set_scale(gamma_init)

    @torch.no_grad()
    def set_scale(self, gamma: float, start: int = 0, stop: int | None = None) -> None:
        """Set b_scale of dimensions [start, stop) such that scale_U = gamma if W_scale z = 0.

        Raises ValueError unless gamma is above the floor.
        """
        if not gamma > self.scale_floor:
            raise ValueError(f"gamma {gamma} must be above the floor {self.scale_floor}")
        value = gamma - self.scale_floor
        # The inverse of softplus is log(expm1(value)), here in a form that is stable for all values
        softplus = self.scale_activation == "softplus"
        bias = value + math.log(-math.expm1(-value)) if softplus else math.log(value)
        self.scale_net.bias[start:stop] = bias

    def forward(self, features: Tensor) -> Cauchy:
        """features [..., H or more] in any float dtype -> Cauchy(loc [..., C], scale [..., C]) in fp32."""
        hidden = self.loc_net.in_features
        z, beside = features[..., :hidden], features[..., hidden:]
        loc, raw = self.loc_net(z), self.scale_net(z)  # called, so that an adapter around them counts
        positive = F.softplus(raw) if self.scale_activation == "softplus" else raw.exp()
        if beside.shape[-1]:
            loc = loc + self._on_numbers(beside[..., :2].float().sum(-1))
            positive = positive * self._on_numbers(beside[..., 2].float()).exp()
        return Cauchy(loc, positive + self.scale_floor)

    def _on_numbers(self, x: Tensor) -> Tensor:
        """x [...] on the number dimensions, 0 on words: [..., C]."""
        dims = x.unsqueeze(-1).expand(*x.shape, self.number_dims)
        return F.pad(dims, (self.loc_net.out_features - self.number_dims, 0))


class Abduction(Protocol):
    """An nn.Module in the place of `AbductionNetwork`, with its constructor; the simplest is a subclass."""

    loc_net: nn.Linear  # [C,H]; a start sets its weight
    scale_floor: float  # a start sets it

    def set_scale(self, gamma: float, start: int = 0, stop: int | None = None) -> None: ...

    def __call__(self, features: Tensor) -> Cauchy: ...  # [...,H] -> [...,C] in fp32, scale > 0


KEY = "model.abduction"
ABDUCTIONS: dict[str, Callable[..., Abduction]] = {"linear": AbductionNetwork}


def abduction_named(name: str, outside: str | Path = "") -> Callable[..., Abduction]:
    """A name of `ABDUCTIONS`, or an import path; outside: as `find_custom`. Raises `UserError`."""
    return ABDUCTIONS[name] if name in ABDUCTIONS else find_custom(KEY, name, outside)


def make_abduction(network: Callable[..., Abduction], name: str, hidden: int, size: int, **options: Any) -> Any:
    """Create the network H -> C. A custom network is tested on a few features. Raises `UserError` if it fails."""
    if name in ABDUCTIONS:
        return network(hidden, size, **options)
    allowed = f"Name({hidden}, {size}, scale_activation=, scale_floor=) as docs/training.md describes it"
    try:
        made = network(hidden, size, **options)
        if not isinstance(made, nn.Module) or not callable(getattr(made, "set_scale", None)):
            raise TypeError("it is no nn.Module with set_scale")
        if made.loc_net.weight.shape != (size, hidden):
            raise ValueError(f"loc_net.weight is of shape {list(made.loc_net.weight.shape)}, not {[size, hidden]}")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loc, scale = made(torch.ones(2, 3, hidden))
        for part, values in (("loc", loc), ("scale", scale)):
            if values.shape != (2, 3, size) or values.dtype != torch.float32:
                raise ValueError(f"its {part} of features [2, 3, {hidden}] is {values.dtype} {list(values.shape)}")
    except Exception as error:  # user code may raise anything
        raise unusable(KEY, name, error, allowed) from error
    return made
