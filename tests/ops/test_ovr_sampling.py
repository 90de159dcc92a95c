"""Negative sampling: the mean is the whole loss, and what must be exact is."""

import pytest
import torch

from cqwen_dist.ops.ovr import NegativeSampling, linear_ovr


def problem(seed=0, n=4, c=3, v=60):
    make = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(n, c, generator=make),
        torch.rand(n, c, generator=make) + 0.05,
        torch.randn(v, c, generator=make),
        torch.randn(v, generator=make) * 0.1,
        torch.rand(v, generator=make),
    ]
    return [leaf.double().requires_grad_() for leaf in leaves], torch.tensor([3, 17, 3, -100])


def flat_gradients(leaves, labels, **options):
    out = linear_ovr(*leaves, labels, **options)
    return torch.cat([out.loss.detach()[None], *(g.flatten() for g in torch.autograd.grad(out.loss, leaves))])


@pytest.mark.parametrize("mass", [None, 1.0 / torch.arange(1, 61)], ids=["alike", "by frequency"])
def test_loss_and_gradients_are_unbiased(mass):
    leaves, labels = problem()
    options = {"class_weights": torch.linspace(0.5, 2.0, 60).double(), "vocab_reduction": "mean"}
    exact = flat_gradients(leaves, labels, **options)
    sampling = NegativeSampling(8, mass, torch.tensor([41]), torch.Generator().manual_seed(5))
    draws = torch.stack([flat_gradients(leaves, labels, sampling=sampling, **options) for _ in range(1500)])
    error = draws.mean(0) - exact
    sigma = draws.std(0) / 1500**0.5
    z = error / sigma.clamp(min=1e-12)
    assert draws[:, 0].std() > 0.01 * exact[0]  # there was something to average out
    assert z[0].abs() < 4
    assert z.abs().max() < 5.5  # of some 330 numbers
    assert z.square().mean() < 1.6


def test_strata_vary_less_than_free_draws():
    """Losses that fall along the vocabulary, as by frequency: one draw per stratum against draws anywhere."""
    leaves, labels = problem(v=400)
    with torch.no_grad():
        leaves[3].copy_(torch.linspace(3.0, -3.0, 400))
    make = torch.Generator().manual_seed(5)
    stratified = torch.stack(
        [linear_ovr(*leaves, labels, sampling=NegativeSampling(16, generator=make)).loss.detach() for _ in range(200)]
    )
    single = torch.stack(
        [linear_ovr(*leaves, labels, sampling=NegativeSampling(1, generator=make)).loss.detach() for _ in range(1600)]
    )
    assert stratified.var() < 0.7 * single.var() / 16


def test_labels_and_named_words_are_never_left_to_chance():
    """With every other class weight 0 nothing random is left."""
    leaves, labels = problem()
    keep = torch.zeros(60)
    keep[[3, 17, 41]] = 1.0
    exact = flat_gradients(leaves, labels, class_weights=keep)
    sampling = NegativeSampling(5, always=torch.tensor([41, 99]))
    torch.testing.assert_close(flat_gradients(leaves, labels, class_weights=keep, sampling=sampling), exact)


def test_a_slice_without_labels_and_a_draw_that_saves_nothing():
    leaves, labels = problem()
    out = linear_ovr(*leaves, labels, vocab_start=100, sampling=NegativeSampling(6))
    assert torch.isfinite(out.loss)
    whole = linear_ovr(*leaves, labels)
    torch.testing.assert_close(linear_ovr(*leaves, labels, sampling=NegativeSampling(60)).loss, whole.loss)


def test_bad_input_is_refused():
    leaves, labels = problem()
    for sampling in (NegativeSampling(0), NegativeSampling(4, mass=torch.ones(3))):
        with pytest.raises(ValueError, match="draws"):
            linear_ovr(*leaves, labels, sampling=sampling)
    with pytest.raises(ValueError, match="sum of P"):
        linear_ovr(*leaves, labels, sampling=NegativeSampling(4), want_prob_sum=True)
