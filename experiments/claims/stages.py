"""Should words lead and numbers follow (S4 4.3.1, 4.4.1), and the heads come before LoRA?

The heads learn words first, numbers first, or both together, in as many steps of as many positions, on features that
were read once. Heads and LoRA learn in two stages or from the first step on, on the same texts, by the package's own
trainer. The seed's mechanism is tried too: is P of <NUM>, which weighs the numbers' loss, small at first?
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.line_chart import line_chart
from experiments.claims.measures import Claim, cell
from experiments.claims.subject import Ask, Training
from experiments.claims.trainings import OTHERS, START, LoraArm, Measures, heads_arms, lora_arms

TITLE = "Words first, heads first"
WORDS, NUMBERS = Training(reg_weight=0.0), Training(cls_weight=0.0)
WORDS_FIRST, TOGETHER, NUMBERS_FIRST = "words, then numbers", "words and numbers together", "numbers, then words"
THEN_BOTH = "words, then both"
HEADS_FIRST, AT_ONCE = "heads, then LoRA", "LoRA from the first step"
LORA_ARMS = {HEADS_FIRST: LoraArm(), AT_ONCE: LoraArm(heads_first=False)}


def of_seed(ask: Ask) -> dict[str, Measures]:
    """The measures of every order, of one seed. Raises `UserError`."""
    half = max(ask.size.grid_steps // 2, 1)
    orders = {
        WORDS_FIRST: [(WORDS, half), (NUMBERS, half)],
        TOGETHER: [(Training(), 2 * half)],
        NUMBERS_FIRST: [(NUMBERS, half), (WORDS, half)],
        THEN_BOTH: [(WORDS, half), (Training(), half)],
    }
    return {**heads_arms(ask, orders), **lora_arms(ask, LORA_ARMS)}


def summary(every: list[dict[str, Measures]]) -> dict[str, Any]:
    """Claims, tables and pictures from the measures of all seeds."""

    of = partial(_of, every)
    others = {name: np.mean([of(name, "surprise", kind) for kind in OTHERS], 0) for name in LORA_ARMS}
    heads = [name for name in every[0] if name not in (START, *LORA_ARMS)]
    measures = list(every[0]["start"]["held out"])
    lora = ("words right", "surprise", "CRPS", "median error")
    return {
        "claims": [claim.judged() for claim in _claims(every, others)],
        "tables": [
            {
                "title": "The heads, at equal positions; CRPS and errors in half the numbers' quartile distance",
                "head": ["", *measures],
                "rows": [[name, *(cell(list(of(name, m))) for m in measures)] for name in heads],
            },
            {
                "title": "Heads and LoRA; CRPS and errors in the numbers' unit, surprise in nats",
                "head": ["", *lora, "surprise of prose and code"],
                "rows": [[n, *(cell(list(of(n, m))) for m in lora), cell(list(others[n]))] for n in LORA_ARMS],
            },
        ],
        "pictures": {"orders": _picture(every, [name for name in heads if name != "start"])},
        "details": every,
    }


def _of(every: list[dict[str, Measures]], name: str, measure: str, kind: str = "held out") -> np.ndarray:
    """A measure of a training, of every seed."""
    return np.array([seed[name][kind][measure] for seed in every])


def _claims(every: list[dict[str, Measures]], others: dict[str, np.ndarray]) -> list[Claim]:
    """others: the surprise of prose and code."""
    of = partial(_of, every)

    def claim(text: str, of_what: str, worse: np.ndarray, better: np.ndarray) -> Claim:
        return Claim(text, of_what, 0.0, list(worse - better))

    crps = {name: of(name, "CRPS") for name in every[0] if name != START}
    right = {name: of(name, "words right") for name in crps}
    half, surprise = np.full(len(every), 0.5), {name: of(name, "surprise") for name in LORA_ARMS}
    return [
        claim("P of <NUM> is small at the start", "1/2 less P at numbers", half, of("start", "P of <NUM>")),
        claim("words first helps numbers", "CRPS, together less so", crps[TOGETHER], crps[WORDS_FIRST]),
        claim("words first helps words", "words right, so less together", right[WORDS_FIRST], right[TOGETHER]),
        claim("words before numbers, not after", "CRPS, after less before", crps[NUMBERS_FIRST], crps[WORDS_FIRST]),
        claim("words, then both, helps numbers", "CRPS, together less so", crps[TOGETHER], crps[THEN_BOTH]),
        claim("heads before LoRA helps words", "surprise, at once less so", surprise[AT_ONCE], surprise[HEADS_FIRST]),
        claim("heads before LoRA helps numbers", "CRPS, at once less so", crps[AT_ONCE], crps[HEADS_FIRST]),
        claim(
            "heads before LoRA forgets less",
            "surprise of prose and code, at once less so",
            others[AT_ONCE],
            others[HEADS_FIRST],
        ),
    ]


def _picture(every: list[dict[str, Measures]], names: list[str]) -> str:
    """How far CRPS and surprise fall from the start, a point a seed."""
    lines = {}
    for name in names:
        pairs = [(seed["start"]["held out"], seed[name]["held out"]) for seed in every]
        lines[name] = [(a["CRPS"] - b["CRPS"], a["surprise"] - b["surprise"]) for a, b in pairs]
    return line_chart("What each order learns", lines, "CRPS, fallen", "surprise, fallen", joined=False)
