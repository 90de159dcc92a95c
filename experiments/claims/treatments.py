"""Is Y(t) that of the individual? (S3 7.1: one causal function Y = f(t; u, noise), instead of an association.)

People of `people`, whose outcome at every dose is known, are learnt from a table by what `cqwen fit` does. Then others
are asked for: this person was given this dose, and this was the outcome. What would it have been at another dose? The
model keeps the person (`generate.facts`; decision D50), or the person's quantile. Its error of the individual's effect,
y(other dose) - y(dose), is held against the same model without the fact, regressions, and the average effect. Do
intervals hold the outcome at a dose that the person was not given, without the fact and with it?
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.line_chart import line_chart
from cqwen_dist import counterfactual_rows, train
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.data.text_files import write_table
from cqwen_dist.generate.continuation import encoded, padded
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.prediction.learnt_table import learnt_table
from cqwen_dist.run.files import write_atomically
from cqwen_dist.tables.fit_request import FitRequest
from cqwen_dist.tables.fitting import best_checkpoint, prepare
from experiments.claims.effects import Law, least_squares, same_quantile, scale_of_errors, true_form
from experiments.claims.measures import Claim, by_tenths, cell, rank_correlation
from experiments.claims.people import COLUMNS, DOSES, SPREAD_U, TARGET, WIDENING, People, average_effect
from experiments.claims.subject import Ask

TITLE = "Treatments"
BATCH = 25  # prompts read at once
OURS, SQUARES, TRUE = "CausalQwen", "least squares", "least squares, true form"
MENDED, WIDER = (f"{name}, scale of errors" for name in (OURS, SQUARES))
GIVEN, BLIND = f"{OURS}, fact observed", f"{OURS}, prediction without the fact"
KEPT, FREE, AVERAGE = f"{OURS}, quantile kept", f"{OURS}, medians", "the true average effect"
ADDITIVE = f"{SQUARES}, residual kept"

Laws = Mapping[str, Law]


def of_seed(ask: Ask) -> dict[str, Any]:
    """The measures of one seed, which draws the people and the training; read from `out` where they were made before.

    Raises `UserError`.
    """
    size, seed = ask.size, ask.seed
    path = ask.out / "treatments" / f"seed-{seed}.json"
    if not path.is_file():
        learnt, others = People.drawn(size.people, 2 * seed), People.drawn(size.asked, 2 * seed + 1)
        ask.say(f"seed {seed}: cqwen fit on {size.people} people, about {size.minutes:g} minutes")
        reader = fitted(ask, learnt, others)
        ask.say(f"seed {seed}: {size.asked} others at {len(DOSES)} doses")
        errors = _own(learnt) - reader.honest(learnt).loc[:, 0]
        laws = all_laws(reader, errors, learnt, others, _doses(others, DOSES))
        found = measured(laws, others, *reader.given(others, _own(others), DOSES))
        write_atomically(path, json.dumps(found, indent=1))
    return dict(json.loads(path.read_text(encoding="utf-8")))


class Reader:
    """A fitted run, asked for the law of the outcome of people at doses."""

    def __init__(self, folder: Path) -> None:
        """folder: of a fit that was trained. Raises `UserError`."""
        self.folder = checkpoint = best_checkpoint(folder / "run")
        self.model, self.tokenizer = load_trained(checkpoint, "auto")
        learnt = learnt_table(checkpoint)
        assert learnt is not None, "a fit has learnt a table"
        self.extract = learnt.extractor()
        self.intervals = Intervals.from_dict(self.model.config.calibration)

    @torch.no_grad()
    def law(self, people: People, doses: np.ndarray) -> Law:
        """The law at doses [n,k], where the number comes next; recalibrated as the fit did it."""
        rows = [row for column in doses.T for row in people.rows(column)]
        prompts = [encoded(self.tokenizer, self.extract.before(row)) for row in rows]
        model, parts = self.model.model, []
        for start in range(0, len(prompts), BATCH):
            u = model.infer(*padded(self.model, self.tokenizer, prompts[start : start + BATCH]))
            y = model.action.number_head.value(model.action.add_noise(u))
            y = model.target.kind(y.loc[:, -1], y.scale[:, -1])
            half = self.intervals.half_width(0.9, y)
            parts.append((model.target.inverse(y.loc), model.target.inverse_scale(y.scale), half))
        return Law(*(torch.cat(part).cpu().numpy().reshape(doses.T.shape).T for part in zip(*parts, strict=True)))

    def given(self, people: People, y: np.ndarray, doses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """(medians [n,k], ends of their 90 % intervals [n,k,2]) at doses, of people whose outcome at their own was y
        [n], as `cqwen counterfactual` has them."""
        columns = []
        for dose in doses:
            rows = [{**row, TARGET: f"{own:.2f}"} for row, own in zip(people.rows(), y, strict=True)]
            columns.append(counterfactual_rows(self.folder, rows, {"dose": f"{dose:g}"}, say=lambda _: None))
        cells = [[[float(row[name]) for name in ("would_be", "low_90", "high_90")] for row in rows] for rows in columns]
        found = np.array(cells).transpose(1, 0, 2)
        return found[..., 0], found[..., 1:]

    def honest(self, people: People) -> Law:
        """The law of people that were learnt from, each by the wide part's fit without it."""
        self.model.model.beside.train()
        try:
            return self.law(people, people.dose[:, None])
        finally:
            self.model.model.beside.eval()


