"""How `cqwen fit` judges models on held-out rows: errors, intervals, deciles, and which model to use."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from cqwen_dist.data.columns import MOST_VALUES
from cqwen_dist.prediction.learnt_table import OUTSIDE
from cqwen_dist.prediction.table import NUMBER_COLUMNS

OURS = "CausalQwen"  # the only one that gives intervals
DRAWS = 2000  # of the paired bootstrap
LEAST_ROWS = 10  # in a decile, at least; a small table has fewer than ten
WORST = 10  # rows
NAMED = 2  # equal models in the sentence
DRAWN = 1000  # rows in a chart


def errors(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """MAE, RMSE, median absolute error and R2 for predictions [n]."""
    error = predicted - truth
    total = float(np.square(truth - truth.mean()).sum())
    return {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mdae": float(np.median(np.abs(error))),
        "r2": 1 - float(np.square(error).sum()) / total if total else float("nan"),
    }


def intervals(ends: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The share of 90 % intervals [n,2] that contain the truth, and their median width."""
    inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
    return {"coverage_90": float(inside.mean()), "width_90": float(np.median(ends[:, 1] - ends[:, 0]))}


def over_runs(of_runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The errors of runs with several seeds or folds. Each has its values, their mean, and half of the mean's 95 %
    interval by Student's t. of_runs: each run's predictions and the truth, as far as both reach."""
    found = [errors(predicted[: len(truth)], truth[: len(predicted)]) for predicted, truth in of_runs]
    reach = stats.t.ppf(0.975, len(found) - 1) / len(found) ** 0.5
    return {
        name: {"values": values.tolist(), "mean": float(values.mean()), "reach": float(reach * values.std(ddof=1))}
        for name in found[0]
        for values in [np.array([own[name] for own in found])]
    }


def verdict(predictions: Mapping[str, np.ndarray], truth: np.ndarray) -> dict[str, Any]:
    """The model with the lowest mean error, those that are not surely worse, and a sentence on which to use.

    A model is not surely worse if a paired bootstrap over the rows covers a difference of 0, at 95 % for all pairs
    together: the best model is often the luckiest. One row with a huge error also makes a model's mean unsure.
    """
    lost = {name: np.abs(found - truth) for name, found in predictions.items()}
    mean = {name: float(of.mean()) for name, of in lost.items()}
    best, *others = sorted(lost, key=lambda name: mean[name])
    rows, unit = len(truth), (mean[best] or 1.0) / 100
    counts = np.random.default_rng(0).multinomial(rows, np.full(rows, 1 / rows), DRAWS) / rows
    drawn = counts @ np.stack([lost[name] - mean[name] for name in (best, *others)], 1)
    gaps = drawn[:, :, None] - drawn[:, None, :]  # [draws, model, other model]
    spread = gaps.std(0).clip(min=1e-300)
    reach = np.quantile(np.abs(gaps / spread).max((1, 2)), 0.95) * spread[0, 1:] / unit
    larger = {name: (mean[name] - mean[best]) / unit for name in others}  # percent
    far = {name: max(float(of), 0.05) for name, of in zip(others, reach, strict=True)}  # 0.0 % is no difference
    equal = [name for name in others if larger[name] <= far[name]]
    said = [f'Use "{best}".', *_compared(larger, far, rows)]
    if OURS in (best, *equal):
        said.append(f"{OURS} also gives intervals.")
    return {"best": best, "equal": equal, "verdict": " ".join(said)}


def _compared(larger: Mapping[str, float], far: Mapping[str, float], rows: int) -> Iterator[str]:
    """Sentences on the models beside the best. larger: by how many percent their errors are; far: what noise allows."""
    equal, apart = ([name for name in larger if (larger[name] <= far[name]) is same] for same in (True, False))
    if equal:
        named = sorted(equal, key=lambda name: name != OURS)[:NAMED]  # ours first
        peers = [f'"{name}" ({larger[name]:+.1f} %)' for name in named]
        peers += [f"and {len(equal) - NAMED} more"] if len(equal) > NAMED else []
        yield f"Not surely worse on {rows:,} rows: {', '.join(peers)}."
    for name in [OURS] if OURS in apart else apart[:1]:
        low, high = larger[name] - far[name], larger[name] + far[name]
        yield f'The mean error of "{name}" is {larger[name]:.1f} % larger ({low:.1f} to {high:.1f} %).'


def shown_rows(own: Sequence[Mapping[str, Any]], prompts: Sequence[str], truth: np.ndarray) -> dict[str, Any]:
    """Rows for people: five examples, those with the largest errors, and the numbers of a chart."""
    rows = [
        {"prompt": prompt, **{name: cell for name, cell in row.items() if name in (*NUMBER_COLUMNS, OUTSIDE)}}
        | {"truth": float(value)}
        for prompt, row, value in zip(prompts, own, truth, strict=True)
    ]
    worst = sorted(rows, key=lambda row: -abs(row["predicted"] - row["truth"]))[:WORST]
    names = {"true": "truth", "predicted": "predicted", "low": "low_90", "high": "high_90", "outside": OUTSIDE}
    points = {name: [row[column] for row in rows[:DRAWN]] for name, column in names.items()}
    outside = sum(bool(row.get(OUTSIDE)) for row in rows)
    return {"examples": rows[:5], "worst": worst, "outside": outside, "points": points}


def cells_of(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> dict[str, list[str]]:
    """The cells of some columns of predicted rows."""
    return {name: [str(row[name]) for row in rows] for name in sorted(columns)}


def conditional(
    found: Mapping[str, np.ndarray], ends: np.ndarray, truth: np.ndarray, texts: Sequence[str], cells: Mapping[str, Any]
) -> dict[str, Any]:
    """Errors and intervals by deciles of predicted size, width and the text's length, and by category, the least held
    first; beside the best other model. cells: by column; the values of a column with few are categories."""
    errors_of = {name: np.abs(predicted - truth) for name, predicted in found.items()}
    lost = dict(sorted(errors_of.items(), key=lambda of: (of[0] != OURS, of[1].mean()))[:2])

    def told(part: np.ndarray) -> dict[str, Any]:
        mae = {of: float(error[part].mean()) for of, error in lost.items()}
        return {"rows": len(part), "mae": mae, **intervals(ends[part], truth[part])}

    deciles, length = {}, np.array([*map(len, texts)])
    for name, by in (("predicted", found[OURS]), ("width_90", ends[:, 1] - ends[:, 0]), ("length", length)):
        parts = np.array_split(np.argsort(by, kind="stable"), min(max(len(by) // LEAST_ROWS, 1), 10))
        deciles[name] = [{"from": float(by[part[0]]), "to": float(by[part[-1]]), **told(part)} for part in parts]
    categories = []
    for column, own in cells.items():
        values, which = np.unique(np.array(own), return_inverse=True)
        for i, value in enumerate(values if 1 < len(values) <= MOST_VALUES else []):
            if len(part := np.flatnonzero(which == i)) >= LEAST_ROWS:
                categories.append({"column": column, "value": str(value), **told(part)})
    return {"deciles": deciles, "categories": sorted(categories, key=lambda of: of["coverage_90"])}
