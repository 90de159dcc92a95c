"""Would a symmetric alpha-stable U (alpha 1: the Cauchy, 2: the normal) serve better than a Cauchy (seed S4 5.4)?

python -m experiments.stable_law --base bases/smollm2-135m --data train.jsonl
python -m experiments.stable_law --base bases/smollm2-135m --table energy.csv --table concrete.csv

Such laws are closed under linear maps: S_k has the scale (sum_c |W_kc|^alpha gamma^alpha)^(1/alpha), and P is one
function of one variable, a table. Words: on held-out tokens of GSM8K, the one-vs-rest loss and how far P of the
likeliest word is from the share that is right (ECE), with the (C, gamma) of least loss on other tokens.
Numbers: CRPS of the errors that the wide part's closed form makes on folds left out, beside `fit_law`'s laws.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from scipy.optimize import minimize
from scipy.special import gamma
from scipy.stats import levy_stable, norm
from transformers import AutoModelForCausalLM, AutoTokenizer

from cqwen_dist.config.data import column_lines
from cqwen_dist.console import quiet_libraries
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.ops.number_laws import fit_law
from cqwen_dist.prediction.table import prompts_of
from cqwen_dist.tables.rows import read_table
from experiments.wide_alone import fit_alone

ALPHAS = (1.0, 1.25, 1.5, 1.75, 2.0)
Z = np.concatenate([[0.0], np.logspace(-3, 7, 400)])  # of the table of P
BINS = 15
FAR = 30.0
SCALES = np.logspace(-4.5, 1, 45)  # of S, of the median word
THRESHOLDS = np.linspace(-6.0, 4.0, 21)
GROUPS, LOWEST, WIDTH, COUNT = 12, -40.0, 0.02, 2000  # of the histogram


def upper(alpha: float) -> np.ndarray:
    """log P(X > z) at `Z` for the standard law."""
    if alpha == 1.0:
        return np.log(np.arctan2(1.0, Z) / np.pi)
    if alpha == 2.0:
        return norm.logsf(Z, scale=math.sqrt(2))
    far = Z[FAR <= Z]
    terms = [  # of the tail's asymptotic series
        (-1) ** (k + 1) * gamma(alpha * k) / gamma(k + 1) * np.sin(np.pi * alpha * k / 2) * far ** (-alpha * k)
        for k in (1, 2, 3)
    ]
    return np.log(np.concatenate([levy_stable.sf(Z[Z < FAR], alpha, 0.0), sum(terms) / np.pi]))


class Tails:
    """log P(X > z) and log P(X < z) of a law by its table, [...] float64."""

    def __init__(self, alpha: float) -> None:
        self.axis, self.table = np.arcsinh(1e3 * Z), upper(alpha)

    def __call__(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rare = np.interp(np.arcsinh(1e3 * np.abs(z)), self.axis, self.table)
        usual = np.log1p(-np.exp(rare))
        return np.where(z > 0, rare, usual), np.where(z > 0, usual, rare)


@torch.no_grad()
def logits_of(base: str, data: Path, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log-probabilities [N,V] of the base, the next tokens [N], W [V,H])."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        AutoTokenizer.from_pretrained(base),
    )
    rows, labels = list[torch.Tensor](), list[torch.Tensor]()
    texts = data.read_text(encoding="utf-8").splitlines()
    while sum(map(len, labels)) < tokens:
        record = json.loads(texts.pop(0))
        ids = tokenizer(f"{record['question']}\n{record['answer']}", return_tensors="pt").input_ids[:, :128]
        rows.append(model(ids).logits[0, :-1].log_softmax(-1)[::4])
        labels.append(ids[0, 1:][::4])
    weight = model.lm_head.weight.double().numpy()
    return torch.cat(rows)[:tokens].double().numpy(), torch.cat(labels)[:tokens].numpy(), weight


@dataclass(frozen=True)
class Words:
    """N tokens: log-probabilities of all words as a histogram by groups of words with nearly equal norms of W_k."""

    counts: np.ndarray  # [groups, bins]
    norms: np.ndarray  # [groups]
    own_loc: np.ndarray  # [N] of the label
    own_norm: np.ndarray  # [N]

    @classmethod
    def of(cls, loc: np.ndarray, labels: np.ndarray, norms: np.ndarray) -> Words:
        order = np.argsort(norms)
        groups = np.empty(len(norms), np.int64)
        groups[order] = np.arange(len(norms)) * GROUPS // len(norms)
        bins = np.clip((loc - LOWEST) / WIDTH, 0, COUNT - 1).astype(np.int64)
        counts = np.bincount((groups * COUNT + bins).ravel(), minlength=GROUPS * COUNT).reshape(GROUPS, COUNT)
        middle = np.array([np.median(norms[groups == group]) for group in range(GROUPS)])
        return cls(counts, middle, loc[np.arange(len(loc)), labels], norms[labels])

    def loss(self, tails: Tails, c: float, size: float) -> float:
        """Mean one-vs-rest loss: -log P of the label - sum over the other words of log(1 - P)."""
        centres = LOWEST + WIDTH * (np.arange(COUNT) + 0.5)
        _, below = tails((c - centres) / (size * self.norms[:, None]))
        above, own_below = tails((c - self.own_loc) / (size * self.own_norm))
        return float((own_below - above).mean() - (self.counts * below).sum() / len(self.own_loc))


def ece(p: np.ndarray, right: np.ndarray) -> float:
    """How far P [N] is from the share that is right, on average over bins of P."""
    place = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(sum(abs(p[place == b].sum() - right[place == b].sum()) for b in range(BINS)) / len(p))


def words(base: str, data: Path, tokens: int) -> list[dict[str, float]]:
    """A row for each alpha: the C and scale of least loss, and of held-out tokens the loss, accuracy, sum of P and ECE.

    Recalibrated: P of the likeliest word with the shift and the factor that are likeliest on the other tokens, as
    `heads.intervals.WordScale`.
    """
    loc, labels, weight = logits_of(base, data, 2 * tokens)
    found = []
    for alpha in ALPHAS:
        tails, norms = Tails(alpha), (np.abs(weight) ** alpha).sum(1) ** (1 / alpha)
        fit, held = (Words.of(loc[some], labels[some], norms) for some in (slice(tokens), slice(tokens, None)))
        sizes = SCALES / np.median(norms)
        _, c, size = min((fit.loss(tails, c, size), c, size) for c in THRESHOLDS for size in sizes)
        strengths, hits, sums = [], [], []
        for some in (slice(tokens), slice(tokens, None)):
            z = (c - loc[some]) / (size * norms)
            strengths.append(z.min(1))
            hits.append(z.argmin(1) == labels[some])
            sums.append(float(np.median(np.exp(tails(z)[0]).sum(1))))

        def lost(by: np.ndarray, half: int, tails: Tails = tails, z: list[np.ndarray] = strengths) -> float:
            above, below = tails((z[half] - by[0]) / math.exp(by[1]))
            return float(-np.where(hits[half], above, below).mean())  # noqa: B023

        start = np.array([float(np.median(strengths[0])), math.log(np.std(strengths[0]) + 1e-9)])
        by = minimize(lost, start, (0,), "Nelder-Mead", options={"maxiter": 2000}).x
        shown = tails((strengths[1] - by[0]) / math.exp(by[1]))[0]
        row = {"alpha": alpha, "C": c, "scale of S": size * float(np.median(norms)), "loss": held.loss(tails, c, size)}
        row |= {"accuracy": hits[1].mean(), "sum of P": sums[1], "ECE": ece(np.exp(tails(strengths[1])[0]), hits[1])}
        row |= {"ECE recalibrated": ece(np.exp(shown), hits[1]), "log loss recalibrated": lost(by, 1)}
        found.append({key: float(f"{value:.4g}") for key, value in row.items()})
        typer.echo(json.dumps(found[-1]))
    return found


def mean_distance(alpha: float, x: np.ndarray) -> np.ndarray:
    """E|X - x| [n] of the standard law with alpha above 1: 2/pi times the integral of (1 - cos(t x) phi(t)) / t^2."""
    t = np.logspace(-6, 4, 20_001)
    inner = (1 - np.cos(np.outer(x, t)) * np.exp(-(t**alpha))) / t**2
    ends = t[0] ** (alpha - 1) / (alpha - 1) + 1 / t[-1]
    return 2 / np.pi * (np.trapezoid(inner * t, np.log(t), axis=1) + ends)


def stable_crps(alpha: float, x: np.ndarray) -> np.ndarray:
    """[n] CRPS of the standard law: E|X - x| - E|X - X'| / 2, where X - X' is 2^(1/alpha) X."""
    return mean_distance(alpha, x) - 2 ** (1 / alpha) * mean_distance(alpha, np.zeros(1)) / 2


def errors_of(base: str, table: Path, columns: tuple[int, int] = (2**18, 6144)) -> tuple[np.ndarray, ...]:
    """(errors, log scales h, folds) [n] of the wide part's closed form on all rows; the column `target` is learnt."""
    rows = read_table(str(table), "target", [], None, "")
    prompts = prompts_of(column_lines(rows.columns) + "target: ", rows.columns, rows.rows, "unknown")
    tokenizer, y, every = NumericalAwareTokenizer.from_pretrained(base), rows.values(), np.arange(len(rows.rows))
    found = fit_alone(tokenizer, tokenizer.encode_batch(prompts), y, every, every[:1], *columns)
    left = y - found.left_out[0]
    return left - np.median(left), found.left_out[1], found.folds


