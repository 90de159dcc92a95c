"""The wide part: its sums over a text however it is cut, its closed form against scikit-learn, and what it adds."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from support.numerics import assert_close
from support.tiny import NUM, VOCAB, random_batch, tiny_causal_lm, tiny_model

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.heads.beside import columns_beside_z
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.tables.wide.wide_part import WidePart
from cqwen_dist.tables.wide.wide_rows import NamedRows, counts_of, hashed_rows, kernel_of, texts_before
from cqwen_dist.tables.wide.wide_size import FOLDS
from cqwen_dist.tables.wide.wide_start import _Targets, fit_wide

BUCKETS = 1024


def worn_part(random_features: int = 0) -> WidePart:
    part = WidePart(BUCKETS, NUM, VOCAB, random_features).eval()
    for table in part.parameters():
        table.data.normal_(generator=torch.Generator().manual_seed(3))
    part.line_end.data.zero_()[:5] = 1.0
    return part


def texts(rows: int, length: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [rows,length], a number in two places of each, and their values."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (rows, length), generator=draw)
    values = torch.zeros(rows, length, dtype=torch.float64)
    ids[:, [2, 5]] = NUM
    values[:, [2, 5]] = torch.randn(rows, 2, generator=draw, dtype=torch.float64).exp().round(decimals=1)
    return ids, values


def truth_of(ids, values) -> torch.Tensor:
    """What each word adds, and half the logarithm of the last value; float64 [rows]."""
    effect = torch.randn(NUM + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    effect[NUM] = 0.0
    return effect[ids].sum(1) + 0.5 * values[:, 5].log1p()


def batch_of(ids, values, targets) -> Batch:
    """Texts behind which a number is due: the label of the last position alone, and <NUM> behind it, as a collator."""
    rows, length = ids.shape
    labels = torch.full((rows, length), IGNORE_INDEX)
    labels[:, -1] = NUM
    number_labels = torch.zeros(rows, length, dtype=torch.float64)
    number_labels[:, -1] = targets
    positions = torch.arange(length).expand(rows, -1)
    ones = torch.ones(rows, length, dtype=torch.bool)
    return Batch(
        input_ids=ids,
        numeric_values=values,
        attention_mask=ones,
        position_ids=positions,
        labels=labels,
        numeric_labels=number_labels,
        numeric_mask=labels == NUM,
    )


@pytest.mark.parametrize("training", [True, False])
def test_kept_positions_equal_those_of_the_whole_text(training):
    part, (ids, values) = worn_part(8).train(training), texts(3)
    keep = torch.tensor([0, 8, 13, 26])
    whole, state = part(ids, values)
    kept, same = part(ids, values, keep=keep)
    assert_close(kept, whole.flatten(1)[:, keep], 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True)), "what follows knows all of the text"


def test_a_name_is_the_words_before_a_number_in_its_line():
    part = worn_part()
    ids = torch.tensor([[9, 12, NUM, 13, NUM, NUM, 2, 12, NUM]]).repeat(2, 1)  # the token 2 ends a line
    values = torch.zeros(2, 9, dtype=torch.float64)
    values[:, [2, 4, 5, 8]] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
    names = part.entries(ids, values).name[:, [2, 4, 5, 8]]
    assert torch.equal(names[0], names[1])
    assert len(names[0].unique()) == 4
    other = part.entries(ids[:1].clone().index_fill(1, torch.tensor([1]), 14), values[:1]).name[0, [2, 4, 5, 8]]
    assert (other != names[0]).tolist() == [True, True, True, False]


@pytest.mark.parametrize("random_features", [0, 512])
@pytest.mark.parametrize("cuts", [[2, 3], list(range(1, 9))])
def test_a_text_in_pieces_gives_the_same_outputs(cuts, random_features):
    part, (ids, values) = worn_part(random_features), texts(3)
    whole, _ = part(ids, values)
    state, pieces = None, []
    for start, stop in zip([0, *cuts], [*cuts, 9], strict=True):
        piece, state = part(ids[:, start:stop], values[:, start:stop], state=state)
        pieces.append(piece)
    assert_close(torch.cat(pieces, -1), whole, 1e-5 if random_features else 1e-6)
    assert whole.std() > 0.5  # the tables are not 0


@pytest.mark.parametrize("training", [True, False])
def test_packed_and_padded_texts_do_not_mix(training):
    part, (ids, values) = worn_part().train(training), texts(2)
    alone, _ = part(ids, values)
    packed, _ = part(ids.view(1, -1), values.view(1, -1), positions=torch.arange(9).repeat(2)[None])
    assert_close(packed.view(2, 2, 9), alone, 1e-6)
    mask = torch.tensor([[0] * 4 + [1] * 9] * 2)
    pad = torch.full((2, 4), 7)
    padded, _ = part(torch.cat([pad, ids], 1), torch.cat([pad * 0.0, values], 1), mask=mask)
    assert_close(padded[..., 4:], alone, 1e-6)


def test_the_closed_form_is_a_ridge_regression():
    """To 1e-8: both in float64, on some sixty columns and two numbers."""
    part, (ids, values) = WidePart(64, NUM, VOCAB), texts(60)
    part.line_end.data[:5] = 1.0
    ids[:, [0, 1, 3, 4]] = torch.tensor([7, 9, 0, 9])  # two lines, each with a number behind its name
    found = texts_before(part, batch_of(ids, values, torch.zeros(60)), torch.arange(60) * 9 + 8)
    words, lines, scaling = hashed_rows(found, 64)
    x = NamedRows.of(found).linear
    for rows in (words.toarray(), lines.toarray(), x):
        assert np.square(rows).sum(1).mean() == pytest.approx(1.0)
    rows = np.hstack([(words + np.sqrt(0.1) * lines).toarray(), np.sqrt(0.3) * x])
    draw = np.random.default_rng(0)
    t, weights = draw.normal(size=60), draw.uniform(0.2, 1, 60)
    folds = np.array([text.fold for text in found])
    kernel = kernel_of(words) + 0.1 * kernel_of(lines) + 0.3 * (x @ x.T)
    g, solved = _Targets(t, t, weights, folds).left_out(kernel, 0.7)
    for fold in set(folds):
        own, rest = folds == fold, folds != fold
        theirs = Ridge(0.7, fit_intercept=False).fit(rows[rest], t[rest], sample_weight=weights[rest])
        np.testing.assert_allclose(rows.T @ solved[fold], theirs.coef_, atol=1e-8)
        weight = scaling * ((words + 0.1 * lines).T @ solved[fold])
        own_g = counts_of(found, 64)[own] @ weight + 0.3 * x[own] @ (x.T @ solved[fold])
        np.testing.assert_allclose(own_g, theirs.predict(rows[own]), atol=1e-8)
        np.testing.assert_allclose(g[own], theirs.predict(rows[own]), atol=1e-8)


def test_training_texts_are_read_without_their_fold_others_by_all_folds():
    part, (ids, values) = WidePart(BUCKETS, NUM, VOCAB), texts(200)
    y = truth_of(ids, values)
    batch = batch_of(ids, values, y)
    found = fit_wide(texts_before(part, batch, torch.arange(200) * 9 + 8), y, BUCKETS)
    part.weight.data.copy_(found.tables["weight"])
    assert_close(part.train()(ids, values)[0][0, :, -1], found.left_out.float(), 1e-4)
    everyone = part.eval()(ids, values)[0][0, :, -1]
    assert (everyone - y).abs().mean() < 0.7 * (found.left_out - y).abs().mean()  # 7 of 8 tables know the answer
    new, new_values = texts(200, seed=5)
    truth = truth_of(new, new_values)
    error = (part(new, new_values)[0][0, :, -1] - (truth - y.median())).abs().mean()
    assert error < 0.75 * (truth - y.median()).abs().mean()


def test_pure_noise_is_not_fitted():
    part, (ids, values) = WidePart(BUCKETS, NUM, VOCAB), texts(200)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = fit_wide(texts_before(part, batch_of(ids, values, noise), torch.arange(200) * 9 + 8), noise, BUCKETS)
    assert found is None or float(found.left_out.abs().mean()) < 0.3
    few = texts_before(part, batch_of(ids[:9], values[:9], noise[:9]), torch.arange(9) * 9 + 8)
    assert fit_wide(few, noise[:9], BUCKETS) is None


def test_calibration_fits_the_wide_part_and_words_ignore_it():
    ids, values = texts(240)
    y = truth_of(ids, values)
    shape = {"start": "calibrated", "number_dims": 2, "target": {"name": "standardise", "median": 1.0, "scale": 2.0}}
    plain, wide = tiny_model(**shape), tiny_model(**shape, wide=BUCKETS)
    batches = [batch_of(ids[at : at + 40], values[at : at + 40], y[at : at + 40]) for at in range(0, 240, 40)]
    without, found = calibrate(plain, batches), calibrate(wide, batches)
    assert found.reg_mdae < 0.75 * without.reg_mdae
    before, after = plain(ids[:3], values[:3]), wide(ids[:3], values[:3])
    for a, b in zip(before[:2], after[:2], strict=True):
        assert torch.equal(a, b)
    new, new_values = texts(40, seed=9)
    truth = truth_of(new, new_values)
    errors = [(m.target.inverse(m(new, new_values)[2][:, -1].double()) - truth).abs().median() for m in (plain, wide)]
    assert errors[1] < 0.8 * errors[0]


def test_evaluation_texts_are_fitted_and_read_without_their_fold():
    """beside_batches: on 40 texts alone little is known of 30 words; with 160 more that the wide part alone learns, new
    texts are read better, and the 160 themselves no better than new ones in training mode."""
    shape = {"start": "calibrated", "number_dims": 2, "wide": BUCKETS}
    few, more = tiny_model(**shape), tiny_model(**shape)
    ids, values = texts(200)
    y = truth_of(ids, values)
    batches = [batch_of(ids[at : at + 40], values[at : at + 40], y[at : at + 40]) for at in range(0, 200, 40)]
    calibrate(few, batches[:1])
    calibrate(more, batches[:1], beside_batches=[(batch, torch.zeros(40, 0)) for batch in batches[1:]])

    new, new_values = texts(400, seed=9)
    truth = truth_of(new, new_values) - y.median()

    def error(model, ids, values, truth) -> float:
        return float((model.wide(ids, values)[0][0, :, -1] - truth).square().mean() / truth.square().mean())

    assert error(more.eval(), new, new_values, truth) < 0.8 * error(few.eval(), new, new_values, truth)
    known = ids[40:], values[40:], y[40:] - y.median()
    honest, seen = error(more.train(), *known), error(more.eval(), *known)
    expected = error(more.eval(), new, new_values, truth)
    assert seen < 0.7 * expected
    assert 0.75 * expected < honest < 1.5 * expected  # the eighth that is left out costs a little, 160 texts vary


def test_cached_generation_equals_uncached_generation():
    model = tiny_causal_lm(wide=BUCKETS, number_dims=2)
    model.model.wide.weight.data.copy_(worn_part().weight * 0.1)
    model.model.action.cls_bias.data[NUM] += 3.0  # numbers are written
    batch = random_batch()
    prompt = {"input_ids": batch.input_ids[:, :8], "numeric_values": batch.numeric_values[:, :8]}
    with_cache, numbers = model.generate(**prompt, max_new_tokens=6, return_numbers=True, digits=3)
    without, others = model.generate(**prompt, max_new_tokens=6, return_numbers=True, digits=3, use_cache=False)
    assert torch.equal(with_cache, without)
    assert bool(numbers.generated.any())
    assert_close(numbers.values, others.values, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2**-15)])
def test_g_survives_the_dtype_of_z(dtype, tolerance):
    g, h = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * 5
    *parts, spread = columns_beside_z(torch.stack([g, h]), dtype).unbind(-1)
    back = sum(part.float() for part in parts)
    assert ((back - g).abs() <= tolerance * g.abs()).all()
    assert torch.equal(spread, h.to(dtype))


def test_a_left_out_fold_does_not_affect_its_fit() -> None:
    """Neither in the second fit's weights, which come from the first fit's errors (with missing folds, too)."""
    draw = np.random.default_rng(0)
    x, t, folds = draw.standard_normal((60, 40)), draw.standard_cauchy(60), np.arange(60) % (FOLDS - 1)
    kernel, own, ridge = x @ x.T / 40, folds == 2, 0.3

    def targets(t: np.ndarray) -> _Targets:
        return _Targets(t, t.clip(-6, 6), 1 / (1 + t**2), folds)

    _, solved = targets(t).left_out(kernel, ridge, again=True)
    _, other = targets(np.where(own, -3 * t, t)).left_out(kernel, ridge, again=True)
    assert np.allclose(solved[2], other[2], rtol=0, atol=1e-9 * np.abs(solved).max())
    assert not np.allclose(solved[3], other[3], rtol=0, atol=1e-3 * np.abs(solved).max())
