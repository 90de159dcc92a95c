"""The ridges of the calibrated start: scikit-learn's where that has one, and hardly bent by wild numbers."""

import math

import pytest
import torch
from support.ranks import Pool, groups_of
from support.tiny import HIDDEN, NUM, random_batch, tiny_base
from torch import Tensor

from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.levelling import level_logits, project_by_features
from cqwen_dist.model.ridge import RIDGES, RobustFit, ridges_by_leave_one_out, robust_ridge
from cqwen_dist.parallel.groups import ALONE


def cauchy(n: int, seed: int) -> Tensor:
    """Standard Cauchy draws [n] float64."""
    g = torch.Generator().manual_seed(seed)
    return (math.pi * (torch.rand(n, generator=g, dtype=torch.float64) - 0.5)).tan()


def linear(n: int, p: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [n,p] around 2, coefficients [p] of norm 1, and x @ coefficients + 7."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=g, dtype=torch.float64) + 2
    coefficients = torch.randn(p, generator=g, dtype=torch.float64)
    coefficients /= coefficients.norm()
    return x, coefficients, x @ coefficients + 7


@pytest.mark.parametrize(("n", "p", "noise"), [(300, 24, 0.1), (24, 300, 3.0), (40, 40, 0.1)])
def test_without_an_intercept_it_equals_scikit_learns(n: int, p: int, noise: float) -> None:
    from sklearn.linear_model import RidgeCV

    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, p, generator=g, dtype=torch.float64) * torch.logspace(-2, 1, p) + 1
    y = x @ torch.randn(p, generator=g, dtype=torch.float64) + noise * torch.randn(n, generator=g, dtype=torch.float64)
    (found,), (share,) = ridges_by_leave_one_out(x, y[:, None], intercept=False)
    units = RIDGES.numpy() * float(x.square().sum()) / p
    oracle = RidgeCV(units, fit_intercept=False).fit(x.numpy(), y.numpy())
    # both decompose in float64; squared lengths differ by up to 1e6 here, so coefficients round to some 1e-10
    torch.testing.assert_close(found, torch.from_numpy(oracle.coef_), atol=1e-9, rtol=1e-7)
    assert float(share) == pytest.approx(1 + oracle.best_score_ / float(y.var(unbiased=False)), abs=1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_it_finds_a_linear_map_under_cauchy_noise(noise: float) -> None:
    x, _, clean = linear(2000, 12)
    fit = robust_ridge(x[:1600], clean[:1600] + noise * cauchy(1600, 1))
    told = x[1600:] @ fit.coefficients + fit.intercept
    of_median = float((clean - clean.median()).abs().median())
    # targets are held within LIMIT and those far from the median weigh little, which shrinks the map: close, not equal
    assert float((told - clean[1600:]).abs().median()) < 0.35 * of_median
    assert float((fit.left_out - clean[:1600]).abs().median()) < 0.35 * of_median


def test_the_scale_is_the_cauchy_scale_of_what_the_fit_leaves() -> None:
    x, _, clean = linear(1600, 12)
    for noise in (0.5, 1.0, 3.0):
        y = clean + noise * cauchy(1600, 2)
        fit = robust_ridge(x, y)
        assert fit.scale == pytest.approx(float((y - fit.left_out).abs().median()), rel=1e-9)
        # mostly the noise, of which it is the median of |noise| (to 1/sqrt(1600)); more by what the ridge shrinks
        assert 0.9 * noise < fit.scale < 1.5 * noise


def test_outliers_hardly_change_the_fit() -> None:
    x, _, clean = linear(800, 8)
    y = clean + 0.1 * cauchy(800, 3).clamp(-5, 5)
    plain = robust_ridge(x, y)
    wild = y.clone()
    wild[::25] = torch.tensor([1e9, -1e12], dtype=torch.float64).repeat(16)
    fit = robust_ridge(x, wild)
    assert float((fit.coefficients - plain.coefficients).norm() / plain.coefficients.norm()) < 0.2
    kept = torch.ones(800, dtype=torch.bool)
    kept[::25] = False
    of_median = (clean - clean.median()).abs().median()
    assert float((fit.left_out - clean)[kept].abs().median()) < 0.5 * float(of_median)


@pytest.mark.parametrize(
    ("n", "p", "unit", "shift"), [(200, 10, 1e6, 0.0), (40, 100, 1e-6, 0.0), (200, 10, -2.0, 500.0)]
)
def test_the_fit_does_not_depend_on_units(n: int, p: int, unit: float, shift: float) -> None:
    x, _, clean = linear(n, p)
    y = clean + 0.1 * cauchy(n, 4)
    fit, other = robust_ridge(x, y), robust_ridge(x, unit * y + shift)
    assert fit.coefficients.any(), "nothing is tested where it falls back"
    size = float(y.abs().median())
    # y - median loses 1e-16 |shift| / (unit size) of its precision; what is left is rounding
    torch.testing.assert_close(other.coefficients, unit * fit.coefficients, atol=1e-9 * abs(unit), rtol=1e-8)
    assert other.intercept == pytest.approx(unit * fit.intercept + shift, rel=1e-8, abs=1e-8 * abs(unit) * size)
    assert other.scale == pytest.approx(abs(unit) * fit.scale, rel=1e-7)
    torch.testing.assert_close(other.left_out, unit * fit.left_out + shift, atol=1e-8 * abs(unit) * size, rtol=1e-8)


def is_median(fit: RobustFit, y: Tensor) -> bool:
    return (
        not fit.coefficients.any()
        and fit.intercept == float(y.quantile(0.5))
        and bool((fit.left_out == fit.intercept).all())
    )


@pytest.mark.parametrize(("n", "p"), [(0, 1), (1, 40), (15, 1), (16, 40), (17, 1)])
def test_few_numbers_give_a_fit_too(n: int, p: int) -> None:
    x, _, y = linear(n, p)
    fit = robust_ridge(x, y)
    assert fit.coefficients.shape == (p,)
    assert fit.left_out.shape == (n,)
    assert math.isfinite(fit.intercept)
    assert fit.scale > 0
    if n == 0:
        assert (fit.intercept, fit.scale) == (0.0, 1.0)
    elif n < 16:
        assert is_median(fit, y)
    assert fit.coefficients.isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_left_out_predictions_are_never_worse_than_the_median(seed: int) -> None:
    """Median errors, of wild and tame laws, telling and untelling x, and numbers of two places far apart."""
    g = torch.Generator().manual_seed(seed)
    n, p = 20 + 37 * seed, (3, 60, 300)[seed % 3]
    x = torch.randn(n, p, generator=g, dtype=torch.float64)
    y = {
        0: x[:, 0] + cauchy(n, seed),
        1: (5 * x[:, 0]).exp(),
        2: 1e4 * (torch.rand(n, generator=g, dtype=torch.float64) < 0.45).double() + x[:, 1],
        3: torch.randint(0, 3, (n,), generator=g).double(),
    }[seed % 4]
    fit = robust_ridge(x, y)
    of_median = float((y - y.quantile(0.5)).abs().median())
    assert float((y - fit.left_out).abs().median()) <= of_median * (1 + 1e-12)


def model_of(vocab_start: int = 0, rows: int | None = None, **shape: int) -> CausalQwenModel:
    """A tiny model whose normalisers differ from token to token: a direction that all rows share."""
    base = tiny_base("qwen2", tied=False)
    torch.manual_seed(3)
    base.lm_head.weight.data += torch.randn(HIDDEN)
    return CausalQwenModel.from_base_model(
        base, start="calibrated", num_token_id=NUM, vocab_start=vocab_start, rows=rows, **shape
    ).eval()


def locations(model: CausalQwenModel, seed: int = 0) -> torch.Tensor:
    batch = random_batch(8, 20, numbers=False, seed=seed)
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    with torch.no_grad():
        return model.action.word_part(model.abduction(model.kept_features(batch, keep))).loc


def level(model: CausalQwenModel, loc: torch.Tensor) -> float:
    """`level_logits` by the normalisers of these tokens; the share it tells."""
    norm = (loc @ model.action.cls_weight.T + model.action.cls_bias).logsumexp(-1).detach()
    return level_logits(model.action, loc, norm)[0]


def logits(model: CausalQwenModel, loc: torch.Tensor) -> torch.Tensor:
    return (loc.double() @ model.action.cls_weight.double().T + model.action.cls_bias.double()).detach()


def projected(loc: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(this rank's rows of W_cls, W_loc, error) of 6 dimensions for features loc [N,H]; float64."""
    groups = groups_of(len(rows)) if len(rows) > 1 else ALONE
    own = groups.vocab_rank
    model = model_of(sum(rows[:own]), rows[own], causal_size=6, number_dims=2)
    part = len(loc) // max(1, groups.world_size)
    project_by_features(model, loc[groups.rank * part :][:part], groups)
    weights = model.action.cls_weight, model.abduction.loc_net.weight[:6]
    return *(weight.detach().double() for weight in weights), model.action.projection_error


def test_fewer_dimensions_keep_most_of_the_logits_of_real_features(pool: Pool) -> None:
    """No map of rank 6 is nearer to the base's logits (Eckart and Young); two ranks come to the same."""
    torch.manual_seed(5)
    z = torch.randn(200, HIDDEN) * torch.logspace(0, -2, HIDDEN)[torch.randperm(HIDDEN)] @ torch.randn(HIDDEN, HIDDEN)
    base = model_of().action.cls_weight.detach().double()
    weight, into, error = projected(z, [len(base)])
    logits = z.double() @ base.T
    values = torch.linalg.svdvals(logits)
    least = float((values[6:].square().sum() / values.square().sum()).sqrt())
    found = float((logits - z.double() @ into.T @ weight.T).norm() / logits.norm())
    assert least < 0.5
    assert found == pytest.approx(least, rel=1e-2), "but for the little ridge"
    assert error == pytest.approx(least, rel=1e-2)
    assert torch.allclose(into.norm(dim=1), torch.ones(6).double(), atol=1e-6)
    parts = pool(projected, 2, z, [40, len(base) - 40])
    assert torch.allclose(torch.cat([part[0] for part in parts]).abs(), weight.abs(), atol=1e-4)
    assert all(torch.allclose(part[1].abs(), into.abs(), atol=1e-4) for part in parts)


@pytest.mark.parametrize("shape", [{}, {"number_dims": 2}, {"causal_size": HIDDEN + 5}, {"causal_size": HIDDEN - 4}])
def test_levelling_keeps_the_softmax_and_flattens_the_normaliser(shape: dict[str, int]) -> None:
    model = model_of(**shape)
    loc, fresh = locations(model), locations(model, seed=1)
    before, unseen = logits(model, loc), logits(model, fresh)
    told = level(model, loc)
    after, unseen_after = logits(model, loc), logits(model, fresh)
    # a row of order 1 is rounded once, by 6e-8 of itself, over HIDDEN products with loc_U of order 1
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), atol=1e-6, rtol=1e-4)
    assert told > 0.9
    left = float(unseen_after.logsumexp(-1).var() / unseen.logsumexp(-1).var())
    assert left < 0.2, "on tokens it has not seen, too"
    assert 1 - told == pytest.approx(left, abs=0.1), "what is said of left-out tokens holds on others"


def test_with_many_tokens_levelling_is_least_squares() -> None:
    model = model_of()
    loc = locations(model)
    norm = logits(model, loc).logsumexp(-1)
    x = torch.cat([loc.double(), torch.ones(len(loc), 1)], 1)
    expected = torch.linalg.lstsq(x, norm[:, None]).solution[:-1, 0]
    rows = model.action.cls_weight.detach().clone()
    level(model, loc)
    taken = (rows - model.action.cls_weight.detach()).double()
    assert float((taken - taken[0]).abs().max()) < 1e-6, "the same from every row"
    assert float((taken[0] - expected).norm() / expected.norm()) < 0.05, "the ridge is a small one"
