"""Golden tests: the seeds' formulas written anew in float64, at values where their eps does no harm.

Each oracle below is the formula as its document prints it, with nothing of this package in it. The modules under test
are the seeds' (S2), which hold fp32: 2e-6 relative is some ten of its roundings; where the oracle carries the seeds'
eps of 1e-7 in both logarithms, and every P lies in [0.02, 0.98], that adds at most 5e-6.
"""

import math

import pytest
import torch
from support.numerics import ovr_prob_at, ovr_top_word
from support.tiny import NUM, tiny_base, tiny_model
from torch import nn

from cqwen_dist.generate.modes import MODES
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.seed_losses import CausalQwenLoss, OvrClassificationLoss, RegressionLoss
from cqwen_dist.ops.ovr import linear_ovr

B, T, V = 3, 5, 23


def scores(seed=0):
    """loc_S, scale_S [B,T,V] with |loc - C| at most ten scales: P in [0.03, 0.97]."""
    make = torch.Generator().manual_seed(seed)
    scale = 0.5 + 2 * torch.rand(B, T, V, generator=make, dtype=torch.float64)
    loc = scale * (10 * torch.rand(B, T, V, generator=make, dtype=torch.float64) - 5)
    labels = torch.randint(V, (B, T), generator=make)
    labels[0, 1] = labels[2, 4] = -100
    return loc, scale, labels


def seed_ovr(loc_S, scale_S, labels, C_ovr, eps=1e-7):
    """S0 5.1, steps 1 to 5."""
    valid_mask = (labels != -100).double()
    P = 0.5 + torch.atan((loc_S - C_ovr) / scale_S) / math.pi
    y = torch.zeros_like(P).scatter_(2, labels.clamp(min=0)[..., None], 1.0) * valid_mask[..., None]
    bce = -(y * torch.log(P + eps) + (1 - y) * torch.log(1 - P + eps))
    return bce.sum(-1) * valid_mask, valid_mask


@pytest.mark.parametrize("C_ovr", [0.0, torch.linspace(-1, 1, V, dtype=torch.float64)])
def test_ovr_loss_equals_s0_5_1(C_ovr):
    loc, scale, labels = scores()
    expected, expected_mask = seed_ovr(loc, scale, labels, C_ovr)
    loss, mask = OvrClassificationLoss(V, C_ovr)(loc, scale, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=7e-6, atol=0)
    assert torch.equal(mask, expected_mask.bool())


def test_ovr_loss_through_the_weights():
    """loc_S = W U + b and scale_S = |W| scale (S0 4), through the one door of training, value and gradients."""
    make = torch.Generator().manual_seed(1)
    u, s, w = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in ((9, 7), (9, 7), (V, 7)))
    b, labels = torch.randn(V, generator=make, dtype=torch.float64), torch.randint(V, (1, 9), generator=make)
    leaves = [t.requires_grad_() for t in (u, s.abs() + 0.5, w, b)]
    loc, scale = leaves[0] @ leaves[2].T + leaves[3], leaves[1] @ leaves[2].abs().T
    expected = seed_ovr(loc[None], scale[None], labels, 0.5, eps=0.0)[0].sum()
    found = linear_ovr(*leaves, 0.5, labels[0]).loss
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for f, e in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-12)


def seed_gated(reg_loc, reg_scale, num_prob, targets, values, num_token_id):
    """S4 4.5.1, its mean over numbers included."""
    is_num = (targets == num_token_id).double()
    nll = torch.log(math.pi * reg_scale) + torch.log(1 + ((values - reg_loc) / reg_scale) ** 2)
    gated = is_num * num_prob * nll
    return gated.sum() / is_num.sum() if is_num.sum() > 0 else torch.tensor(0.0, dtype=torch.float64)


@pytest.mark.parametrize("numbers", [True, False])
def test_gated_regression_equals_s4_4_5_1_and_s0_5_3(numbers):
    loc, scale, labels = scores(2)
    num = 4
    labels[labels == num] = 5
    if numbers:
        labels[0, 0] = labels[1, 2] = labels[2, 1] = num
    make = torch.Generator().manual_seed(3)
    y_loc, y_scale, values = (torch.randn(B, T, generator=make, dtype=torch.float64) for _ in range(3))
    y_scale = y_scale.abs() + 0.3
    p_num = 0.5 + torch.atan((loc[..., num] - 0.2) / scale[..., num]) / math.pi
    expected_reg = seed_gated(y_loc, y_scale, p_num, labels, values, num)
    ovr, valid = seed_ovr(loc, scale, labels, 0.2)
    total, figures = CausalQwenLoss(V, num, C_ovr=0.2, reg_weight=0.7)(
        loc, scale, y_loc, y_scale, labels, values, torch.ones(B, T)
    )
    assert figures["reg_loss_effective"] == pytest.approx(float(expected_reg), rel=2e-6, abs=0)
    assert float(total) == pytest.approx(float(ovr.sum() / valid.sum() + 0.7 * expected_reg), rel=8e-6)


