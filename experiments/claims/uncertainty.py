"""Is the scale larger where the model is wrong? Does a small sum of P mark texts of another kind? (S3 7.1, S4 3.3.3)

Words: the area under the ROC curve (AUROC) of "argmax P is wrong" on held-out words, by several scores; 0.5 is chance.
Numbers: rank correlation of scale_Y and the error, and the coverage of 90 % intervals by tenths of scale_Y. Other kinds
of texts: AUROC of a text being of another kind, by the median of sum P and by softmax's mean entropy. Each at the
calibrated start and after a short training of the heads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import cauchy, laplace, norm, t
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.line_chart import line_chart
from cqwen_dist.ops.cauchy import Cauchy
from experiments.claims.measures import Claim, auroc, by_tenths, cell, rank_correlation, rejection_curve
from experiments.claims.scores import STAGES, Scores
from experiments.claims.texts import KINDS

TITLE = "Uncertainty"
ANSWERED = 0.8  # share of answers where the most doubtful are refused
SIGNS = {  # larger where the model should be wrong
    "scale_S of the chosen word": lambda s: s["scale"],
    "mean scale_U": lambda s: s["u_scale"],
    "1 - P": lambda s: 1 - s["p"],
    "softmax: 1 - p": lambda s: 1 - s["soft_p"],
    "softmax: entropy": lambda s: s["soft_entropy"],
    "softmax: - margin": lambda s: -s["soft_margin"],
}

LAWS = {"Cauchy": cauchy, "Laplace": laplace, "Gaussian": norm, "Student t": t}


def words_of(scores: Scores) -> Scores:
    """The columns [N] of the positions whose label is a word."""
    keep = scores["is_number"] == 0
    return {name: column[keep] for name, column in scores.items() if column.shape == keep.shape}


def of_errors(scores: Scores) -> dict[str, float]:
    """AUROC of "argmax P is wrong" by every sign, with the share of words that are right."""
    words = words_of(scores)
    wrong = words["best"] != words["label"]
    signs = {name: auroc(sign(words), wrong) for name, sign in SIGNS.items()}
    gain = dict(rejection_curve(SIGNS["softmax: 1 - p"](words), ~wrong))
    kept = gain[min(gain, key=lambda share: abs(share - ANSWERED))] - float(1 - wrong.mean())
    return {"right": float(1 - wrong.mean()), **signs, "added": added(words), "kept": kept}


def added(words: Scores) -> float:
    """How much the scales add to softmax's entropy: AUROC of a logistic regression on entropy and the logarithms of
    scale_S and mean scale_U, less that of entropy alone; fitted to every other text, asked on the rest. NaN if either
    half is all right or all wrong."""
    wrong, known = words["best"] != words["label"], words["text"] % 2 == 0
    if any(len(np.unique(wrong[half])) < 2 for half in (known, ~known)):
        return math.nan
    columns = np.stack([words["soft_entropy"], np.log(words["scale"]), np.log(words["u_scale"])], 1)
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(columns[known], wrong[known])
    asked = model.decision_function(columns[~known])
    return auroc(asked, wrong[~known]) - auroc(columns[~known, 0], wrong[~known])


def of_numbers(scores: Scores) -> dict[str, Any]:
    """Of the M held-out numbers: rank correlation of scale_Y and the error, coverage, and both by tenths of scale_Y."""
    keep = scores["is_number"] == 1
    loc, scale, goal, crps = (scores[name][keep] for name in ("y_loc", "y_scale", "goal", "crps"))
    error = np.abs(goal - loc)
    surest = error[np.argsort(scale, kind="stable")[: round(ANSWERED * len(error))]]
    inside = (error <= Cauchy.half_width(0.9) * scale).astype(float)
    return {
        "numbers": int(keep.sum()),
        "rank correlation": rank_correlation(scale, error),
        "kept": float(1 - np.median(surest) / np.median(error)),
        "coverage": float(inside.mean()),
        "crps": float(crps.mean()),
        "widest by narrowest": float(np.quantile(scale, 0.9) / np.quantile(scale, 0.1)),
        "tenths": by_tenths(scale, error, inside, crps),  # [10][scale, error, coverage, crps]
    }


def of_laws(scores: Scores) -> dict[str, float]:
    """The mean log likelihood, in nats a number, of the residuals goal - loc_Y under each of `LAWS` around 0, which is
    fitted (scale; the t's degrees of freedom) to the other half of the texts. NaN where a half has no number."""
    keep = scores["is_number"] == 1
    residual, first = (scores["goal"] - scores["y_loc"])[keep], scores["text"][keep] % 2 == 0
    if first.all() or not first.any():
        return dict.fromkeys(LAWS, math.nan)
    found = {}
    for name, law in LAWS.items():
        parts = [law.logpdf(residual[half], *law.fit(residual[~half], floc=0)) for half in (first, ~first)]
        found[name] = float(np.concatenate(parts).mean())
    return found


def of_texts(scores: dict[str, Scores], stage: str) -> dict[str, dict[str, float]]:
    """For each kind of texts the AUROC of being of that kind and not of the held-out texts' own kind."""
    found = {}
    signs = {
        "small sum of P": lambda own: -float(np.median(own["p_sum"])),
        "small best P": lambda own: -float(own["p"].mean()),
        "softmax: entropy": lambda own: float(own["soft_entropy"].mean()),
    }
    for kind in KINDS:
        own, other = (_by_text(words_of(scores[f"{stage}/{name}"])) for name in ("held out", kind))
        wanted = np.repeat([False, True], [len(own), len(other)])
        values = {name: np.array([sign(text) for text in [*own, *other]]) for name, sign in signs.items()}
        found[kind] = {name: auroc(column, wanted) for name, column in values.items()}
    return found


def _by_text(words: Scores) -> list[Scores]:
    """The columns of each text by themselves."""
    return [
        {name: column[words["text"] == text] for name, column in words.items()} for text in np.unique(words["text"])
    ]


def summary(every: list[dict[str, Scores]]) -> dict[str, Any]:
    """Claims, tables and pictures from the scores of all seeds."""
    errors = {stage: [of_errors(scores[f"{stage}/held out"]) for scores in every] for stage in STAGES}
    numbers = {stage: [of_numbers(scores[f"{stage}/held out"]) for scores in every] for stage in STAGES}
    texts = {stage: [of_texts(scores, stage) for scores in every] for stage in STAGES}
    laws = {stage: [of_laws(scores[f"{stage}/held out"]) for scores in every] for stage in STAGES}
    return {
        "claims": [claim.judged() for claim in (*_claims(errors, numbers, texts), *_law_claims(laws["trained"]))],
        "tables": [_error_table(errors), _number_table(numbers), _law_table(laws), _text_table(texts)],
        "pictures": {"rejection": _rejection(every), "intervals": _intervals(numbers["trained"])},
        "details": {"errors": errors, "numbers": numbers, "laws": laws, "texts": texts},
    }


def _claims(errors: dict[str, Any], numbers: dict[str, Any], texts: dict[str, Any]) -> list[Claim]:
    found = []
    for stage in STAGES:
        seeds = errors[stage]
        for sign in ("mean scale_U", "scale_S of the chosen word"):
            name = f"{sign} is larger where the word is wrong, {stage}"
            found.append(Claim(name, "AUROC", 0.5, [seed[sign] for seed in seeds]))
        gain = [seed["1 - P"] - seed["softmax: entropy"] for seed in seeds]
        found.append(
            Claim(f"P tells wrong words better than softmax's entropy, {stage}", "AUROC, difference", 0.0, gain)
        )
        more = [seed["added"] for seed in seeds]
        found.append(Claim(f"scales add to softmax's entropy, {stage}", "AUROC, gain", 0.0, more))
        low = [float(np.mean([kind["small sum of P"] for kind in seed.values()])) for seed in texts[stage]]
        found.append(Claim(f"a small sum of P marks texts of another kind, {stage}", "AUROC, mean of kinds", 0.5, low))
        kept = [seed["kept"] for seed in seeds]
        found.append(Claim(f"the 80 % likeliest words by softmax are righter, {stage}", "share right, gain", 0.0, kept))
        kept = [seed["kept"] for seed in numbers[stage]]
        name = f"the 80 % of numbers with the smallest scale_Y have a smaller error, {stage}"
        found.append(Claim(name, "median error, share saved", 0.0, kept))
        related = [seed["rank correlation"] for seed in numbers[stage]]
        found.append(Claim(f"scale_Y is larger where the number is wrong, {stage}", "rank correlation", 0.0, related))
    return found


def _law_claims(laws: list[dict[str, float]]) -> list[Claim]:
    """Is a Cauchy the right law of the residuals (S4 5.3 (4))?"""
    better = {name: [seed["Cauchy"] - seed[name] for seed in laws] for name in LAWS}
    measure = "log likelihood, Cauchy's less"
    return [
        Claim(
            f"a number's residual is more like a Cauchy's than a {name}'s", f"{measure} the {name}'s", 0.0, better[name]
        )
        for name in LAWS
        if name != "Cauchy"
    ]


def _error_table(errors: dict[str, Any]) -> dict[str, Any]:
    rows = [[name, *(cell([seed[name] for seed in errors[stage]]) for stage in STAGES)] for name in ("right", *SIGNS)]
    rows[0][0] = "(share of words that are right)"
    return {"title": "AUROC of a wrong word, by", "head": ["", *STAGES], "rows": rows}


def _number_table(numbers: dict[str, Any]) -> dict[str, Any]:
    names = ("numbers", "rank correlation", "coverage", "crps", "widest by narrowest")
    rows = [[name, *(cell([seed[name] for seed in numbers[stage]]) for stage in STAGES)] for name in names]
    rows[4][0] = "scale_Y, 90 % quantile by 10 % quantile"
    return {
        "title": "Numbers: coverage of 90 % intervals, CRPS in the target's unit",
        "head": ["", *STAGES],
        "rows": rows,
    }


def _law_table(laws: dict[str, Any]) -> dict[str, Any]:
    rows = [[name, *(cell([seed[name] for seed in laws[stage]]) for stage in STAGES)] for name in LAWS]
    return {"title": "Log likelihood of the numbers' residuals, in nats, by law", "head": ["", *STAGES], "rows": rows}


def _text_table(texts: dict[str, Any]) -> dict[str, Any]:
    head, rows = ["kind", "sign", *STAGES], []
    for kind in KINDS:
        for sign in texts["start"][0][kind]:
            rows.append([kind, sign, *(cell([seed[kind][sign] for seed in texts[stage]]) for stage in STAGES)])
    return {"title": "AUROC of a text of another kind", "head": head, "rows": rows}


def _rejection(every: list[dict[str, Scores]]) -> str:
    lines = {}
    for stage, signs in (("trained", list(SIGNS)), ("start", ["1 - P"])):
        words = [words_of(scores[f"{stage}/held out"]) for scores in every]
        together = {name: np.concatenate([own[name] for own in words]) for name in words[0]}
        right = together["best"] == together["label"]
        for sign in signs:
            name = sign if stage == "trained" else f"{sign}, at the start"
            lines[name] = rejection_curve(SIGNS[sign](together), right)
    return line_chart("Words right where the most doubtful are refused", lines, "share answered", "share right")


def _intervals(numbers: list[dict[str, Any]]) -> str:
    tenths = np.mean([seed["tenths"] for seed in numbers], 0) if all(len(s["tenths"]) == 10 for s in numbers) else None
    if tenths is None:
        tenths = np.array(numbers[0]["tenths"])
    names = {"mean error": 1, "coverage of 90 % intervals": 2, "CRPS": 3}
    top = max(float(np.abs(tenths[:, 1]).max()), 1.0)
    rows = enumerate(tenths, 1)
    points = [(i, row) for i, row in rows if all(math.isfinite(x) for x in row)]
    lines = {f"scale_Y / {tenths[-1, 0]:.2g}": [(float(i), float(row[0] / tenths[-1, 0])) for i, row in points]}
    for name, column in names.items():
        factor = 1.0 if column == 2 else top
        shown = name if column == 2 else f"{name} / {top:.2g}"
        lines[shown] = [(float(i), float(row[column] / factor)) for i, row in points]
    return line_chart("Numbers after training, by tenths of scale_Y", lines, "tenth, by scale_Y", "", points=True)
