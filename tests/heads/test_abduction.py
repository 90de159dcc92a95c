"""Module 3: U = Cauchy(W_loc z + b_loc, act(W_scale z + b_scale) + floor) (S0 3, S3 2.3)."""

import pytest
import torch
from scipy import stats
from support.numerics import any_order, assert_close

from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.ops.cauchy import Cauchy

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


C, V = 6, 11


@pytest.fixture
def action() -> ActionNetwork:
    torch.manual_seed(0)
    net = ActionNetwork(C, V)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    return net


def test_the_four_outputs_equal_the_formulas(action: ActionNetwork) -> None:
    loc, scale = torch.randn(2, 3, C), torch.rand(2, 3, C) + 0.1
    loc_s, scale_s, loc_y, scale_y = action(loc, scale)
    w, b, r = action.cls_weight.double(), action.cls_bias.double(), action.reg_weight.double()
    total = scale.double() + action.b_noise.double().abs()
    rounding = any_order(C + 1)
    assert_close(loc_s, torch.einsum("btc,vc->btv", loc.double(), w) + b, rounding, "loc_S")
    assert_close(scale_s, torch.einsum("btc,vc->btv", total, w.abs()), rounding, "scale_S holds no bias")
    assert_close(loc_y, (loc.double() * r).sum(-1) + action.reg_bias.double(), rounding, "loc_Y")
    assert_close(scale_y, (total * r.abs()).sum(-1), rounding, "scale_Y")


def test_draws_through_the_network_follow_the_closed_form(action: ActionNetwork) -> None:
    """1e5 individuals and noises, pushed through W: Kolmogorov-Smirnov against Cauchy(loc_S, scale_S) and Y's."""
    n, g = 100_000, torch.Generator().manual_seed(1)
    loc, scale = torch.randn(C, dtype=torch.float64), torch.rand(C, dtype=torch.float64) + 0.1
    net = action.double()
    loc_s, scale_s, loc_y, scale_y = (t.detach() for t in net(loc, scale))
    u = Cauchy(loc, scale).sample(torch.rand(n, C, generator=g, dtype=torch.float64))
    noise = Cauchy(torch.zeros(C, dtype=torch.float64), net.b_noise.detach().abs())
    u_prime = u + noise.sample(torch.rand(n, C, generator=g, dtype=torch.float64))
    s = u_prime @ net.cls_weight.detach().T + net.cls_bias.detach()
    y = u_prime @ net.reg_weight.detach() + net.reg_bias.detach()
    for draws, at, width in [(s[:, 0], loc_s[0], scale_s[0]), (s[:, -1], loc_s[-1], scale_s[-1]), (y, loc_y, scale_y)]:
        assert stats.kstest(draws.numpy(), "cauchy", args=(float(at), float(width))).pvalue > 1e-3


def test_noise_enters_by_its_absolute_value(action: ActionNetwork) -> None:
    u = Cauchy(torch.zeros(C), torch.ones(C))
    before = action.add_noise(u).scale
    with torch.no_grad():
        action.b_noise.neg_()
    assert torch.equal(action.add_noise(u).scale, before)
    assert torch.equal(action.add_noise(u).loc, u.loc)


def test_a_range_of_rows_gives_that_part_of_the_scores(action: ActionNetwork) -> None:
    part = ActionNetwork(C, V, vocab_start=3, rows=4)
    rows = slice(3, 7)
    with torch.no_grad():
        for name in ("cls_weight", "cls_bias", "threshold"):
            getattr(part, name).copy_(getattr(action, name)[rows])
    assert part.rows == 4
    u = Cauchy(torch.randn(5, C), torch.rand(5, C))
    rounding = any_order(C + 1)  # the order of sums goes by the number of rows
    assert_close(part.scores(u).loc, action.scores(u).loc[:, rows], rounding, "loc_S")
    assert_close(part.scores(u).scale, action.scores(u).scale[:, rows], rounding, "scale_S")


def test_weights_start_xavier_and_biases_zero() -> None:
    torch.manual_seed(0)
    net = ActionNetwork(400, 3)
    bound = (6.0 / 401) ** 0.5  # xavier uniform, fan in 400, fan out 1 (S3 4 step 4)
    assert float(net.reg_weight.detach().abs().max()) <= bound
    assert float(net.reg_weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert not net.cls_bias.any()
    assert net.reg_bias.item() == 0.0
    assert ActionNetwork(4, 3, scalar_threshold=True).threshold.shape == (1,)
