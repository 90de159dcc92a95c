"""Can P be a probability as the vocabulary grows? One-vs-rest at its best scale, over parts of the base's words.

A part contains every word that occurs as a label, and others drawn at random. On half of the positions, one scale s and
one threshold C for all words are fitted by the lowest one-vs-rest loss (S3 2.5.1); the chosen word's P is judged on the
other half, and the halves change places. So the loss itself chooses how wide P is. Once with the seeds' Cauchy,
P = 1/2 + atan((loc - C) / s) / pi, and once with a law of light tails, the logistic one, P = sigmoid((loc - C) / s).
Softmax needs no fit.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from benchmarks.line_chart import line_chart
from cqwen_dist.ops.products import product
from cqwen_dist.run.files import write_atomically
from experiments.claims.measures import Claim, calibration_error, cell
from experiments.claims.subject import Ask, calibrated, read
from experiments.claims.texts import texts_of

PARTS = {"V/64": 64, "V/16": 16, "V/4": 4, "V": 1}
MOST = 800  # positions: loc is [MOST,V] float32
MEASURES = ("scale", "sum of P", "ECE", "Brier")
LAWS = ("Cauchy", "logistic")
NEAR = -0.02  # of the error of calibration: so little worse counts as equal
Found = dict[str, dict[str, float]]


def of_seed(ask: Ask) -> dict[str, Found]:
    """The measures of every part by its name, of one seed. Raises `UserError`."""
    path = ask.out / "growth" / f"seed-{ask.seed}-of-{ask.seeds}.json"
    if not path.is_file():
        ask.say(f"seed {ask.seed}: parts of the vocabulary")
        loc, labels = _scores(ask)
        found = {}
        for name, part in PARTS.items():
            words = _words(labels, loc.shape[1], loc.shape[1] // part, ask.seed)
            found[name] = judged(loc[:, words], torch.searchsorted(words, labels))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found))
    return dict(json.loads(path.read_text(encoding="utf-8")))


@torch.no_grad()
def _scores(ask: Ask) -> tuple[Tensor, Tensor]:
    """loc_S [N,V] and labels [N] of held-out words at the calibrated start."""
    texts = texts_of(ask.out / "data", ask.data, ask.size, ask.seed, ask.seeds)
    model, tokenizer = calibrated(ask.base, texts["train"], ask.seed, ask.size.calibration)
    seen = read(model.model, texts["held out"], tokenizer)
    words = (~seen.is_number).nonzero()[:, 0]
    at = words[torch.linspace(0, len(words) - 1, min(MOST, len(words))).long()]
    action = model.model.action
    head = action.word_head(int(model.model.config.used_rows))
    loc = product(action.word_part(model.model.abduction(seen.z[at])).loc, head.take(slice(0, head.rows)).weight)
    return loc + action.cls_bias[: head.rows], seen.labels[at]


def _words(labels: Tensor, every: int, count: int, seed: int) -> Tensor:
    """`count` of `every` words or more, ascending: those of the labels, and others at random."""
    needed = labels.unique()
    order = torch.randperm(every, generator=torch.Generator().manual_seed(seed)).to(labels.device)
    others = order[~torch.isin(order, needed)][: max(count - len(needed), 0)]
    return torch.cat([needed, others]).sort().values


def judged(loc: Tensor, labels: Tensor) -> Found:
    """Measures by law: the chosen word's error of calibration and Brier score, the sum of P (median), the fitted scale
    in units of loc. loc [N,V] float32, labels [N] int64."""
    first = torch.arange(len(labels)) % 2 == 0
    right = (loc.argmax(1) == labels).cpu().numpy()
    soft = loc.softmax(1).max(1).values.double().cpu().numpy()
    found = {"softmax": {"ECE": calibration_error(soft, right), "Brier": float(np.mean((soft - right) ** 2))}}
    for law in LAWS:
        p, total, scales = np.zeros(len(labels)), np.zeros(len(labels)), []
        for half in (first, ~first):
            scale, threshold = fitted(loc[~half], labels[~half], law)
            own = prob(loc[half], scale, threshold, law)
            p[half], total[half] = own.max(1).values.double().cpu().numpy(), own.sum(1).double().cpu().numpy()
            scales.append(scale)
        found[law] = {
            "ECE": calibration_error(p, right),
            "Brier": float(np.mean((p - right) ** 2)),
            "sum of P": float(np.median(total)),
            "scale": float(np.mean(scales)),
        }
    return found


def prob(loc: Tensor, scale: float, threshold: float, law: str) -> Tensor:
    """P [N,V] of words whose score has its median at loc."""
    x = (loc - threshold) / scale
    return torch.sigmoid(x) if law == "logistic" else torch.atan2(torch.ones(()), -x) / math.pi


def log_prob(x: Tensor, law: str) -> Tensor:
    """log P of a score x scales above the threshold; log (1 - P) is that of -x."""
    if law == "logistic":
        return torch.nn.functional.logsigmoid(x)
    one = torch.ones(())
    return torch.where(x > 0, torch.log1p(-torch.atan2(one, x) / math.pi), torch.log(torch.atan2(one, -x) / math.pi))


def mean_loss(loc: Tensor, labels: Tensor, scale: float, threshold: float, law: str) -> float:
    """The one-vs-rest loss of a position, in nats: the sum over words of the binary cross entropy of P, its mean."""
    x = (loc - threshold) / scale
    own = x.gather(1, labels.unsqueeze(1))[:, 0]
    return float((log_prob(-own, law) - log_prob(own, law) - log_prob(-x, law).sum(1)).double().mean())


def fitted(loc: Tensor, labels: Tensor, law: str) -> tuple[float, float]:
    """(scale, threshold) of the lowest loss."""
    top = float(loc.max(1).values.median())

    def loss(at: np.ndarray) -> float:
        return mean_loss(loc, labels, math.exp(at[0]), float(at[1]), law)

    tried = [np.array([math.log(scale), top - below]) for scale in (1e-3, 1e-1, 1.0) for below in (0.0, 2.0)]
    begin = min(tried, key=loss)
    best = minimize(loss, begin, method="Nelder-Mead", options={"maxfev": 60, "xatol": 0.02, "fatol": 1e-3}).x
    return math.exp(best[0]), float(best[1])


def claims(every: list[dict[str, Found]]) -> list[Claim]:
    """The claims on growth from the measures of all seeds."""
    small, whole = ([seed[part] for seed in every] for part in ("V/64", "V"))
    return [
        Claim(
            "P stays calibrated as the vocabulary grows",
            "ECE, few words less all",
            NEAR,
            [a["Cauchy"]["ECE"] - b["Cauchy"]["ECE"] for a, b in zip(small, whole, strict=True)],
        ),
        Claim(
            "with few words P is calibrated as softmax is",
            "ECE, softmax less P",
            NEAR,
            [a["softmax"]["ECE"] - a["Cauchy"]["ECE"] for a in small],
        ),
        Claim(
            "a law of light tails mends P over all words",
            "ECE, softmax less logistic P",
            NEAR,
            [b["softmax"]["ECE"] - b["logistic"]["ECE"] for b in whole],
        ),
    ]


def table(every: list[dict[str, Found]]) -> dict[str, Any]:
    """The measures by part and law."""
    rows = []
    for part in PARTS:
        for law, own in every[0][part].items():
            rows.append([part, law, *(_cell(every, part, law, m) if m in own else "" for m in MEASURES)])
    return {
        "title": "Parts of the vocabulary, at the scale of the lowest loss",
        "head": ["words", "", *MEASURES],
        "rows": rows,
    }


def _cell(every: list[dict[str, Found]], part: str, law: str, measure: str) -> str:
    return cell([seed[part][law][measure] for seed in every], 4)


def picture(every: list[dict[str, Found]]) -> str:
    """The error of calibration by the part of the vocabulary."""
    lines = {
        law: [
            (-math.log2(share), float(np.mean([seed[part][law]["ECE"] for seed in every])))
            for part, share in PARTS.items()
        ]
        for law in every[0]["V"]
    }
    return line_chart("Calibration by the vocabulary", lines, "log2 of the share of words", "ECE", points=True)
