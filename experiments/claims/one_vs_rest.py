"""Does P need no softmax? One-vs-rest and softmax on the same held-out words: calibration, and several right words.

(S4 3.3.2, 3.3.4.) Both are of one base. Expected calibration error and Brier score of the chosen word, the Brier score
over all words, and a reliability curve of every P of every word. Prompts with several right words (`lists`): the total
that they get, how evenly, how many of them are the best, how many have P above 1/2. `growth`: parts of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.line_chart import line_chart
from experiments.claims import growth
from experiments.claims.lists import PROMPTS
from experiments.claims.measures import Claim, auroc, calibration_error, cell, rank_correlation
from experiments.claims.scores import STAGES, Scores
from experiments.claims.uncertainty import words_of

TITLE = "One-vs-rest beside softmax"
FACTORS = np.logspace(-1, 5, 61)


def of_calibration(scores: Scores) -> dict[str, dict[str, float]]:
    """Of P, of P / sum P and of softmax: error of calibration, Brier scores and surprise, on words."""
    words = words_of(scores)
    total = words["p_sum"]
    laws = {
        "P": (words["best"], words["p"], words["p_sq"], words["p_label"]),
        "P / sum P": (words["best"], words["p"] / total, words["p_sq"] / total**2, words["p_label"] / total),
        "softmax": (words["soft_best"], words["soft_p"], words["soft_sq"], words["soft_label"]),
    }
    found = {}
    for name, (best, p, squares, own) in laws.items():
        right = best == words["label"]
        found[name] = {
            "right": float(right.mean()),
            "mean P of the chosen word": float(p.mean()),
            "ECE": calibration_error(p, right),
            "Brier, chosen word": float(np.mean((p - right) ** 2)),
            "Brier, all words": float(np.mean(squares - 2 * own + 1)),
        }
    p, factor = widened(words)
    right = words["best"] == words["label"]
    found["P, wider scale"] = {
        "factor on every scale": factor,
        "ECE": calibration_error(p, right),
        "Brier, chosen word": float(np.mean((p - right) ** 2)),
    }
    found["P"] |= {
        "sum of P, median": float(np.median(total)),
        "of it P < 0.001": float(np.median(words["p_tail"] / total)),
    }
    return found


def widened(words: Scores) -> tuple[np.ndarray, float]:
    """P of the chosen words [N] with every scale_S multiplied by a factor, and the mean factor.

    The factor has the lowest Brier score on the other half of the texts. It changes no choice: the order by P stays.
    """
    p = np.clip(words["p"], 1e-9, 1 - 1e-7)
    gap = words["scale"] / np.tan(np.pi * p)  # C - loc_S
    right, first = words["best"] == words["label"], words["text"] % 2 == 0
    tried = [(factor, np.arctan2(factor * words["scale"], gap) / np.pi) for factor in FACTORS]
    found, factors = np.zeros(len(p)), []
    for half in (first, ~first):
        factor, best = min(tried, key=lambda one: float(np.mean((one[1] - right)[~half] ** 2)))
        found[half] = best[half]
        factors.append(factor)
    return found, float(np.mean(factors))


def of_lists(lists: Scores) -> dict[str, dict[str, float]]:
    """Means over the prompts, of one-vs-rest and of softmax: total of the right words, evenness (entropy of their
    shares by that of equal shares), their share among as many best words, and how many have more than 1/2."""
    found: dict[str, dict[str, float]] = {}
    for name, column, rank in (("P", "p", "rank_p"), ("softmax", "soft", "rank_soft")):
        rows = []
        for number in np.unique(lists["prompt"]):
            own = lists["prompt"] == number
            p, count = lists[column][own], int(own.sum())
            shares = p / max(p.sum(), 1e-30)
            evenness = -float((shares * np.log(np.maximum(shares, 1e-30))).sum()) / np.log(count)
            rows.append(
                [p.sum(), evenness, (lists[rank][own] < count).mean(), (p > 0.5).sum(), float((p > 0.5).sum() > 1)]
            )
        names = ("total", "evenness", "among the best", "above 1/2", "two or more above 1/2")
        found[name] = dict(zip(names, (np.mean(rows, 0) if rows else np.full(5, np.nan)).tolist(), strict=True))
    return found


def summary(every: list[dict[str, Scores]], parts: list[dict[str, growth.Found]]) -> dict[str, Any]:
    """Claims, tables and pictures from the scores and the parts of the vocabulary (`growth`) of all seeds."""
    calibration = {stage: [of_calibration(scores[f"{stage}/held out"]) for scores in every] for stage in STAGES}
    lists = {stage: [of_lists(scores[f"{stage}/lists"]) for scores in every] for stage in STAGES}
    return {
        "claims": [claim.judged() for claim in (*_claims(calibration, lists), *growth.claims(parts), *_of_c(every))],
        "tables": [_calibration_table(calibration), growth.table(parts), _list_table(lists)],
        "pictures": {"reliability": _reliability(every), "growth": growth.picture(parts)},
        "details": {"calibration": calibration, "lists": lists, "growth": parts},
    }


def _of_c(every: list[dict[str, Scores]]) -> list[Claim]:
    """S0's outlook: frequent words learn a lower C, rare ones a higher."""
    columns = [(scores["training"]["C moved"], scores["training"]["count"]) for scores in every]
    below = [auroc(-moved, count > 0) for moved, count in columns]
    falls = [-rank_correlation(count[count > 0].astype(float), moved[count > 0]) for moved, count in columns]
    return [
        Claim("C falls for words of the training texts, beside unseen words", "AUROC", 0.5, below),
        Claim("C falls more for words that come more often", "rank correlation, negated", 0.0, falls),
    ]


