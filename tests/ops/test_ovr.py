"""The OvR loss against float64, finite differences and its own materialised form.

A fast path passes if its error is at most twice the materialised stable formula's in the same dtype, plus what the
order of sums may change (`assert_as_exact`).
"""

import math

import pytest
import torch

from cqwen_dist import tiles
from cqwen_dist.ops.ovr import TermOptions, linear_ovr, one_pass

SHAPES = [(1, 1, 1), (1, 123, 507), (252, 123, 1), (252, 32, 507), (7, 64, 3001)]  # N, C, V


def problem(n, c, v, *, gamma=1.0, threshold=0.0, seed=0, dtype=torch.float32, row_std=0.2, ignored=True):
    """(loc_u, scale_u, weight, bias, threshold), leaves, and labels with some ignored."""
    make = torch.Generator().manual_seed(seed)
    loc_u = torch.randn(n, c, generator=make) * 3
    scale_u = gamma * (0.5 + torch.rand(n, c, generator=make))
    weight = torch.randn(v, c, generator=make) * row_std
    bias = torch.randn(v, generator=make) * 0.1
    thresholds = threshold + torch.randn(v, generator=make) * 0.1
    labels = torch.randint(v, (n,), generator=make)
    if ignored:
        labels[::5] = -100
        labels[0] = v - 1
    leaves = [t.to(dtype) for t in (loc_u, scale_u, weight)] + [bias, thresholds]
    return [leaf.requires_grad_() for leaf in leaves], labels


def gradients(leaves, labels, dtype=None, **options):
    """(loss, gradients, per_token, prob_sum, nll) in the leaves' dtype or this one."""
    at = [leaf.detach().to(dtype or leaf.dtype).requires_grad_(leaf.requires_grad) for leaf in leaves]
    for name in ("token_weights", "class_weights"):
        if at[0].dtype == torch.float64 and options.get(name) is not None:
            options[name] = options[name].double()
    out = linear_ovr(*at, labels, **options)
    wanted = [leaf for leaf in at if leaf.requires_grad]
    return out.loss.detach(), torch.autograd.grad(out.loss, wanted), out.per_token, out.prob_sum, out.nll


def relative_error(found, exact):
    """Largest error, in units of the largest exact value (a finite one; at least 1e-30)."""
    size = exact.abs().max().clamp(min=1e-30) if exact.numel() else 1.0
    return float(((found.double() - exact).abs() / size).max()) if exact.numel() else 0.0


def figures(result):
    """All tensors of such a result."""
    return [result[0], *result[1], *(part for part in result[2:] if part is not None)]


def assert_as_exact(compute, leaves, fast, rounding=0.0):
    """The figures `fast` are as near to float64's as those of the plain `compute(leaves)`, whatever the order of sums.

    A score is a sum of C products and a bias. In any order it is the exact sum of factors that are off by (C + 2) 2^-24
    of themselves at most: some are drawn, and what they change is allowed. Above the scores there are sums of up to N
    or V terms; of n terms, one after another, they are off by some 0.3 sqrt(n) 2^-24. A GPU spreads bf16 gradients of
    the scores, so a word whose bias hangs on one of them has 2^-8 at most. A CPU's bf16 products also round C - loc_S
    and scale_S, so a figure that hangs on one entry is off by the four roundings of its slope at most.
    """
    make, off = torch.Generator().manual_seed(0), (leaves[0].shape[1] + 2) * 2.0**-24

    def wide(off):
        signs = [torch.randint(2, leaf.shape, generator=make).to(leaf.device) * 2 - 1 for leaf in leaves]
        nudged = [leaf.detach().double() * (1 + off * sign) for leaf, sign in zip(leaves, signs, strict=True)]
        return figures(compute([x.requires_grad_(leaf.requires_grad) for x, leaf in zip(nudged, leaves, strict=True)]))

    exact, others = wide(0.0), zip(*(wide(off) for _ in range(4)), strict=True)
    rounding += 1e-6 + 2.0**-23 * math.sqrt(max(max(leaf.shape, default=1) for leaf in leaves))
    spread = 2**-8 if leaves[0].dtype == torch.bfloat16 else 0.0
    rounding += 0.0 if leaves[0].is_cuda else 4 * spread
    compared = zip(exact, figures(compute(leaves)), figures(fast), others, strict=True)
    for i, (e, p, f, near) in enumerate(compared):
        assert torch.isfinite(f).all() or not torch.isfinite(e).all(), f"figure {i}"
        allowed = 2 * relative_error(p, e) + max(relative_error(n, e) for n in near) + rounding
        assert relative_error(f, e) <= allowed + spread * (e.shape in {leaf.shape for leaf in leaves}), f"figure {i}"


