"""What `cqwen bench learn` measures on held-out texts: words told right, numbers told, intervals that hold them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cqwen_dist.batch import Batch
from cqwen_dist.bench.learn_data import Item
from cqwen_dist.config import DataConfig, NumberPolicy
from cqwen_dist.data.collate import Document, collate
from cqwen_dist.data.dataset import tokenise
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.sources import ReadReport, read_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.train.evaluation.conformal import for_calibration, half_width, interval_factors

ROWS = 16  # texts a batch
LEVEL = 0.9


class Told(NamedTuple):
    """Numbers behind the prompts and what a model says of them; all [M] float64, texts [M] int."""

    texts: np.ndarray  # which text a number stands in
    truth: np.ndarray
    told: np.ndarray  # the median of Y, raw unit
    scores: np.ndarray  # |target - loc| / scale, in the target's unit
    crps: np.ndarray = np.zeros(0)  # raw unit; nan where the target's unit is not linear


def to_tell(items: list[Item], tokenizer: NumericalAwareTokenizer) -> list[Batch]:
    """Batches of ROWS whole texts; the numbers to tell are those behind the prompts."""
    end = tokenizer.eos_token_id
    assert end is not None
    documents = []
    given = tokenizer.encode_batch([item.prompt for item in items])
    for encoded, prompt in zip(tokenizer.encode_batch([item.text for item in items]), given, strict=True):
        ids = np.array([*encoded.ids, end])
        targets = ids == tokenizer.num_token_id
        targets &= np.cumsum(targets) > prompt.ids.count(tokenizer.num_token_id)
        values = np.array([*encoded.values, 0.0])
        documents.append(Document(ids, values, targets))
    return whole_texts(documents, tokenizer, ROWS)


def whole_texts(documents: list[Document], tokenizer: NumericalAwareTokenizer, rows: int) -> list[Batch]:
    """Batches of so many documents, a row each."""
    return [
        collate(
            [(document,) for document in documents[at : at + rows]],
            pad_token_id=tokenizer.pad_token_id,
            num_token_id=tokenizer.num_token_id,
        )
        for at in range(0, len(documents), rows)
    ]


def numbers_to_tell(items: list[Item], policy: NumberPolicy) -> list[tuple[int, int, float, bool]]:
    """(text, place in it, value, whether an equal number stands before it) of every number behind a prompt."""
    found = []
    for text, item in enumerate(items):
        seen: set[float] = set()
        for start, _, value in find_numbers(item.text, policy):
            if math.isinf(value):
                continue  # stays text
            if start >= len(item.prompt) and start > 0:  # nothing tells a number that opens a text
                found.append((text, start, value, value in seen))
            seen.add(value)
    return found


def spread(count: int, most: int | None) -> np.ndarray:
    """Which of `count` numbers are told, at most so many: evenly over all texts; ascending places."""
    if most is None or count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).astype(np.int64)


def pieces(path: Path, tokenizer: NumericalAwareTokenizer, config: DataConfig) -> list[Batch]:
    """A file's texts as a run's own evaluation reads them: every token once, long texts cut into pieces."""
    texts = list(read_texts(str(path), config, ReadReport()))
    return list(EvalLoader(tokenise(texts, tokenizer, config), rank=0, world=1, micro_batch_size=ROWS))


@torch.no_grad()
def tell(model: CausalQwenModel, batches: list[Batch]) -> Told:
    """Y at every number to tell, the text before it given."""
    device = model.action.cls_weight.device
    parts: list[Told] = []
    for number, batch in enumerate(batches):
        flat = batch.numeric_mask.flatten().nonzero()[:, 0]
        there, keep = batch.to(device), flat.to(device)
        u_prime = model.action.add_noise(model.abduction(model.kept_features(there, keep)))
        y = model.action.value(Cauchy(u_prime.loc, u_prime.scale))
        truth = batch.numeric_labels.flatten()[flat]
        goal = model.target.forward(truth).to(device)
        parts.append(
            Told(
                (flat // batch.labels.shape[1] + number * ROWS).numpy(),
                truth.numpy(),
                model.target.inverse(y.loc).cpu().numpy(),
                ((goal - y.loc).abs() / y.scale).double().cpu().numpy(),
                _crps(model, y, goal).double().cpu().numpy(),
            )
        )
    return Told(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _crps(model: CausalQwenModel, y: Cauchy, goal: torch.Tensor) -> torch.Tensor:
    crps = y.crps(goal)
    return model.target.inverse_scale(crps) if model.target.linear else torch.full_like(crps, math.nan)


def errors(truth: np.ndarray, told: np.ndarray, median: float, repeated: np.ndarray) -> dict[str, float]:
    """Errors [M] in the raw unit beside always the median's; of numbers that repeat an earlier one, and of new ones."""
    error = np.abs(told - truth)
    figures = {
        "numbers": len(error),
        "mdae": float(np.median(error)),
        "mae": float(np.mean(error)),
        "relative": float(np.median(error / np.maximum(np.abs(truth), 1e-9))),
        "exact": float(np.mean(np.round(told, 2) == np.round(truth, 2))),
        "median_mdae": float(np.median(np.abs(median - truth))),
        "median_mae": float(np.mean(np.abs(median - truth))),
    }
    for name, part in (("repeated", error[repeated]), ("new", error[~repeated])):
        if len(part):
            figures[f"mdae_{name}"] = float(np.median(part))
    return figures


def intervals(told: Told) -> dict[str, Any]:
    """The LEVEL interval's coverage, raw and split-conformal.

    Half of the texts give the conformal factor; the coverage of both kinds of interval is that of the other half,
    beside the central 99 % interval of a binomial law of LEVEL and as many numbers.
    """
    calibrates = for_calibration(told.texts)
    scores = told.scores[~calibrates]
    factor = interval_factors(told.scores[calibrates], (LEVEL,)).levels.get(f"{LEVEL:g}", math.nan)
    low, high = binomial_interval(len(scores), LEVEL)
    return {
        "coverage_raw": float(np.mean(scores <= half_width(LEVEL))),
        "coverage_conformal": float(np.mean(scores <= half_width(LEVEL) * factor)),
        "factor": factor,
        "measured": len(scores),
        "binomial": [low, high],
    }


def binomial_interval(n: int, p: float, level: float = 0.99) -> tuple[float, float]:
    """The central `level` interval of the share of n draws that come true with probability p, from exact sums."""
    if n == 0:
        return 0.0, 1.0
    k = np.arange(n + 1)
    log = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    cumulative = np.cumsum(np.exp(log + k * math.log(p) + (n - k) * math.log1p(-p)))
    tail = (1 - level) / 2
    return float(np.searchsorted(cumulative, tail)) / n, float(np.searchsorted(cumulative, 1 - tail)) / n