def numbers(base: str, tables: list[Path]) -> None:
    """By table: the mean CRPS of each alpha above 1, each fold's by the scale of least CRPS of the others."""
    axis = np.linspace(0, 60, 1201)
    curves = {alpha: stable_crps(alpha, axis) for alpha in (1.2, 1.4, 1.6, 1.8, 2.0)}

    def scored(alpha: float, scale: float, r: np.ndarray, spread: np.ndarray) -> float:
        size, curve = np.abs(r) / scale, curves[alpha]
        far = curve[-1] + size - axis[-1]
        return float((scale * spread * np.where(size < axis[-1], np.interp(size, axis, curve), far)).sum())

    for table in tables:
        error, h, folds = errors_of(base, table)
        crps = fit_law("auto", *map(torch.from_numpy, (error, h, folds))).crps
        spread, r = np.exp(h), error / np.exp(h)
        scales = np.median(np.abs(r)) * np.logspace(-0.7, 0.7, 57)
        for alpha in curves:
            total = 0.0
            for fold in np.unique(folds):
                own = folds == fold
                lost = [scored(alpha, scale, r[~own], spread[~own]) for scale in scales]
                total += scored(alpha, scales[int(np.argmin(lost))], r[own], spread[own])
            crps[f"alpha {alpha:g}"] = total / len(r)
        typer.echo(f"{table}: {json.dumps({name: float(f'{of:.4g}') for name, of in crps.items()})}")


def main(
    base: Annotated[str, typer.Option(help="A base's folder.")] = "bases/smollm2-135m",
    data: Annotated[Path | None, typer.Option(help="JSONL with GSM8K's fields.")] = None,
    table: Annotated[list[Path] | None, typer.Option(help="CSV with a column `target`; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(help="Held-out tokens, and so many for (C, gamma).")] = 256,
) -> None:
    """Words if --data is given, numbers if --table is."""
    quiet_libraries()
    if data is not None:
        words(base, data, tokens)
    numbers(base, table or [])


if __name__ == "__main__":
    typer.run(main)
