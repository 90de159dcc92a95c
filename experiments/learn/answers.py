"""A model's predictions of the numbers that follow the prompts of held-out texts, and their errors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from cqwen_dist.batch import Batch
from cqwen_dist.config import NumberPolicy
from cqwen_dist.data.collate import collate
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.store import Document
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from experiments.learn.corpora import Item

ROWS = 16  # texts in a batch
LEVEL = 0.9


class Predictions(NamedTuple):
    """The numbers after the prompts and a model's predictions; all [M] float64."""

    truth: np.ndarray
    predicted: np.ndarray  # the median of Y, raw unit
    scores: np.ndarray  # |target - loc| / scale, in the target's unit
    crps: np.ndarray  # raw unit; NaN where the target's unit is not linear


def answer_batches(items: list[Item], tokenizer: NumericalAwareTokenizer) -> list[Batch]:
    """Batches of ROWS whole texts; the numbers after the prompts are to be predicted."""
    documents = []
    given = tokenizer.encode_batch([item.prompt for item in items])
    for encoded, prompt in zip(tokenizer.encode_batch([item.text for item in items]), given, strict=True):
        ids = np.array([*encoded.ids, tokenizer.eos_token_id])
        targets = ids == tokenizer.num_token_id
        targets &= np.cumsum(targets) > prompt.ids.count(tokenizer.num_token_id)
        values = np.array([*encoded.values, 0.0])
        documents.append(Document(ids, values, targets))
    return whole_texts(documents, tokenizer, ROWS)


def whole_texts(documents: list[Document], tokenizer: NumericalAwareTokenizer, rows: int) -> list[Batch]:
    """Batches of `rows` documents, one per row."""
    return [
        collate(
            [(document,) for document in documents[at : at + rows]],
            pad_token_id=tokenizer.pad_token_id,
            num_token_id=tokenizer.num_token_id,
        )
        for at in range(0, len(documents), rows)
    ]


def numbers_after_prompts(items: list[Item], policy: NumberPolicy) -> list[tuple[int, int, float, bool]]:
    """(text, character, value, whether an equal number precedes it) of every number after a prompt."""
    found = []
    for text, item in enumerate(items):
        seen: set[float] = set()
        for start, _, value in find_numbers(item.text, policy):
            if math.isinf(value):
                continue  # the tokenizer leaves it as text
            if start >= len(item.prompt) and start > 0:  # a number that opens a text has no context
                found.append((text, start, value, value in seen))
            seen.add(value)
    return found


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` indices below `count`, evenly spaced and ascending."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


@torch.no_grad()
def predict(model: CausalQwenModel, batches: list[Batch]) -> Predictions:
    """Predict every number of the batches from the text before it."""
    device = model.action.cls_weight.device
    parts: list[Predictions] = []
    for batch in batches:
        flat = batch.number_places
        on_device, positions = batch.to(device), flat.to(device)
        u_prime = model.action.add_noise(model.abduction(model.kept_features(on_device, positions)))
        y = model.action.number_head.value(Cauchy(u_prime.loc, u_prime.scale))
        truth = batch.numeric_labels.flatten()[flat]
        goal = model.target.forward(truth).to(device)
        parts.append(
            Predictions(
                truth.numpy(),
                model.target.inverse(y.loc).cpu().numpy(),
                ((goal - y.loc).abs() / y.scale).double().cpu().numpy(),
                _crps(model, y, goal).double().cpu().numpy(),
            )
        )
    return Predictions(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _crps(model: CausalQwenModel, y: Cauchy, goal: torch.Tensor) -> torch.Tensor:
    crps = y.crps(goal)
    return model.target.inverse_scale(crps) if model.target.linear else torch.full_like(crps, math.nan)


def errors(truth: np.ndarray, predicted: np.ndarray, median: float, repeated: np.ndarray) -> dict[str, float]:
    """Errors of predicted [M] and of the constant `median`, in the raw unit; also by repeated and new numbers."""
    error, always = np.abs(predicted - truth), np.abs(median - truth)
    metrics = {
        "numbers": len(error),
        "mdae": float(np.median(error)),
        "mae": float(np.mean(error)),
        "exact": float(np.mean(np.round(predicted, 2) == np.round(truth, 2))),
        "median_mdae": float(np.median(always)),
        "median_mae": float(np.mean(always)),
    }
    for name, part in (("repeated", error[repeated]), ("new", error[~repeated])):
        if len(part):
            metrics[f"mdae_{name}"] = float(np.median(part))
    return metrics


def number_metrics(found: Predictions, median: float, repeated: np.ndarray) -> dict[str, Any]:
    """`errors`, the mean CRPS where it is known, and the coverage of the model's own LEVEL interval."""
    metrics: dict[str, Any] = {
        **errors(found.truth, found.predicted, median, repeated),
        "coverage": float(np.mean(found.scores <= Cauchy.half_width(LEVEL))),
    }
    if np.isfinite(found.crps).all():
        metrics["crps"] = float(np.mean(found.crps))
    return metrics