def fitted(ask: Ask, learnt: People, others: People) -> Reader:
    """A run that `cqwen fit` prepared and trained on the table of the people learnt from; the same call goes on."""
    folder = ask.out / "treatments" / f"fit-{ask.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    table, split = folder / "people.csv", folder / "asked.json"
    if not split.is_file():
        rows = [
            {**row, TARGET: f"{y:.2f}"} for of in (learnt, others) for row, y in zip(of.rows(), _own(of), strict=True)
        ]
        with table.open("w", encoding="utf-8", newline="") as file:
            write_table(({name: row[name] for name in (*COLUMNS, TARGET)} for row in rows), file)
        write_atomically(split, json.dumps(list(range(len(learnt.age), len(rows)))))
    request = FitRequest(str(table), TARGET, ask.base, split=str(split), seed=ask.seed, minutes=ask.size.minutes)
    (made,) = prepare(request, folder / "fit", ask.say)
    with redirect_stdout(sys.stderr):
        train(made.config)
    return Reader(folder / "fit")


def all_laws(reader: Reader, errors: np.ndarray, learnt: People, asked: People, doses: np.ndarray) -> dict[str, Law]:
    """The law of the people asked for at doses [m,k], by every model. errors [n]: of the fit at people learnt from."""
    y = _own(learnt)
    ours, squares = reader.law(asked, doses), least_squares(learnt, y, asked, doses)
    residuals = y - least_squares(learnt, y, learnt, learnt.dose[:, None]).loc[:, 0]
    return {
        OURS: ours,
        MENDED: ours.rescaled(*scale_of_errors(learnt, errors, asked, doses)),
        SQUARES: squares,
        WIDER: squares.rescaled(*scale_of_errors(learnt, residuals, asked, doses)),
        TRUE: true_form(learnt, y, asked, doses),
    }


