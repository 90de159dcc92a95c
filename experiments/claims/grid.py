"""How much do the causal dimension, lambda and the gate matter? (S4 5.3 (2): sensitivity to parameters; S4
4.6: the gate.)

One of them is changed at a time. Each point is calibrated and its heads are trained by the same steps on the same
texts, and then measured on held-out texts: words by argmax P, the one-vs-rest loss, numbers. A claim of sensitivity
holds for a knob if its points differ by more than a bar in the words or the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.line_chart import line_chart
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.run.files import write_atomically
from experiments.claims.measures import Claim, cell
from experiments.claims.scores import scored
from experiments.claims.subject import Ask, Positions, Training, calibrated, read, train_heads
from experiments.claims.texts import texts_of
from experiments.learn.arms import hidden_size

TITLE = "Causal dimension, lambda, gate"
DIMENSIONS: dict[str, Callable[[int], int]] = {
    "C = H/8": lambda hidden: hidden // 8,
    "C = H/4": lambda hidden: hidden // 4,
    "C = H/2": lambda hidden: hidden // 2,
    "C = H": lambda hidden: hidden,
    "C = H+8": lambda hidden: hidden + 8,
    "C = H+64": lambda hidden: hidden + 64,
}
TRAININGS = {
    "lambda 0.1": Training(reg_weight=0.1),
    "lambda 10": Training(reg_weight=10.0),
    "gate alpha 1": Training(alpha=1.0),
    "gate soft": Training(gate="soft"),
    "gate alpha 0, attached": Training(gate_grad="full"),
}
USUAL = "C = H"  # with lambda 1, gate alpha 0, stopped
KNOBS = {
    "the causal dimension": list(DIMENSIONS),
    "lambda": ["lambda 0.1", USUAL, "lambda 10"],
    "the gate": [USUAL, "gate alpha 1", "gate soft", "gate alpha 0, attached"],
}
BARS = {"words right": 0.02, "numbers, CRPS": 0.05}  # two points of top-1; a twentieth of the numbers' unit


def of_seed(ask: Ask) -> dict[str, Any]:
    """The measures of every point, of one seed; each is read from `out` where it was made before. Raises
    `UserError`."""
    texts, hidden = texts_of(ask.out / "data", ask.data, ask.size, ask.seed, ask.seeds), hidden_size(ask.base)
    found: dict[str, Any] = {}
    seen: dict[str, Positions] = {}
    for name in (*DIMENSIONS, *TRAININGS):
        path = ask.out / "grid" / f"seed-{ask.seed}-of-{ask.seeds}-{name.replace('/', ' by ')}.json"
        if not path.is_file():
            ask.say(f"seed {ask.seed}: {name}")
            shape = {"causal_size": DIMENSIONS.get(name, DIMENSIONS[USUAL])(hidden)}
            model, tokenizer = calibrated(ask.base, texts["train"], ask.seed, ask.size.calibration, **shape)
            if not seen:  # neither the backbone nor the embedding differs between points
                seen = {kind: read(model.model, texts[kind], tokenizer) for kind in ("train", "held out")}
            training = TRAININGS.get(name, Training())
            train_heads(model.model, seen["train"], ask.size.grid_steps, ask.size.step_tokens, ask.seed, training)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(measured(model.model, seen["held out"])))
        found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


@torch.no_grad()
def measured(model: Any, seen: Positions) -> dict[str, float]:
    """Words right, error of calibration, F1 of <NUM>, and of numbers CRPS (the target's unit) and coverage at 90 %."""
    found = scored(model, seen)
    number = found["is_number"] == 1
    num = int(model.config.num_token_id)
    told, is_num = found["best"] == num, found["label"] == num
    error = np.abs(found["goal"] - found["y_loc"])[number]
    return {
        "words right": float((found["best"] == found["label"])[~number].mean()),
        "surprise of P": float(-np.log(found["p_label"] / found["p_sum"])[~number].mean()),
        "F1 of <NUM>": float(2 * (told & is_num).sum() / max((told.sum() + is_num.sum()), 1)),
        "numbers, CRPS": float(found["crps"][number].mean()),
        "numbers, median error": float(np.median(error)),
        "coverage": float((error <= Cauchy.half_width(0.9) * found["y_scale"][number]).mean()),
    }


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Claims, tables and pictures from the measures of all seeds."""
    claims = []
    for knob, points in KNOBS.items():
        for measure, bar in BARS.items():
            spread = [float(np.ptp([seed[point][measure] for point in points])) for seed in every]
            claims.append(Claim(f"{knob} matters", f"{measure}, largest difference", bar, spread).judged())
    measures = list(every[0][USUAL])
    rows = [[name, *(cell([seed[name][m] for seed in every]) for m in measures)] for name in every[0]]

    def mean(name: str, measure: str) -> float:
        return float(np.mean([seed[name][measure] for seed in every]))

    drawn = ("words right", "F1 of <NUM>", "coverage")
    lines = {measure: [(float(i), mean(name, measure)) for i, name in enumerate(every[0])] for measure in drawn}
    chart = line_chart("By point, in the table's order", lines, "point", "", points=True)
    return {
        "claims": claims,
        "tables": [{"title": "Held-out words and numbers", "head": ["", *measures], "rows": rows}],
        "pictures": {"points": chart},
        "details": every,
    }
