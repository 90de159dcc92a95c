"""Heads that a benchmark compares: squared error, quantiles, and digits one after another.

An `Arm` is a head's shape, its loss, and how its outputs are read. It learns from `Features`: those of a base that
stays as it is (`Stored`), or of a base with adapters, which learn with it (`adapted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cqwen_dist.tables.benchmark.predicted_laws import QUANTILES, Predicted

T = TypeVar("T")
HeadOf = Callable[[np.ndarray], nn.Module]  # the head that has learnt from these rows
HIDDEN = 256
READ = 32  # rows at once, without gradients
DIGITS, SAMPLES = 3, 64  # of a value between the least and the greatest; as regress-lm samples


class Features(Protocol):
    """x [m,H] fp32 of rows, by their indices [m]. rates, epochs (one up to these), batch: of a training."""

    rates: Sequence[float]
    epochs: int
    batch: int
    width: int

    def __call__(self, rows: Tensor) -> Tensor: ...

    def begin(self) -> list[nn.Parameter]:
        """What learns with a head, as it was at the start."""
        ...


class Stored:
    """z [n,H] that does not change, standardised by the rows to learn from."""

    rates, epochs, batch = (1e-4, 1e-3, 1e-2), 50, 64

    def __init__(self, z: Tensor, train: np.ndarray, floor: float = 1e-6) -> None:
        """z [n,H] fp32; train: indices of the rows to learn from; floor: the least unit."""
        self.centre, self.unit = z[train].mean(0), z[train].std(0).clamp(min=floor)
        self.x = (z - self.centre) / self.unit
        self.width = z.shape[1]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.x[rows]

    def begin(self) -> list[nn.Parameter]:
        return []


class Arm(NamedTuple):
    """goal [n]: what the head learns of each row. outputs: of the head. further: its inputs beside x.

    read: the laws of rows [m] from the head, their x [m,H], and the head's loss on rows that it did not learn.
    """

    goal: Tensor
    outputs: int
    further: int
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]  # (head, x [m,H], its goals [m]) -> scalar
    read: Callable[[nn.Module, Tensor, np.ndarray, float], Predicted]


def squared_error(y: np.ndarray, train: np.ndarray) -> Arm:
    """Means of normal laws; their spread is the error on the rows for evaluation. y [n]; train: as `Stored`."""
    goal, centre, unit = _standardised(y, train)

    def read(head: nn.Module, x: Tensor, rows: np.ndarray, lost: float) -> Predicted:
        return Predicted.normal(head(x)[:, 0].double().numpy() * unit + centre, math.sqrt(lost) * unit, y[rows])

    return Arm(goal, 1, 0, lambda head, x, goals: F.mse_loss(head(x)[:, 0], goals), read)


def pinball(y: np.ndarray, train: np.ndarray) -> Arm:
    """Quantiles, ascending. y [n]; train: as `Stored`."""
    at = torch.tensor(QUANTILES)
    goal, centre, unit = _standardised(y, train)

    def loss(head: nn.Module, x: Tensor, goals: Tensor) -> Tensor:
        error = goals[:, None] - head(x)
        return torch.maximum(at * error, (at - 1) * error).mean()

    def read(head: nn.Module, x: Tensor, rows: np.ndarray, lost: float) -> Predicted:
        return Predicted(np.sort(head(x).double().numpy() * unit + centre, 1))

    return Arm(goal, len(QUANTILES), 0, loss, read)


def digits(y: np.ndarray, train: np.ndarray) -> Arm:
    """Values sampled digit by digit (Song and Bahri 2025, "Decoding-based Regression"). y [n]; train: as `Stored`.

    A value between the least and the greatest is written by `DIGITS` decimal digits. The head reads x and the digits
    before this one; later digits are -1.
    """
    low, high = float(y[train].min()), float(y[train].max())
    most = 10**DIGITS - 1
    goal = torch.from_numpy((y - low) / max(high - low, 1e-12) * most).round().clamp(0, most).long()

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

    def read(head: nn.Module, x: Tensor, rows: np.ndarray, lost: float) -> Predicted:
        draw = torch.Generator().manual_seed(0)
        sampled = []
        for _ in range(SAMPLES):
            value = torch.zeros(len(x), dtype=torch.int64)
            for place in range(DIGITS):
                law = logits(head, x, value, place).softmax(-1)
                value += torch.multinomial(law, 1, generator=draw)[:, 0] * 10 ** (DIGITS - 1 - place)
            sampled.append(value.numpy() / most * (high - low) + low)
        return Predicted(np.quantile(np.stack(sampled), QUANTILES, axis=0).T)

    return Arm(goal, 10, 11 * DIGITS, loss, read)


ARMS = {"squared error": squared_error, "quantiles": pinball, "digits, median of 64": digits}


def _standardised(y: np.ndarray, train: np.ndarray) -> tuple[Tensor, float, float]:
    """(Values by mean and standard deviation of the rows to learn from, fp32; these two)."""
    centre, unit = float(y[train].mean()), float(y[train].std()) or 1.0
    return torch.from_numpy((y - centre) / unit).float(), centre, unit


def learnt(arm: Arm, stages: Sequence[Features], train: np.ndarray, valid: np.ndarray, test: np.ndarray) -> Predicted:
    """The law of each test row by a head of two layers, which learns on one of the features after the other.

    train, valid: indices of the rows to learn from, and to choose rates and epochs by, which are then learnt from too.
    A stage that makes the head worse is left out.
    """

    def fresh(rows: np.ndarray) -> nn.Module:
        torch.manual_seed(0)
        width = stages[0].width + arm.further
        return nn.Sequential(nn.Linear(width, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, arm.outputs))

    head_of: HeadOf = fresh
    least, best_features = math.inf, stages[0]
    for features in stages:
        further, lost = _further(arm, features, head_of, train, valid)
        if lost < least:
            head_of, least, best_features = further, lost, features
    head = head_of(np.concatenate([train, valid]))
    with torch.no_grad():
        return arm.read(head, _read(best_features, test), test, least)


def _further(
    arm: Arm, features: Features, head_of: HeadOf, train: np.ndarray, valid: np.ndarray
) -> tuple[HeadOf, float]:
    """(rows -> the head that head_of gives for them, trained on these features, its loss on `valid`), as `best`."""

    def epochs(rate: float, rows: np.ndarray) -> Iterator[nn.Module]:
        head = head_of(rows)
        optimizer = torch.optim.AdamW([*head.parameters(), *features.begin()], lr=rate)
        for _ in range(features.epochs):
            for some in torch.from_numpy(rows)[torch.randperm(len(rows))].split(features.batch):
                optimizer.zero_grad()
                arm.loss(head, features(some), arm.goal[some]).backward()
                optimizer.step()
            yield head

    def lost(head: nn.Module) -> float:
        return float(arm.loss(head, _read(features, valid), arm.goal[valid]))

    return best(epochs, lost, features.rates, train)


def _read(features: Features, rows: np.ndarray) -> Tensor:
    """x [m,H] of rows [m]."""
    return torch.cat([features(some) for some in torch.from_numpy(rows).split(READ)])


def best(
    epochs: Callable[[float, np.ndarray], Iterator[T]], lost: Callable[[T], float], rates: Sequence[float], train: Any
) -> tuple[Callable[[np.ndarray], T], float]:
    """(What trains on rows at the best rate, for the best number of epochs; the loss by which these are the best).

    epochs: (rate, rows) -> what was trained, epoch by epoch; lost: its loss on rows that it did not learn from.
    """
    found = (math.inf, rates[0], 0)
    for rate in rates:
        for epoch, trained in enumerate(epochs(rate, train)):
            with torch.no_grad():
                found = min(found, (lost(trained), rate, epoch))
    least, rate, epoch = found
    return lambda rows: next(islice(epochs(rate, rows), epoch, None)), least