def assert_as_exact_as_the_materialised(leaves, labels, impl, **options):
    fast = gradients(leaves, labels, impl=impl, **options)
    assert_as_exact(lambda at: gradients(at, labels, impl="reference", **options), leaves, fast)


@pytest.mark.parametrize("threshold", [0.0, 15.0, 100.0, 1e4])
@pytest.mark.parametrize("gamma", [1e-6, 1e-3, 1.0, 10.0])
def test_the_error_against_float64_is_at_most_the_plain_forms(threshold, gamma):
    leaves, labels = problem(9, 33, 700, gamma=gamma, threshold=threshold)
    assert_as_exact_as_the_materialised(leaves, labels, "chunked", want_prob_sum=True)


@pytest.mark.parametrize("limit", [0.05, 1.0])
@pytest.mark.parametrize("gamma", [1e-6, 1e-3, 1.0])
def test_the_limited_slopes_error_against_float64(limit, gamma):
    leaves, labels = problem(9, 33, 700, gamma=gamma, threshold=0.0)
    options = {"class_weights": torch.rand(700), "token_weights": torch.rand(9)}
    assert_as_exact_as_the_materialised(leaves, labels, "chunked", terms=TermOptions(slope_limit=limit), **options)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["near probabilities", "logits of hundreds"])
