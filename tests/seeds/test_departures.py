"""What the seeds' letter does wrong, shown with the letter itself; docs/decisions.md says what is done instead."""

import math

import pytest
import torch
from support.tiny import tiny_model

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import linear_ovr

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
