"""experiments.carte: its own parts against scikit-learn and by hand."""

from pathlib import Path

import numpy as np
from sklearn.linear_model import RidgeCV

from cqwen_dist.tables.baselines import ALPHAS
from experiments.carte import compared, judged, kept, page, stacked
from experiments.carte_models import USUAL, WIDE_PART, Fit, kernel, kernel_ridge

DRAW = np.random.default_rng(0)
TRAIN, TEST = np.arange(0, 60, 2), np.arange(1, 60, 2)


def rows_with_targets() -> tuple[np.ndarray, np.ndarray]:
    x = DRAW.standard_normal((60, 8))
    return x, 2.0 + x @ DRAW.standard_normal(8) + DRAW.standard_normal(60)


def test_ridge_by_products_is_scikit_learns_ridge() -> None:
    x, y = rows_with_targets()
    model = RidgeCV(ALPHAS).fit(x[TRAIN], y[TRAIN])
    found, error = kernel_ridge(kernel(x, TRAIN), y, TRAIN, TEST)
    np.testing.assert_allclose(found.test, model.predict(x[TEST]), atol=1e-9)
    np.testing.assert_allclose(error, -model.best_score_, atol=1e-9)


def test_left_out_predictions_are_of_fits_without_the_row() -> None:
    x, y = rows_with_targets()
    alpha = RidgeCV(ALPHAS).fit(x[TRAIN], y[TRAIN]).alpha_
    found, _ = kernel_ridge(kernel(x, TRAIN), y, TRAIN, TEST)
    for place in (0, 11):
        rest = np.delete(TRAIN, place)
        alone = RidgeCV([alpha]).fit(x[rest], y[rest]).predict(x[[TRAIN[place]]])
        np.testing.assert_allclose(found.left_out[place], alone[0], atol=1e-9)


def test_a_stack_adds_what_predicts_and_leaves_the_opposite_out() -> None:
    a, b = DRAW.standard_normal((2, 200))
    y = 3.0 + a - a.mean() + b - b.mean()
    parts = [3.0 + a - a.mean(), 3.0 + b - b.mean(), 3.0 - a]
    found = stacked([Fit(part, np.array([test])) for part, test in zip(parts, (4.0, 5.0, 100.0), strict=True)], y)
    np.testing.assert_allclose(found.left_out, y, atol=1e-9)
    np.testing.assert_allclose(found.test, 3.0 + 1.0 + 2.0, atol=1e-9)


def test_the_page_has_medians_over_splits_and_the_splits_that_are_won(tmp_path: Path) -> None:
    y = DRAW.standard_normal(200)
    g, nothing = Fit(y * 0.9, y * 0.9), Fit(np.zeros(200), np.zeros(200))
    made = dict.fromkeys(USUAL, Fit(y * 0.5, y * 0.5)) | {"g": g, "h": nothing, "folds": np.zeros(200)}
    for _ in range(2):  # computed, then read
        known = kept(tmp_path / "split.npz", lambda: made)
    split = judged(known, y, y)
    title, *lines = page({64: [split, split, split]})
    assert title.endswith("The best usual model: ridge, words.")
    found = {name: rest for name, *rest in (line.split(" | ") for line in lines)}
    assert found["| wide part"][0] == "0.990"
    assert found["| wide part"][3] == "3 of 3"
    gain = split[WIDE_PART]["r2"] - split["stack of the four"]["r2"]
    assert f"wide part - stack of the four: {gain:+.4f}, above in 0 of 3" in compared([split] * 3)
    assert 0.88 <= split[WIDE_PART]["coverage_90"] <= 0.97, "neighbours tell these errors, a tenth of y, well"
