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


EPS = 1e-7


def seed_p(loc, scale, C=0.0):
    return 0.5 + torch.atan((loc - C) / scale) / math.pi


def test_eps_makes_the_loss_negative_and_damps_the_only_gradient_that_teaches():
    """D-trap, S0 5.1: 151,936 confident words sum to less than 0; the label's gradient at z = -1e8 is nearly lost."""
    negatives = torch.full((151_936,), -1e8, dtype=torch.float64)
    seed = -torch.log(1 - seed_p(negatives, 1.0) + EPS).sum()
    exact = -Cauchy(negatives, torch.ones_like(negatives)).log_cdf(0.0).sum()
    assert seed < -0.01
    assert exact == pytest.approx(151_936 / (math.pi * 1e8), rel=1e-6)

    z = torch.tensor(-1e8, dtype=torch.float64, requires_grad=True)
    (damped,) = torch.autograd.grad(-torch.log(seed_p(z, 1.0) + EPS), z)
    (ours,) = torch.autograd.grad(-Cauchy(z, torch.ones_like(z)).log_sf(0.0), z)
    assert ours == pytest.approx(-1e-8, rel=1e-6)  # -1/|z|
    assert abs(damped) < 0.04 * abs(ours)


def test_p_in_bf16_is_zero_at_the_end_of_training():
    """Elementwise maths is fp32: at z = -1,000 the seeds' form in bf16 has no P left."""
    assert seed_p(torch.tensor(-1000.0, dtype=torch.bfloat16), 1.0) == 0
    assert Cauchy(torch.tensor(-1000.0), torch.tensor(1.0)).sf(0.0) == pytest.approx(1 / (1000 * math.pi), rel=1e-4)


def test_a_zero_row_for_num_is_nan_as_written_and_finite_here():
    """D5: S1 4.1.2's W = 0, b = -10 under |W| propagation has scale 0."""
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([4, 1, 4])

    def gradients(loss_of):
        w = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
        w[4] = 0.0
        b = torch.zeros(5)
        b[4] = -10.0
        leaves = (w.requires_grad_(), b.requires_grad_())
        return torch.autograd.grad(loss_of(*leaves), leaves)

    def letter(w, b):
        p = seed_p(x @ w.T + b, torch.ones_like(x) @ w.abs().T)
        y = torch.nn.functional.one_hot(labels, 5)
        return -(y * torch.log(p + EPS) + (1 - y) * torch.log(1 - p + EPS)).sum()

    assert any(not g.isfinite().all() for g in gradients(letter))
    ours = gradients(lambda w, b: linear_ovr(x, torch.ones_like(x), w, b, 0.0, labels).loss)
    assert all(g.isfinite().all() for g in ours)
    assert tiny_model(num_row_init="small").action.cls_weight[90].abs().sum() > 0  # the option is small, not zero


@pytest.mark.parametrize(("alpha", "lam"), [(0.0, 1.0), (0.5, 1.0), (0.0, 2.0)])
def test_an_attached_gate_rewards_not_predicting_num(alpha, lam):
    """D20: with 20 % numbers, best P = N_num / (N_all lambda (1 - alpha) NLL), here .0225 to .09; stopped, 1."""
    share, nll = 0.2, 4.45
    grid = torch.linspace(1e-4, 1 - 1e-4, 200_001, dtype=torch.float64)
    words = -share * torch.log(grid)  # -log P at the numbers, over all positions
    attached = words + lam * (alpha + (1 - alpha) * grid) * nll
    best = grid[attached.argmin()]
    assert best == pytest.approx(share / (lam * (1 - alpha) * nll), rel=0.01)
    assert grid[words.argmin()] > 0.999  # what is left of the loss where the gate carries no gradient


def test_b_noise_of_zero_never_moves_and_causal_sampling_ties():
    """D23: d|b|/db is 0 at 0; with scale 0 every P is 0 or 1, and argmax of the tie is the lowest id."""
    b = torch.zeros(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((b.abs() * torch.tensor([1.0, -2.0, 3.0])).sum(), b)
    assert not gradient.any()
    loc = torch.tensor([2.0, 9.0])
    assert (loc / 0.0).atan().argmax() == 0  # both P are 1, though the second word stands far higher
    assert tiny_model(start="seed").action.b_noise.abs().min() > 0


def test_the_lower_middle_is_not_the_median():
    """D32: torch.median of an even count."""
    from cqwen_dist.heads.targets import numeric_statistics

    values = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    assert torch.median(values) == 2.0
    assert numeric_statistics([values.numpy()]).median == 2.5


def head(words=12, c=5, n=4, seed=0):
    make = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, c, generator=make),
        torch.rand(n, c, generator=make) + 0.1,
        torch.randn(words, c, generator=make),
        torch.randint(words, (n,), generator=make),
    )


def test_adding_a_word_does_not_change_the_others():
    """S4 3.3.1 (1): one word more changes no other's probability, gradient or boundary."""
    x, g, w, labels = head()
    more = torch.cat([w, torch.randn(3, 5)])
    few, many = w.clone().requires_grad_(), more.requires_grad_()
    a = linear_ovr(x, g, few, None, 0.3, labels)
    b = linear_ovr(x, g, many, None, 0.3, labels)
    (few_grad,), (many_grad,) = torch.autograd.grad(a.loss, few), torch.autograd.grad(b.loss, many)
    torch.testing.assert_close(many_grad[:12], few_grad, rtol=1e-4, atol=1e-5)  # to another order of sums
    assert (b.per_token > a.per_token).all()  # the new ones only add their own terms


def test_partial_labelling_trains_only_what_is_labelled():
    """S4 3.3.1 (2), D41: a word of class weight 0 adds nothing and learns nothing, as label or not."""
    x, g, w, labels = head()
    labels[0] = 7
    weights = torch.ones(12)
    weights[[2, 7]] = 0.0
    w.requires_grad_()
    out = linear_ovr(x, g, w, None, 0.0, labels, class_weights=weights)
    (gradient,) = torch.autograd.grad(out.loss, w)
    assert not gradient[[2, 7]].any()
    assert gradient[[0, 1, 3]].abs().min() > 0


def test_an_individual_is_drawn_with_gradients_to_its_law():
    """S4 1.4: u = loc + scale tan(pi (eps - 1/2)); du/dloc = 1, du/dscale = the tangent."""
    loc, scale = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    leaves = loc.requires_grad_(), scale.requires_grad_()
    eps = torch.tensor([0.1, 0.3, 0.5, 0.8, 0.99], dtype=torch.float64)
    u = Cauchy(*leaves).quantile(eps)
    d_loc, d_scale = torch.autograd.grad(u.sum(), leaves)
    torch.testing.assert_close(d_loc, torch.ones_like(eps))
    torch.testing.assert_close(d_scale, torch.tan(math.pi * (eps - 0.5)), atol=1e-12, rtol=1e-12)


def test_training_draws_no_random_numbers():
    """S4 2.4.1: two passes of loss and gradients are equal to the bit, whatever the generator's state."""
    x, g, w, labels = head()
    w.requires_grad_()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = linear_ovr(x, g, w, None, 0.1, labels).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, w)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_phi_of_a_number_is_not_small_beside_a_word():
    """D24: S0 says its influence is small; |phi(99.9)| is 4.6 where a row of the token table has a norm near 0.5."""
    model = tiny_model()
    w_num = next(p for n, p in model.named_parameters() if n.endswith("w_num"))
    assert math.log1p(99.9) * float(w_num.detach().norm()) == pytest.approx(4.6, rel=0.5)
