"""Golden tests: the seeds' formulas written anew in float64.

Each oracle below is the formula as its document prints it, with nothing of this package in it, but without the eps of
S0's code (test_departures.py shows what eps does). The seeds' modules (S2) keep the dtype of their inputs: they agree
to 1e-12 in float64, to 1e-5 in fp32.
"""

import math

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, tiny_base, tiny_model
from torch import nn

from cqwen_dist.generate.modes import MODES
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.seed_losses import CausalQwenLoss, OvrClassificationLoss, RegressionLoss
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import linear_ovr

B, T, V = 3, 5, 23
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}  # the tolerance of each
in_both = pytest.mark.parametrize("dtype", DTYPES)


def agree(found, expected, dtype):
    """Of this dtype, and equal within its tolerance, relative to the largest entry."""
    assert found.dtype == dtype
    assert_close(found, expected, DTYPES[dtype])


def scores(seed=0):
    """loc_S, scale_S [B,T,V] with |loc - C| at most ten scales: P in [0.03, 0.97]."""
    make = torch.Generator().manual_seed(seed)
    scale = 0.5 + 2 * torch.rand(B, T, V, generator=make, dtype=torch.float64)
    loc = scale * (10 * torch.rand(B, T, V, generator=make, dtype=torch.float64) - 5)
    labels = torch.randint(V, (B, T), generator=make)
    labels[0, 1] = labels[2, 4] = -100
    return loc, scale, labels


def seed_ovr(loc_S, scale_S, labels, C_ovr, ignore_index=-100, w=1.0):
    """S0 5.1, steps 1 to 5; w: S4 3.4.3."""
    valid_mask = (labels != ignore_index).double()
    P = 0.5 + torch.atan((loc_S - C_ovr) / scale_S) / math.pi
    y = (
        torch.zeros_like(P).scatter_(2, labels.masked_fill(labels == ignore_index, 0)[..., None], 1.0)
        * valid_mask[..., None]
    )
    bce = -(y * torch.log(P) + (1 - y) * torch.log(1 - P)) * w
    return bce.sum(-1) * valid_mask, valid_mask


@in_both
@pytest.mark.parametrize("C_ovr", [0.0, 0.2, torch.linspace(-1, 1, V, dtype=torch.float64)])
def test_ovr_loss_equals_s0_5_1(C_ovr, dtype):
    loc, scale, labels = scores()
    expected, expected_mask = seed_ovr(loc, scale, labels, C_ovr)
    loss, mask = OvrClassificationLoss(V, C_ovr)(loc.to(dtype), scale.to(dtype), labels)
    agree(loss, expected, dtype)
    assert torch.equal(mask, expected_mask.to(dtype))
    assert float(mask.mean()) == pytest.approx(13 / 15)  # S0's mask is of floats


@in_both
def test_a_threshold_that_learns_has_an_entry_for_each_word(dtype):
    """S2 4.1, S3 2.5: positionally, as the blueprint writes it, with the gradient of S0 5.1."""
    loc, scale, labels = scores()
    loss = CausalQwenLoss(V, 4, 0.0, 0.0, 1.0, True)
    c = loss.ovr_loss.threshold
    assert c.shape == (V,)
    assert c.requires_grad
    (found,) = torch.autograd.grad(loss.ovr_loss(loc.to(dtype), scale.to(dtype), labels)[0].sum(), c)
    oracle = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(seed_ovr(loc, scale, labels, oracle)[0].sum(), oracle)
    assert_close(found, expected, DTYPES[dtype])


def test_ovr_loss_through_the_weights():
    """loc_S = W U + b and scale_S = |W| scale (S0 4), through the one door of training, value and gradients."""
    make = torch.Generator().manual_seed(1)
    u, s, w = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in ((9, 7), (9, 7), (V, 7)))
    b, labels = torch.randn(V, generator=make, dtype=torch.float64), torch.randint(V, (1, 9), generator=make)
    leaves = [t.requires_grad_() for t in (u, s.abs() + 0.5, w, b)]
    loc, scale = leaves[0] @ leaves[2].T + leaves[3], leaves[1] @ leaves[2].abs().T
    expected = seed_ovr(loc[None], scale[None], labels, 0.5)[0].sum()
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


@in_both
@pytest.mark.parametrize("numbers", [True, False])
def test_gated_regression_equals_s4_4_5_1_and_s0_5_3(numbers, dtype):
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
    given = [t.to(dtype) for t in (loc, scale, y_loc, y_scale)]
    total, figures = CausalQwenLoss(V, num, C_ovr=0.2, reg_weight=0.7)(
        *given, labels, values.to(dtype), torch.ones(B, T)
    )
    assert figures["reg_loss_effective"] == pytest.approx(float(expected_reg), rel=DTYPES[dtype], abs=0)
    agree(total, ovr.sum() / valid.sum() + 0.7 * expected_reg, dtype)