def _claims(calibration: dict[str, Any], lists: dict[str, Any]) -> list[Claim]:
    found = []
    for stage in STAGES:
        for measure in ("ECE", "Brier, all words"):
            gains = [seed["softmax"][measure] - seed["P"][measure] for seed in calibration[stage]]
            found.append(
                Claim(f"P is calibrated better than softmax, {stage}", f"{measure}, softmax less P", 0.0, gains)
            )
        gains = [seed["softmax"]["ECE"] - seed["P, wider scale"]["ECE"] for seed in calibration[stage]]
        found.append(Claim(f"with a wider scale it is, {stage}", "ECE, softmax less P", 0.0, gains))
        two = [seed["P"]["two or more above 1/2"] for seed in lists[stage]]
        found.append(Claim(f"several right words hold at once, {stage}", "share of prompts, P > 1/2", 0.5, two))
        even = [seed["P"]["evenness"] - seed["softmax"]["evenness"] for seed in lists[stage]]
        found.append(Claim(f"P shares more evenly than softmax, {stage}", "evenness, P less softmax", 0.0, even))
    return found


def _calibration_table(calibration: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for stage in STAGES:
        for law in calibration[stage][0]:
            for measure in calibration[stage][0][law]:
                rows.append([stage, law, measure, cell([seed[law][measure] for seed in calibration[stage]], 4)])
    return {"title": "Held-out words", "head": ["", "law", "measure", "value"], "rows": rows}


def _list_table(lists: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for measure in ("total", "evenness", "among the best", "above 1/2"):
        for law in ("P", "softmax"):
            rows.append([measure, law, *(cell([seed[law][measure] for seed in lists[stage]]) for stage in STAGES)])
    return {"title": f"{len(PROMPTS)} prompts with several right words", "head": ["", "law", *STAGES], "rows": rows}


def _reliability(every: list[dict[str, Scores]]) -> str:
    lines = {}
    for stage in STAGES:
        for law in ("ovr", "softmax"):
            count, total, hits = np.sum([scores[f"{stage}/held out"][f"bins {law}"] for scores in every], 0)
            name = f"{'P' if law == 'ovr' else 'softmax'}, {stage}"
            filled = count >= 20
            lines[name] = [
                (float(t / n), float(h / n)) for n, t, h in zip(count[filled], total[filled], hits[filled], strict=True)
            ]
    lines = {name: line for name, line in lines.items() if line}
    title = "How often a word comes that is given P, all words"
    return line_chart(title, lines, "P", "share that comes", diagonal=True, points=True)
