"""Heads on the base's features that a benchmark compares: squared error, quantiles, and digits one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cqwen_dist.generate.continuation import padded

RATES = (1e-4, 1e-3, 1e-2)
HIDDEN, BATCH, EPOCHS = 256, 64, 50
DIGITS, SAMPLES = 3, 64  # of a value between the least and the greatest; as regress-lm samples

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (head, x [n,H], its targets [n]) -> scalar


class Examples(NamedTuple):
    """x [n,H] of all rows, standardised; their values [n]; the rows to learn from, and to choose rate and epoch by."""

    x: Tensor
    y: np.ndarray
    train: np.ndarray
    valid: np.ndarray

    @classmethod
    def of(cls, z: Tensor, y: np.ndarray, train: np.ndarray, valid: np.ndarray) -> Examples:
        """z [n,H] fp32."""
        return cls((z - z[train].mean(0)) / z[train].std(0).clamp(min=1e-6), y, train, valid)


def features_of(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Tensor:
    """z [n,H] fp32 on the CPU at the last token of each prompt."""
    rows = [tokenizer.encode(prompt)[:2] for prompt in prompts]
    batches = (padded(model, tokenizer, rows[at : at + 32]) for at in range(0, len(rows), 32))
    with torch.inference_mode():
        return torch.cat([model.model.features(*batch)[:, -1].float().cpu() for batch in batches])


def mean_head(rows: Examples) -> tuple[np.ndarray, float]:
    """(Means [n], by squared error; its root mean square on the rows `valid`, before these are learnt from)."""

    def loss(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(head(x)[:, 0], y)

    goal, centre, unit = _standardised(rows)
    head, lost = _best(rows, goal, 0, 1, loss)
    return np.asarray(head(rows.x)[:, 0].double().numpy() * unit + centre), math.sqrt(lost) * unit


def quantile_head(rows: Examples, levels: Sequence[float]) -> np.ndarray:
    """Quantiles [n,levels], ascending, by the pinball loss."""
    at = torch.tensor(levels)

    def loss(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        error = y[:, None] - head(x)
        return torch.maximum(at * error, (at - 1) * error).mean()

    goal, centre, unit = _standardised(rows)
    head, _ = _best(rows, goal, 0, len(levels), loss)
    return np.sort(head(rows.x).double().numpy() * unit + centre, 1)


def digit_head(rows: Examples, levels: Sequence[float]) -> np.ndarray:
    """Quantiles [n,levels] of values sampled digit by digit (Song and Bahri 2025, "Decoding-based Regression").

    A value between the least and the greatest is written by `DIGITS` decimal digits. The head reads x and the digits
    before this one; later digits are -1.
    """
    low, high = float(rows.y[rows.train].min()), float(rows.y[rows.train].max())
    most = 10**DIGITS - 1
    goal = torch.from_numpy((rows.y - low) / max(high - low, 1e-12) * most).round().clamp(0, most).long()

    def digit(value: Tensor, place: int) -> Tensor:
        return value // 10 ** (DIGITS - 1 - place) % 10

    def logits(head: nn.Module, x: Tensor, value: Tensor, place: int) -> Tensor:
        before = [digit(value, i) if i < place else torch.full_like(value, -1) for i in range(DIGITS)]
        written = torch.cat([F.one_hot(one + 1, 11) for one in before], -1)
        return head(torch.cat([x, written.to(x.dtype)], -1))

    def loss(head: nn.Module, x: Tensor, value: Tensor) -> Tensor:
        return torch.stack(
            [F.cross_entropy(logits(head, x, value, place), digit(value, place)) for place in range(DIGITS)]
        ).mean()

    head, _ = _best(rows, goal, 11 * DIGITS, 10, loss)
    draw = torch.Generator().manual_seed(0)
    sampled = []
    for _ in range(SAMPLES):
        value = torch.zeros(len(rows.y), dtype=torch.int64)
        for place in range(DIGITS):
            law = logits(head, rows.x, value, place).softmax(-1)
            value += torch.multinomial(law, 1, generator=draw)[:, 0] * 10 ** (DIGITS - 1 - place)
        sampled.append(value.numpy() / most * (high - low) + low)
    return np.quantile(np.stack(sampled), levels, axis=0).T


def _standardised(rows: Examples) -> tuple[Tensor, float, float]:
    """(Values by mean and standard deviation of the rows to learn from, fp32; these two)."""
    centre, unit = float(rows.y[rows.train].mean()), float(rows.y[rows.train].std()) or 1.0
    return torch.from_numpy((rows.y - centre) / unit).float(), centre, unit


def _best(rows: Examples, goal: Tensor, further: int, outputs: int, loss: Loss) -> tuple[nn.Module, float]:
    """Two layers on x and `further` other inputs, without gradients, and their loss on the rows `valid`.

    Rate and number of epochs have the least such loss; then these rows are learnt from too.
    """

    def epochs(rate: float, learnt: np.ndarray) -> Iterator[nn.Module]:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(rows.x.shape[1] + further, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, outputs))
        optimizer = torch.optim.AdamW(head.parameters(), lr=rate)
        for _ in range(EPOCHS):
            for some in torch.from_numpy(learnt)[torch.randperm(len(learnt))].split(BATCH):
                optimizer.zero_grad()
                loss(head, rows.x[some], goal[some]).backward()
                optimizer.step()
            yield head

    best = (math.inf, 0.0, 0)
    for rate in RATES:
        for epoch, head in enumerate(epochs(rate, rows.train)):
            with torch.no_grad():
                best = min(best, (float(loss(head, rows.x[rows.valid], goal[rows.valid])), rate, epoch))
    lost, rate, epoch = best
    learnt = np.concatenate([rows.train, rows.valid])
    return next(islice(epochs(rate, learnt), epoch, None)).requires_grad_(False), lost
