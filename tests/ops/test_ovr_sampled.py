"""The loss with a part of the negatives: its mean over draws, what is exact in it, the ways to compute it.

The oracle is the full loss in float64, by its materialised form.
"""

import math
from functools import partial

import pytest
import torch
from test_ovr import assert_as_exact, figures, problem

from cqwen_dist import tiles
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import OvrOptions, WordHead, sampled
from cqwen_dist.ops.ovr.loss import ovr_loss
from cqwen_dist.ops.ovr.sampled import Drawn, draw_words


def computed(leaves, labels, drawn=None, *, start=0, words=None, used=None, tokens=None, **options):
    """(loss, gradients, per_token, prob_sum) of the leaves as they are."""
    at = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    head = WordHead(*at[2:], start, words or start + len(at[2]), used)
    chosen = OvrOptions(want_prob_sum=True, drawn=drawn, **options)
    out = ovr_loss(Cauchy(*at[:2]), head, labels, tokens, chosen)
    return out.loss.detach(), torch.autograd.grad(out.loss, at), out.per_token, out.prob_sum


def flat(result):
    """All figures of `computed` in one float64 vector."""
    return torch.cat([t.double().flatten() for t in figures(result)])


def double(leaves):
    return [leaf.detach().double() for leaf in leaves]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 3 words, strata of 4 tiles: a few hundred words have many."""
    monkeypatch.setattr(sampled, "TILE", 3)
    monkeypatch.setattr(sampled, "STRATUM", 4)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("share", [0.125, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("words", [1, 5, 100, 507])
def test_each_word_is_drawn_with_the_probability_used_to_weight_it(words, share):
    draws = 500
    weights = torch.zeros(words, dtype=torch.float64)
    sizes = []
    for k in range(draws):
        drawn = draw_words(words, share, [7, k])
        for rows in (drawn.always, drawn.some):
            assert torch.equal(rows, rows.unique()), "in order, none twice"
            assert not len(rows) or 0 <= int(rows[0]) <= int(rows[-1]) < words
        assert not set(drawn.always.tolist()) & set(drawn.some.tolist())
        weights[drawn.always] += 1.0
        weights[drawn.some] += drawn.factor
        sizes.append(len(drawn.always) + len(drawn.some))
    standard_error = math.sqrt((drawn.factor - 1) / draws)
    assert float((weights / draws - 1).abs().max()) < 5 * standard_error, "mean weight of each word: 1"
    assert max(sizes) - min(sizes) <= 3 + 3, "one tile more or less, and the last may be short"
    assert sum(sizes) / draws == pytest.approx(share * words, abs=1)


@pytest.mark.usefixtures("small_tiles")
def test_each_stratum_has_its_share_and_a_key_fixes_the_words():
    for k in range(20):
        drawn = draw_words(12 * 50 * 4 // 3, 0.25, [1, k])
        first = len(drawn.always)
        strata = torch.bincount((drawn.some - first) // 12, minlength=50)
        assert int(strata.max() - strata.min()) <= 3, "4 tiles of 3 words, about one of them drawn, at most one more"
    again = [draw_words(507, 0.3, key) for key in ([3, 1], [3, 1], [3, 2])]
    assert torch.equal(again[0].some, again[1].some)
    assert not torch.equal(again[0].some, again[2].some)
    with pytest.raises(ValueError, match="negative"):
        draw_words(507, 0.3, [-1])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("v", [1, 123, 507])
def test_slices_draw_the_words_of_the_whole_vocabulary(v):
    special = v - 1
    whole = draw_words(v, 0.4, [5], special)
    assert special in whole.always
    assert special not in whole.some
    parts = [draw_words(v, 0.4, [5], special, at, min(at + 50, v + 9)) for at in range(0, v + 9, 50)]
    for name in ("always", "some"):
        ids = torch.cat([getattr(part, name) + 50 * i for i, part in enumerate(parts)])
        assert torch.equal(ids, getattr(whole, name))
    assert {part.factor for part in parts} == {whole.factor}


OPTIONS = {
    "plain": {},
    "weights and slopes": {"class_weights": True, "tokens": True, "slope_limit": 0.3, "vocab_reduction": "mean"},
    "reference": {"impl": "reference", "slope_limit": 0.3, "used": 100},
}


def options_of(name, n, v):
    options = dict(OPTIONS[name])
    make = torch.Generator().manual_seed(3)
    if options.pop("class_weights", False):
        options["class_weights"] = 0.2 + torch.rand(v, generator=make)
    if options.pop("tokens", False):
        options["tokens"] = torch.rand(n, generator=make)
    return options


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_mean_over_draws_is_the_full_loss_with_all_its_gradients(name):
    """Each figure within 5.5 standard errors of its mean over 300 draws (of some 2,600 figures, 1e-4 would exceed
    them by chance), and all together as far off as their standard errors say."""
    leaves, labels = problem(9, 15, 123, gamma=0.1)
    labels = labels.clamp(max=99)
    options = options_of(name, 9, 123)
    at = double(leaves)
    exact = flat(computed(at, labels, **{"impl": "reference", **options}))
    limit = options.get("used", 123)
    draws = 300
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    for k in range(draws):
        off = flat(computed(at, labels, draw_words(limit, 0.3, [11, k]), **options)) - exact
        total += off
        squares += off * off
    mean = total / draws
    error = ((squares / draws - mean**2).clamp(min=0) / draws).sqrt()
    moved = error > 1e-12
    assert float(moved.double().mean()) > 0.7, "most figures depend on the draw"
    assert float(mean[~moved].abs().max()) < 1e-9, "what does not is exact"
    z = (mean / error)[moved]
    assert float(z.abs().max()) < 5.5
    assert 0.5 < float((z * z).mean()) < 2.0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_tiny_vocabulary_by_enumeration(name):
    """Every set of tiles that can be drawn, with equal weight, gives the full loss to float64's rounding: an estimate
    is linear in what is drawn, so one set of each tile alone, and none, are enough."""
    leaves, labels = problem(7, 4, 11, gamma=0.2)
    options = options_of(name, 7, 11) | ({"used": 11} if name == "reference" else {})
    at = double(leaves)
    exact = flat(computed(at, labels, **{"impl": "reference", **options}))
    none, always = torch.arange(0), torch.arange(2)
    tiles = [torch.arange(2, 5), torch.arange(5, 8), torch.arange(8, 11)]
    each = [flat(computed(at, labels, Drawn(always, tile, 3.0), **options)) for tile in tiles]  # one of three is drawn
    torch.testing.assert_close(sum(each) / 3, exact, rtol=1e-11, atol=1e-11)
    empty = flat(computed(at, labels, Drawn(always, none, 3.0), **options))
    pairs = [torch.cat([tiles[i], tiles[j]]) for i, j in ((0, 1), (0, 2), (1, 2))]
    for pair, (i, j) in zip(pairs, ((0, 1), (0, 2), (1, 2)), strict=True):
        found = flat(computed(at, labels, Drawn(always, pair, 3.0), **options))
        torch.testing.assert_close(found, each[i] + each[j] - empty, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 123, 507), (252, 123, 1), (252, 32, 507), (7, 64, 3001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_one_is_the_full_loss(shape, impl, dtype):
    """To rounding: a label's score is a sum of its own, and gradients are added in another order. In bf16 the gradients
    are of bf16, the materialised form rounds each of its parts: so both are compared with float64."""
    leaves, labels = problem(*shape, gamma=0.1, dtype=dtype)
    drawn = draw_words(shape[2], 1.0, [0])
    assert len(drawn.always) == shape[2]
    assert not len(drawn.some)
    full, found = computed(leaves, labels, impl=impl), computed(leaves, labels, drawn, impl=impl)
    assert [x.dtype for x in figures(found)] == [x.dtype for x in figures(full)]
    rounding = 0.0 if dtype == torch.float32 else 2**-7
    assert_as_exact(lambda at: computed(at, labels, impl=impl), leaves, found, rounding)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_as_exact_as_the_materialised_form(impl):
    """The same draw in float64 by the reference is the oracle; many tiles of the kernels."""
    for threshold, gamma in ((0.0, 10.0), (15.0, 1e-3), (1e4, 1e-6)):
        leaves, labels = problem(40, 33, 1500, gamma=gamma, threshold=threshold)
        drawn = draw_words(1500, 0.3, [2])
        fast = computed(leaves, labels, drawn, impl=impl)
        plain = partial(computed, labels=labels, drawn=drawn, impl="reference")
        assert_as_exact(plain, leaves, fast)


@pytest.mark.parametrize("limit", [0.0, 0.3])
def test_labels_terms_are_exact_for_any_draw(limit):
    """A head of labels alone: no draw changes it. And where a label's own tile is drawn, it is no negative."""
    leaves, labels = problem(12, 8, 40, gamma=0.05, ignored=False)
    labels = labels % 3
    none, at = torch.arange(0), double(leaves)
    alone = computed(at, labels, Drawn(none, none, 8.0), slope_limit=limit)
    one = [at[0], at[1], *(t[:3] for t in at[2:])]
    expected = computed(one, labels, impl="reference", slope_limit=limit)
    others = computed(one, torch.full((12,), 39), words=40, impl="reference", slope_limit=limit)
    drawn = computed(at, labels, Drawn(none, torch.arange(3), 8.0), slope_limit=limit)
    for k in (2, 3):  # per token: the label's own, then 8 times the two others of the first three words
        torch.testing.assert_close(drawn[k] - alone[k], 8 * (expected[k] - alone[k]), rtol=1e-10, atol=1e-10)
    p_label = (-alone[2]).exp()
    torch.testing.assert_close(alone[3], p_label, rtol=1e-10, atol=1e-12)
    assert float((others[2] - expected[2]).abs().max()) > 0.01, "the labels matter here"
    rows = torch.zeros(40, dtype=torch.bool)
    rows[labels] = True
    for gradient in alone[1][2:]:
        assert float(gradient[~rows].abs().max()) == 0.0
        assert float(gradient[rows].abs().min()) > 0.0
    for k in (0, 1):  # of the tokens: the same
        found, only, three = drawn[1][k], alone[1][k], expected[1][k]
        torch.testing.assert_close(found - only, 8 * (three - only), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("n", "v"), [(0, 10), (4, 0), (0, 0)])