def test_cauchy_nll_equals_s0_5_2():
    y_loc, y_scale, v = (torch.linspace(a, b, 40, dtype=torch.float64) for a, b in ((-3, 8), (0.1, 30), (90, -70)))
    expected = torch.log(math.pi * y_scale) + torch.log(1 + ((v - y_loc) / y_scale) ** 2)
    torch.testing.assert_close(RegressionLoss()(y_loc, y_scale, v).double(), expected, rtol=2e-6, atol=2e-6)


def test_predictions_equal_s4_3_5_3():
    """argmax of P, and all words above a threshold, from the weights alone."""
    make = torch.Generator().manual_seed(4)
    u, w = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in ((6, 8), (V, 8)))
    s = torch.rand(6, 8, generator=make, dtype=torch.float64) + 0.1
    P = 0.5 + torch.atan((u @ w.T - 0.3) / (s @ w.abs().T)) / math.pi
    assert torch.equal(ovr_top_word(u, s, w, None, 0.3).word, P.argmax(-1))
    found = ovr_prob_at(u, s, w, None, 0.3, torch.arange(V)) > 0.5
    assert torch.equal(found, P > 0.5)


def test_the_forward_pass_from_ids_to_outputs_equals_the_seeds():
    """S0 1 to 4 (the author's public forward pass) from the same weights: embedding, backbone, U, S, Y and P."""
    base, model = tiny_base().double(), tiny_model()
    ids = torch.tensor([[3, 17, NUM, 11, NUM, 60]])
    v = torch.tensor([[0.0, 0.0, 99.9, 0.0, -12345.0, 0.0]], dtype=torch.float64)
    p = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    w_num = next(t for n, t in p.items() if n.endswith("w_num"))

    def weight(name):
        return next(t for n, t in p.items() if n.endswith(name))

    e = base.get_input_embeddings().weight.double()[ids] + (torch.sign(v) * torch.log1p(v.abs()))[..., None] * w_num
    with torch.no_grad():
        z = base.model(inputs_embeds=e).last_hidden_state
    loc_u = z @ weight("loc_net.weight").T + weight("loc_net.bias")
    scale_u = nn.functional.softplus(z @ weight("scale_net.weight").T + weight("scale_net.bias"))
    total = scale_u + weight("b_noise").abs()
    loc_s = loc_u @ weight("cls_weight").T + weight("cls_bias")
    scale_s = total @ weight("cls_weight").abs().T
    loc_y, scale_y = loc_u @ weight("reg_weight") + weight("reg_bias"), total @ weight("reg_weight").abs()
    with torch.no_grad():
        found = model(ids, v)
    for mine, theirs in zip(found[:4], (loc_s, scale_s, loc_y, scale_y), strict=True):
        error = (mine.double() - theirs).abs().max() / theirs.abs().max()
        assert error < 1e-5  # fp32 of a two-layer backbone and one product, beside float64
    P = 0.5 + torch.atan(loc_s / scale_s) / math.pi
    mine = 0.5 + torch.atan(found[0].double() / found[1].double()) / math.pi
    assert (P - mine).abs().max() < 1e-5


def test_the_start_equals_s1_3_and_s3_4():
    """U = Cauchy(z, gamma_0) exactly: W_loc = I, W_scale = 0; S1's gamma_0 is exp(2.3), S3's softplus(1)."""
    z = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    for activation, gamma in (("exp", math.exp(2.3)), ("softplus", math.log1p(math.e))):
        u = AbductionNetwork(12, 12, gamma, scale_activation=activation)(z)
        assert torch.equal(u.loc, z)
        torch.testing.assert_close(u.scale, torch.full_like(z, gamma), rtol=3e-6, atol=0)


def test_the_head_of_s3_4_step_3_keeps_the_bases_softmax():
    base, model = tiny_base(), tiny_model()
    assert torch.equal(model.action.cls_weight, base.lm_head.weight)
    assert not model.action.cls_bias.any()
    ids = torch.randint(0, NUM, (2, 7), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        loc_s = model(ids, torch.zeros(2, 7, dtype=torch.float64))[0]
        torch.testing.assert_close(loc_s.softmax(-1), base(ids).logits.softmax(-1), rtol=1e-4, atol=1e-7)


def test_every_mode_of_s3_3_and_s4_2_4_exists():
    assert {"standard", "causal", "compatible", "ovr", "individual", "noise", "sample"} <= set(MODES)