def test_the_softmax_term_is_cross_entropy_of_the_locations(impl, size, monkeypatch):
    """Beside the one-vs-rest loss, whose other gradients (C, scales) it leaves alone. Oracle: torch's, in float64."""
    monkeypatch.setitem(tiles.TILE_BYTES, "cpu", 4 * 4096)
    leaves, labels = problem(33, 24, 700, gamma=0.1)
    leaves[0].data *= size
    weights = torch.rand(33)
    at = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loc = at[0] @ at[2].T + at[3]
    nll = torch.nn.functional.cross_entropy(loc, labels, reduction="none")
    added = (3.0 * weights.double() * nll).sum()
    expected = torch.autograd.grad(added, (at[0], at[2], at[3]))
    options = {"impl": impl, "token_weights": weights, "class_weights": torch.rand(700)}
    plain = gradients(leaves, labels, torch.float64, **options)
    both = gradients(leaves, labels, torch.float64, terms=TermOptions(softmax_weight=3.0), **options)
    torch.testing.assert_close(both[0] - plain[0], added.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(both[4], nll.detach(), rtol=1e-9, atol=1e-12)
    for k, wanted in zip((0, 2, 3), expected, strict=True):
        error = (both[1][k] - plain[1][k] - wanted).abs().max()
        assert error <= 1e-9 * max(wanted.abs().max(), plain[1][k].abs().max()), k
    for k in (1, 4):
        assert torch.equal(both[1][k], plain[1][k]), "scales and C have no part in it"
    assert_as_exact_as_the_materialised(leaves, labels, impl, terms=TermOptions(1.0, 3.0), want_prob_sum=True)


@pytest.mark.parametrize(("threshold", "terms"), [(0.0, None), (15.3, None), (100.0, None), (0.0, 3.0), (15.3, 3.0)])
def test_bf16_errors_are_at_most_the_materialised_bf16_forms_by_a_tenth(threshold, terms):
    leaves, labels = problem(64, 96, 1500, gamma=1e-3, threshold=threshold, dtype=torch.bfloat16)
    options = {"want_prob_sum": True} | ({"terms": TermOptions(1.0, terms)} if terms else {})
    exact = figures(gradients(leaves, labels, torch.float64, impl="reference", **options))
    plain, fast = (figures(gradients(leaves, labels, impl=i, **options)) for i in ("reference", "chunked"))
    for i, (e, p, f) in enumerate(zip(exact, plain, fast, strict=True)):
        # Partial sums of a gradient are rounded once more. Near the threshold the materialised form is 100 times worse.
        assert relative_error(f, e) <= 1.1 * relative_error(p, e) + 2**-9, f"figure {i}"
        assert terms or threshold != 15.3 or relative_error(f, e) <= 0.01, f"figure {i}"


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_slope_limit_changes_only_gradients_above_it(impl):
    leaves, labels = problem(1, 33, 700, gamma=1e-3, ignored=False)
    free = gradients(leaves, labels, impl=impl)
    steepest = free[1][4].abs().max()  # of one token: each word's slope
    assert steepest > 1, "a score stands near its threshold"
    for limit in (0.1, 1.0):
        found = gradients(leaves, labels, impl=impl, terms=TermOptions(slope_limit=limit))
        assert torch.equal(found[0], free[0])
        torch.testing.assert_close(found[1][4], free[1][4].clamp(-limit, limit), rtol=1e-5, atol=1e-8)
    above = gradients(leaves, labels, impl=impl, terms=TermOptions(slope_limit=2 * float(steepest)))
    for one, other in zip(above[1], free[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_shapes_and_dtypes(shape, dtype):
    leaves, labels = problem(*shape, gamma=0.1, dtype=dtype)
    assert_as_exact_as_the_materialised(leaves, labels, "chunked", want_prob_sum=True)
    out = linear_ovr(*leaves, labels, impl="chunked")
    out.loss.backward()
    assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
    assert out.loss.dtype == out.per_token.dtype == torch.float32


def test_fp32_rows_under_bf16_activations():
    """The rows keep their own precision, and so does their gradient."""
    leaves, labels = problem(9, 16, 300, gamma=0.1, dtype=torch.bfloat16)
    leaves[2] = (leaves[2].detach().float() + 1e-3).requires_grad_()
    assert_as_exact_as_the_materialised(leaves, labels, "chunked")
    assert [g.dtype for g in gradients(leaves, labels, impl="chunked")[1]] == [leaf.dtype for leaf in leaves]


def test_all_options_together():
    leaves, labels = problem(11, 20, 300, gamma=0.05, threshold=2.0)
    labels = labels.clamp(max=279)
    make = torch.Generator().manual_seed(1)
    options = {
        "token_weights": torch.rand(11, generator=make),
        "class_weights": torch.rand(300, generator=make),
        "used_rows": 280,
        "want_prob_sum": True,
    }
    assert_as_exact_as_the_materialised(leaves, labels, "chunked", **options)
    assert_as_exact_as_the_materialised(
        [*leaves[:4], leaves[4].detach().mean().requires_grad_()], labels, "chunked", **options
    )


@pytest.mark.parametrize("label", [0, 1], ids=["at the label", "elsewhere"])
def test_the_loss_over_the_whole_range_of_z(label):
    """z = (loc - C)/scale from -1e9 to 1e9; W = 1 and C = 0, so loc_u and scale_u are S. Entry by entry."""
    z = torch.cat([-torch.logspace(9, -9, 60), torch.zeros(1), torch.logspace(-9, 9, 60)])
    for gamma in (1e-6, 1e-3, 1.0, 10.0):
        leaves = [(z * gamma)[:, None], torch.full((121, 1), gamma), torch.ones(1, 1), torch.zeros(1), torch.zeros(1)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        labels = torch.full((121,), label)
        exact = gradients(leaves, labels, torch.float64, impl="reference")
        fast = gradients(leaves, labels, impl="chunked")
        torch.testing.assert_close(fast[2].double(), exact[2], rtol=1e-6, atol=0)
        for i in range(2):
            torch.testing.assert_close(fast[1][i].double(), exact[1][i], rtol=3e-6, atol=1e-30)


def test_gradients_equal_finite_differences():
    leaves, labels = problem(3, 4, 11, gamma=0.5)
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weights = torch.rand(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *inputs: linear_ovr(*inputs, labels, token_weights=weights, impl="chunked").loss * 3.0, leaves
    )


def test_slices_add_up_and_a_slice_may_hold_no_label(monkeypatch):
    monkeypatch.setitem(tiles.TILE_BYTES, "cpu", 4096)  # several tiles a slice
    leaves, labels = problem(6, 16, 500, gamma=0.1)
    labels = labels.clamp(max=399)
    parts, grads = [], [torch.zeros_like(leaf) for leaf in leaves]
    for v0, v1 in ((0, 123), (123, 400), (400, 500), (500, 500)):
        cut = [leaves[0], leaves[1], *(leaf.detach()[v0:v1].requires_grad_() for leaf in leaves[2:])]
        parts.append(gradients(cut, labels, vocab_start=v0, want_prob_sum=True))
        for total, part, rows in zip(grads, parts[-1][1], [slice(None)] * 2 + [slice(v0, v1)] * 3, strict=True):
            total[rows] += part
    together = sum(p[0] for p in parts), grads, *(sum(p[k] for p in parts) for k in (2, 3))
    assert_as_exact(lambda at: gradients(at, labels, impl="reference", want_prob_sum=True), leaves, together)


def test_tiles_of_tokens_and_words_change_nothing(monkeypatch):
    leaves, labels = problem(50, 16, 500, gamma=0.1)
    monkeypatch.setitem(tiles.TILE_TOKENS, "cpu", 7)
    monkeypatch.setitem(tiles.TILE_BYTES, "cpu", 7 * 4 * 33)
    assert tiles.tile_shape(50, 500, 16, "cpu") == (7, 33)
    assert_as_exact_as_the_materialised(leaves, labels, "chunked", want_prob_sum=True)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_ignored_tokens_have_no_effect(impl):
    leaves, labels = problem(10, 8, 40)
    labels = torch.full_like(labels, -1)
    labels[3] = 5
    terms = TermOptions(softmax_weight=3.0)
    _, grads, per_token, *_ = gradients(leaves, labels, ignore_index=-1, impl=impl, terms=terms)
    rest = torch.arange(10) != 3
    assert per_token[3] > 0
    assert per_token[rest].abs().max() == 0
    assert grads[0][rest].abs().max() == grads[1][rest].abs().max() == 0
    alone = gradients(
        [leaves[0][3:4].detach().requires_grad_(), leaves[1][3:4].detach().requires_grad_(), *leaves[2:]],
        labels[3:4],
        impl=impl,
        terms=terms,
    )
    torch.testing.assert_close(grads[2], alone[1][2])


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("n", "v"), [(0, 10), (4, 0), (0, 0)])
def test_no_tokens_or_no_labels(impl, n, v):
    leaves = [torch.ones(n, 3), torch.ones(n, 3), torch.ones(v, 3), torch.zeros(v), torch.tensor(0.0)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    labels = torch.zeros(n, dtype=torch.int64)
    loss, grads, per_token, *_ = gradients(leaves, labels, vocab_start=5, impl=impl)
    assert loss == 0
    assert per_token.shape == (n,)
    assert all((g == 0).all() for g in grads)


def test_scale_zero_is_handled():
    """P is 0, 1/2 or 1: a right certainty costs nothing, a coin flip log 2, a wrong one more than 80 (exactly: inf)."""
    loc = torch.tensor([[2.0], [-2.0], [0.0]], requires_grad=True)
    scale = torch.zeros(3, 1, requires_grad=True)
    weight = torch.ones(1, 1)
    elsewhere = torch.full((3,), 7)
    negative = linear_ovr(loc, scale, weight, None, 0.0, elsewhere)
    assert negative.per_token[0] > 80
    assert negative.per_token[1] < 1e-37
    assert negative.per_token[2] == pytest.approx(math.log(2))
    torch.autograd.backward(negative.loss)
    assert torch.isfinite(loc.grad).all()
    assert torch.isfinite(scale.grad).all()
    assert scale.grad[1].item() == pytest.approx(1 / (2 * math.pi))
    positive = linear_ovr(loc, scale, weight, None, 0.0, torch.zeros(3, dtype=torch.int64))
    assert positive.per_token[0] < 1e-37
    assert positive.per_token[1] > 80


def test_zero_rows_and_equal_thresholds_give_no_nan():
    """A zero weight row has scale 0; with b = C it sits exactly on the threshold."""
    leaves, labels = problem(4, 6, 9, gamma=1e-3)
    with torch.no_grad():
        leaves[2][3] = 0.0
        leaves[2][4] = 0.0
        leaves[3][3] = leaves[4][3]
    labels[labels == 3] = 5
    labels[labels == 4] = 5
    leaves[3].data[4], leaves[4].data[4] = 0.0, 1.0
    loss, grads, *_ = gradients(leaves, labels)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in grads)


def test_only_needed_gradients_are_computed(monkeypatch):
    leaves, labels = problem(5, 8, 30)
    full = gradients(leaves, labels)[1]
    seen = []
    real_visit = one_pass.visit
    monkeypatch.setattr(one_pass, "visit", lambda *args: seen.append(args[3]) or real_visit(*args))
    for frozen in range(5):
        for k, leaf in enumerate(leaves):
            leaf.requires_grad_(k != frozen)
        some = gradients(leaves, labels)[1]
        assert seen[-1] == tuple(k != frozen for k in range(5))
        for found, expected in zip(some, [g for k, g in enumerate(full) if k != frozen], strict=True):
            torch.testing.assert_close(found, expected)
    with torch.no_grad():
        linear_ovr(*leaves, labels)
    assert seen[-1] == (False,) * 5


def test_backward_can_be_repeated_only_with_retain_graph():
    leaves, labels = problem(5, 8, 30)
    out = linear_ovr(*leaves, labels)
    out.loss.mul(2.0).backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    out.loss.backward()
    for leaf, once in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, 1.5 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.loss.backward()


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_outputs_are_detached_and_autocast_changes_nothing(impl):
    leaves, labels = problem(5, 8, 30)
    out = linear_ovr(*leaves, labels, want_prob_sum=True, impl=impl)
    assert not out.per_token.requires_grad
    assert not out.prob_sum.requires_grad
    with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16):
        torch.testing.assert_close(linear_ovr(*leaves, labels, impl=impl).loss, out.loss, rtol=0, atol=0)


def test_bad_input_is_refused():
    leaves, labels = problem(5, 8, 30)
    loc_u, scale_u, weight, bias, threshold = leaves
    for error, args, options in (
        (ValueError, (loc_u, scale_u[:4], weight, bias, threshold, labels), {}),
        (ValueError, (loc_u, scale_u, weight, bias, threshold, labels.float()), {}),
        (TypeError, (loc_u, scale_u.bfloat16(), weight, bias, threshold, labels), {}),
        (TypeError, (loc_u, scale_u, weight.bfloat16(), bias, threshold, labels), {}),
        (ValueError, (loc_u, scale_u, weight, bias, threshold, labels), {"impl": "triton"}),  # no CUDA here
        (ValueError, (loc_u, scale_u, weight, bias, threshold, labels), {"class_weights": torch.ones(4)}),
        (ValueError, (loc_u, scale_u, weight, bias, threshold, labels), {"used_rows": 2}),
        (ValueError, (loc_u, scale_u, weight, bias, threshold, labels - 40), {}),
    ):
        with pytest.raises(error):
            linear_ovr(*args, **options)
