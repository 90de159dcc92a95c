"""What is forgotten, by what trains, how fast, and under a limit of the KL (S3 2.3)?

Forgotten: how much the surprise of English prose and Python code, which no training saw, rises over the start. The
groups of the heads learn one at a time, and all of them at one, three and ten times the usual rates, on features that
were read once. LoRA learns by the package's own trainer, at two rates and with the KL of U held.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.line_chart import line_chart
from cqwen_dist.config.training import HEADS
from experiments.claims.measures import Claim, cell
from experiments.claims.subject import Ask, Training
from experiments.claims.trainings import LORA_LR, OTHERS, START, LoraArm, Measures, heads_arms, lora_arms

TITLE = "Forgetting"
GROUPS = {f"{group} alone": Training(groups=(group,)) for group in HEADS if group != "noise"}
RATES = {"all heads": Training(), "all heads, 3 times": Training(rate=3.0), "all heads, 10 times": Training(rate=10.0)}
EPS = 0.1  # nats, of U's KL
PLAIN, HELD, FAST = "heads, then LoRA", "heads, then LoRA, KL held", "heads, then LoRA, 3 times the rate"
LORA_ARMS = {PLAIN: LoraArm(), HELD: LoraArm(kl=EPS), FAST: LoraArm(rate=3 * LORA_LR)}
COST = -0.02  # nats: so little more surprise on its own texts counts as nothing


def of_seed(ask: Ask) -> dict[str, Measures]:
    """The measures of every training, of one seed. Raises `UserError`."""
    arms = {name: [(training, ask.size.grid_steps)] for name, training in {**GROUPS, **RATES}.items()}
    return {**heads_arms(ask, arms), **lora_arms(ask, LORA_ARMS)}


def summary(every: list[dict[str, Measures]]) -> dict[str, Any]:
    """Claims, tables and pictures from the measures of all seeds."""
    start = {name: START if name in LORA_ARMS else "start" for name in every[0]}

    def of(name: str, measure: str, kind: str = "held out") -> np.ndarray:
        return np.array([seed[name][kind][measure] for seed in every])

    def risen(name: str, *kinds: str) -> np.ndarray:
        return np.mean([of(name, "surprise", kind) - of(start[name], "surprise", kind) for kind in kinds], 0)

    lost = {name: risen(name, *OTHERS) for name in (*GROUPS, *RATES, *LORA_ARMS)}
    classifier, *rest = [lost[f"{group} alone"] for group in ("classifier", "abduction", "regression", "thresholds")]
    usual, fast, rise = lost["all heads"], lost["all heads, 10 times"], "risen surprise (nats)"
    less = "risen surprise, difference"
    cost = of(PLAIN, "surprise") - of(HELD, "surprise")
    claims = [
        Claim("training the heads forgets other texts", rise, 0.0, list(usual)),
        Claim("of the groups, the classifier forgets most", less, 0.0, list(classifier - np.max(rest, 0))),
        Claim("a tenfold rate forgets more", less, 0.0, list(fast - usual)),
        Claim("LoRA forgets other texts", rise, 0.0, list(lost[PLAIN])),
        Claim("LoRA at three times the rate forgets more", less, 0.0, list(lost[FAST] - lost[PLAIN])),
        Claim("a limit of the KL lowers what LoRA forgets", less, 0.0, list(lost[PLAIN] - lost[HELD])),
        Claim("and costs nothing on its own texts", "surprise, without less with", COST, list(cost)),
    ]
    table = []
    for name in lost:
        right = of(name, "words right") - of(start[name], "words right")
        columns = (risen(name, "held out"), *(risen(name, kind) for kind in OTHERS), right)
        table.append([name, *(cell(list(column)) for column in columns)])
    lines = {name: list(zip(risen(name, "held out"), lost[name], strict=True)) for name in lost}
    return {
        "claims": [claim.judged() for claim in claims],
        "tables": [
            {
                "title": "Surprise of softmax(loc_S) over the start, in nats a word; words right by argmax P",
                "head": ["", "own texts", *OTHERS, "own words right, risen"],
                "rows": table,
            }
        ],
        "pictures": {
            "kept": line_chart("Learnt and forgotten", lines, "own texts: risen surprise", "prose, code", joined=False)
        },
        "details": every,
    }