def test_no_tokens_or_no_labels(impl, n, v):
    leaves = [torch.ones(n, 3), torch.ones(n, 3), torch.ones(v, 3), torch.zeros(v), torch.zeros(v)]
    labels = torch.zeros(n, dtype=torch.int64)
    drawn = draw_words(40, 0.5, [1], 0, 20, 20 + v)
    loss, grads, per_token, prob_sum = computed(leaves, labels, drawn, start=20, words=40, impl=impl)
    assert loss == 0 or len(drawn.always) + len(drawn.some)
    assert per_token.shape == prob_sum.shape == (n,)
    assert [g.shape for g in grads] == [leaf.shape for leaf in leaves]


def test_ignored_tokens_frozen_rows_scalar_threshold_and_no_bias():
    leaves, labels = problem(10, 8, 300)
    drawn = draw_words(300, 0.5, [4])
    labels[1:] = -100
    _, grads, per_token, _ = computed(leaves, labels, drawn)
    assert per_token[1:].abs().max() == grads[0][1:].abs().max() == grads[1][1:].abs().max() == 0
    assert per_token[0] > 0
    u = Cauchy(leaves[0], leaves[1].detach())
    head = WordHead(leaves[2].detach(), None, torch.tensor(0.2, requires_grad=True))
    out = ovr_loss(u, head, labels, None, OvrOptions(drawn=drawn))
    out.loss.backward()
    assert leaves[0].grad is not None
    assert leaves[2].grad is None
    assert head.threshold.grad.shape == ()
    with torch.no_grad():
        again = ovr_loss(u, head, labels, None, OvrOptions(drawn=drawn))
    assert torch.equal(again.loss, out.loss.detach())
    assert again.prob_sum is None


def test_the_same_draw_is_the_same_bits(monkeypatch):
    monkeypatch.setitem(tiles.TILE_TOKENS, "cpu", 7)
    leaves, labels = problem(50, 16, 500, gamma=0.1)
    labels = labels % 5  # many tokens share a label's row
    one, two = (computed(leaves, labels, draw_words(500, 0.5, [9, 1])) for _ in range(2))
    assert torch.equal(flat(one), flat(two))