@in_both
def test_denominator_class_weights_and_ignore_index_equal_s0_5_3(dtype):
    """The words' sum over the attention mask (cls_mask), S4 3.4.3's w_k, another ignore_index; labels as S0's code."""
    loc, scale, labels = scores(7)
    labels[labels == -100] = 3
    mask = torch.ones(B, T)
    mask[1, 3:] = 0
    w = torch.linspace(0, 2, V, dtype=torch.float64)
    one = torch.ones(B, T, dtype=dtype)
    for denominator, counted in (("attention", mask), ("valid", mask * (labels != 3))):
        loss = CausalQwenLoss(V, 4, 0.2, cls_denominator=denominator, class_weights=w, ignore_index=3)
        _, figures = loss(loc.to(dtype), scale.to(dtype), one, one, labels, one, mask)
        ovr, _ = seed_ovr(loc, scale, labels, 0.2, 3, w)
        expected = float((ovr * mask).sum() / counted.sum())
        assert figures["cls_loss_mean"] == pytest.approx(expected, rel=DTYPES[dtype])


@in_both
def test_cauchy_nll_equals_s0_5_2(dtype):
    y_loc, y_scale, v = (torch.linspace(a, b, 40, dtype=torch.float64) for a, b in ((-3, 8), (0.1, 30), (90, -70)))
    expected = torch.log(math.pi * y_scale) + torch.log(1 + ((v - y_loc) / y_scale) ** 2)
    agree(RegressionLoss()(y_loc.to(dtype), y_scale.to(dtype), v.to(dtype)), expected, dtype)


def test_float64_keeps_whole_numbers_above_2_to_the_24():
    one = torch.ones(1, dtype=torch.float64)
    found = RegressionLoss()(one * 2**24, one, one * (2**24 + 1))
    assert float(found) == pytest.approx(math.log(math.pi) + math.log(1 + 1), rel=1e-12)


@in_both
def test_the_forward_pass_from_ids_to_outputs_equals_the_seeds(dtype):
    """S0 1 to 4 from the same weights, module by module: embedding, z, U, then S, Y and P. The floor of scale_U (D1)
    is the only term that the seeds do not have; it is 0 here."""
    base, model = tiny_base().double(), tiny_model().to(dtype)
    model.abduction.scale_floor = 0.0
    ids = torch.tensor([[3, 17, NUM, 11, NUM, 60]])
    v = torch.tensor([[0.0, 0.0, 99.9, 0.0, -12345.0, 0.0]], dtype=torch.float64)
    p = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}

    def weight(name):
        return next(t for n, t in p.items() if n.endswith(name))

    table = base.get_input_embeddings().weight
    e = table[ids] + (torch.sign(v) * torch.log1p(v.abs()))[..., None] * weight("w_num")
    with torch.no_grad():
        z = base.model(inputs_embeds=e).last_hidden_state
    loc_u = z @ weight("loc_net.weight").T + weight("loc_net.bias")
    scale_u = nn.functional.softplus(z @ weight("scale_net.weight").T + weight("scale_net.bias"))
    total = scale_u + weight("b_noise").abs()
    loc_s = loc_u @ weight("cls_weight").T + weight("cls_bias")
    scale_s = total @ weight("cls_weight").abs().T
    loc_y, scale_y = loc_u @ weight("reg_weight") + weight("reg_bias"), total @ weight("reg_weight").abs()
    with torch.no_grad():
        agree(model.features.embedding(ids, v), e, dtype)
        agree(model.features(ids, v), z, dtype)
        for mine, theirs in zip(model.abduction(z.to(dtype)), (loc_u, scale_u), strict=True):
            agree(mine, theirs, dtype)
        found = model(ids, v)
    for mine, theirs in zip(found, (loc_s, scale_s, loc_y, scale_y), strict=True):
        agree(mine, theirs, dtype)
    P = 0.5 + torch.atan(loc_s / scale_s) / math.pi
    agree(Cauchy(found[0], found[1]).sf(0.0), P, dtype)


def test_the_start_equals_s1_3_and_s3_4():
    """U = Cauchy(z, gamma_0) exactly: W_loc = I, W_scale = 0; S1's gamma_0 is exp(2.3), S3's softplus(1)."""
    z = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    for activation, gamma in (("exp", math.exp(2.3)), ("softplus", math.log1p(math.e))):
        u = AbductionNetwork(12, 12, gamma, scale_activation=activation)(z)
        assert torch.equal(u.loc, z)
        torch.testing.assert_close(u.scale, torch.full_like(z, gamma), rtol=3e-6, atol=0)


def test_every_mode_of_s3_3_and_s4_2_4_exists():
    assert {"standard", "causal", "compatible", "ovr", "individual", "noise", "sample"} <= set(MODES)
