"""Module 3: U = Cauchy(W_loc z + b_loc, act(W_scale z + b_scale) + floor) (S0 3, S3 2.3)."""

import pytest
import torch
from support.numerics import any_order, assert_close

from cqwen_dist.heads.abduction import AbductionNetwork

H = 12


@pytest.mark.parametrize("activation", ["softplus", "exp"])
@pytest.mark.parametrize("gamma", [1e-8, 1e-3, 300.0])
def test_gamma_init_is_the_scale_itself(activation: str, gamma: float) -> None:
    floor = 1e-6 if gamma > 1e-5 else gamma * 1e-3
    net = AbductionNetwork(H, H, gamma, scale_activation=activation, scale_floor=floor)
    scale = net(torch.randn(5, H)).scale
    # b_scale = log gamma is of size |log gamma| <= 18.4: rounding it to fp32 moves gamma by at most 1e-6 of itself
    assert_close(scale.double(), torch.full((5, H), gamma, dtype=torch.float64), 2e-6, "scale_U")


@pytest.mark.parametrize("c", [H - 4, H, H + 5])
def test_starts_as_the_identity(c: int) -> None:
    z = torch.randn(7, H)
    u = AbductionNetwork(H, c)(z)
    shared = min(c, H)
    assert u.loc.shape == u.scale.shape == (7, c)
    assert torch.equal(u.loc[:, :shared], z[:, :shared])
    assert not u.loc[:, shared:].any()
    assert_close(u.scale, torch.full((7, c), 1.3133), 1e-6, "scale_U")


def test_matches_the_formula_after_training() -> None:
    net = AbductionNetwork(H, 9, 0.3)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    z = torch.randn(4, 3, H)
    u, w = net(z), {n: p.detach().double() for n, p in net.named_parameters()}
    loc = z.double() @ w["loc_net.weight"].T + w["loc_net.bias"]
    scale = torch.log1p(torch.exp(z.double() @ w["scale_net.weight"].T + w["scale_net.bias"])) + 1e-6
    assert_close(u.loc, loc, any_order(H + 1), "loc_U")
    assert_close(u.scale, scale, any_order(H + 1), "scale_U")


def test_the_scales_floor_is_added_and_keeps_the_gradient() -> None:
    net = AbductionNetwork(H, H, 1e-3)
    with torch.no_grad():
        net.scale_net.bias.fill_(-20.0)  # softplus 2e-9, far below the floor of 1e-6
    u = net(torch.randn(2, H))
    assert bool((u.scale >= 1e-6).all())
    u.scale.sum().backward()
    assert bool((net.scale_net.bias.grad > 0).all())
    with torch.no_grad():
        net.scale_net.bias.fill_(-200.0)  # softplus is 0 in fp32: the floor alone, still positive
    assert bool((net(torch.randn(2, H)).scale > 0).all())


def test_bf16_features_keep_fp32_biases() -> None:
    net = AbductionNetwork(H, H, 1e-4)
    u = net(torch.randn(3, H).bfloat16())
    assert u.loc.dtype == u.scale.dtype == torch.float32
    assert_close(u.scale, torch.full((3, H), 1e-4), 2e-6, "scale_U under bf16 features")
