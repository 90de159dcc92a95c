"""Properties that the seeds promise and that no other file owns."""

import math

import pytest
import torch
from support.tiny import tiny_model

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import linear_ovr


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