def measured(laws: Laws, asked: People, given: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    """All measures of one seed. laws: at the doses given, then at `DOSES`: [m,1+5]. given, ends: of `Reader.given`."""
    y, doses = _own(asked), _doses(asked, DOSES)
    truth = asked.outcome(doses)[:, 1:]
    effect = truth - y[:, None]
    before = {name: law.at(slice(1)) for name, law in laws.items()}
    after = {name: law.at(slice(1, None)) for name, law in laws.items()}
    kept = {name: same_quantile(before[name], y, after[name]) for name in laws}
    guessed = {
        GIVEN: given - y[:, None],
        BLIND: after[OURS].loc - y[:, None],
        KEPT: kept[OURS] - y[:, None],
        FREE: after[OURS].loc - before[OURS].loc,
        MENDED: kept[MENDED] - y[:, None],
        ADDITIVE: kept[SQUARES] - y[:, None],
        WIDER: kept[WIDER] - y[:, None],
        TRUE: kept[TRUE] - y[:, None],
        AVERAGE: average_effect(doses[:, :1], doses[:, 1:]),
    }
    off = {name: np.abs(found - effect) for name, found in guessed.items()}
    tenths = np.array(by_tenths(effect.ravel(), *(found.ravel() for found in guessed.values())))
    return {
        "error": {name: {"mean": float(e.mean()), "median": float(np.median(e))} for name, e in off.items()},
        "tenths": {name: tenths[:, [0, 1 + i]].tolist() for i, name in enumerate(guessed)},
        "held": {name: _held(*law.interval(), truth) for name, law in after.items()}
        | {GIVEN: _held(ends[..., 0], ends[..., 1], truth)},
        "width": {name: (2 * law.half * law.scale).mean(0).tolist() for name, law in after.items()}
        | {GIVEN: (ends[..., 1] - ends[..., 0]).mean(0).tolist()}
        | {"truth": (asked.quantile(doses, 0.95) - asked.quantile(doses, 0.05))[:, 1:].mean(0).tolist()},
        "place": {
            name: rank_correlation((y - law.loc[:, 0]) / law.scale[:, 0], asked.u) for name, law in before.items()
        },
    }


def _own(people: People) -> np.ndarray:
    """The outcome [n] at the dose given."""
    return people.outcome(people.dose[:, None])[:, 0]


def _doses(people: People, doses: Sequence[float]) -> np.ndarray:
    """The dose given, then each of these: [n,1+k]."""
    return np.column_stack([people.dose, np.tile(doses, (len(people.dose), 1))])


def _held(low: np.ndarray, high: np.ndarray, truth: np.ndarray) -> list[float]:
    """For each dose, how many of the intervals hold the truth, as a share."""
    return [float(share) for share in ((low <= truth) & (truth <= high)).mean(0)]


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Claims, tables and pictures from the measures of all seeds."""
    mean = {name: np.mean([seed["tenths"][name] for seed in every], 0) for name in every[0]["tenths"]}
    lines = {name: [(float(a), float(b)) for a, b in line] for name, line in mean.items()}
    title, across = "Effect of another dose on a person", "true effect (means of tenths)"
    return {
        "claims": [claim.judged() for claim in _claims(every)],
        "tables": _tables(every),
        "pictures": {"effects": line_chart(title, lines, across, "estimate", diagonal=True, points=True)},
        "details": every,
    }


def _claims(every: list[dict[str, Any]]) -> list[Claim]:
    def error(name: str) -> np.ndarray:
        return np.array([seed["error"][name]["mean"] for seed in every])

    wide = np.array([seed["width"][OURS] for seed in every])
    widening = np.log(wide[:, -1] / wide[:, 0]) / math.log(1 + WIDENING * DOSES[-1])
    return [
        Claim(
            "a fact observed: its effect is nearer than by prediction without the fact (added 2026-11-29)",
            "share of the error that it removes",
            0.05,
            _share(error(GIVEN), error(BLIND)),
        ),
        Claim(
            "the intervals given the fact hold what would have been (added 2026-11-29)",
            "share of 90 % intervals that hold",
            0.85,
            [float(np.mean(seed["held"][GIVEN])) for seed in every],
        ),
        Claim("knowing the fact helps", "share of the error that it removes", 0.05, _share(error(KEPT), error(FREE))),
        Claim(
            "its error is no larger than that of least squares with the residual kept",
            "error of the effect, least squares less CausalQwen",
            0.0,
            (error(ADDITIVE) - error(KEPT)).tolist(),
        ),
        Claim(
            "it says more of a person than the true average effect does",
            "share of the error that it removes",
            0.0,
            _share(error(KEPT), error(AVERAGE)),
        ),
        Claim(
            "intervals hold at doses that were not given",
            "share of 90 % intervals that hold",
            0.85,
            [float(np.mean(seed["held"][OURS])) for seed in every],
        ),
        Claim(
            "its intervals widen with the dose as the truth's do",
            "logarithm of the widening from dose 0 to 4, by the true one's",
            0.5,
            widening.tolist(),
        ),
        Claim(
            "with a scale from its errors, knowing the fact helps (added after the first figures)",
            "share of the error that it removes",
            0.05,
            _share(error(MENDED), error(FREE)),
        ),
        Claim(
            "and the error is no larger than that of least squares (added after the first figures)",
            "error of the effect, least squares less CausalQwen",
            0.0,
            (error(ADDITIVE) - error(MENDED)).tolist(),
        ),
    ]


def _tables(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def found(*keys: Any) -> str:
        values: list[Any] = every
        for key in keys:
            values = [value[key] for value in values]
        return cell(values, 2 if keys[0] in ("held", "width") else 3)

    doses = ["", *(f"dose {dose:g}" for dose in DOSES)]

    def by_dose(kind: str) -> list[list[str]]:
        return [[name, *(found(kind, name, at) for at in range(len(DOSES)))] for name in every[0][kind]]

    errors = [[name, *(found("error", name, of) for of in ("mean", "median"))] for name in every[0]["error"]]
    places = [[name, found("place", name)] for name in every[0]["place"]]
    return [
        {
            "title": f"Absolute error of a person's effect; u has a standard deviation of {SPREAD_U:g}",
            "head": ["", "mean", "median"],
            "rows": errors,
        },
        {"title": "Does the fact give the person away? Of u", "head": ["", "rank correlation"], "rows": places},
        {"title": "Share of 90 % intervals that hold y(dose), no fact given", "head": doses, "rows": by_dose("held")},
        {"title": "Mean width of the 90 % intervals", "head": doses, "rows": by_dose("width")},
    ]


def _share(error: np.ndarray, other: np.ndarray) -> list[float]:
    """The share of the other error that this one lacks."""
    return [float(share) for share in 1 - error / other]
