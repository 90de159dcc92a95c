"""Competing heads in the benchmark: squared error, quantiles, and digit by digit.

An `Arm` defines a head's shape, its loss, and the meaning of its outputs. It trains on `Features`: fixed ones from a
frozen base (`Stored`), or those from a base with adapters that train together with the head (`adapted_base.Adapted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.numbers.predicted_laws import QUANTILES, Predicted
from cqwen_dist.tables.baselines import EncodedRows
from cqwen_dist.tables.rows import Table

T = TypeVar("T")
HeadOf = Callable[[np.ndarray], nn.Module]  # training rows -> the trained head
HIDDEN = 256
READ = 32  # batch size without gradients
WARM = 10  # steps
DIGITS, SAMPLES = 3, 64  # digits between the smallest and the largest value; samples as in regress-lm


class Features(Protocol):
    """Returns x [m,H] fp32 for row indices [m]. rates, epochs (a maximum), batch: settings to try in training; once:
    no choice, one rate that decays over all epochs."""

    rates: Sequence[float]
    epochs: int
    batch: int
    once: bool
    width: int

    def __call__(self, rows: Tensor) -> Tensor: ...

    def begin(self) -> list[nn.Parameter]:
        """Resets the parameters that train together with a head, and returns them."""
        ...


class Stored:
    """Fixed z [n,H], standardised by the training rows."""

    rates, epochs, batch, once = (1e-4, 1e-3, 1e-2), 50, 64, False

    def __init__(self, z: Tensor, train: np.ndarray, floor: float = 1e-6) -> None:
        """z [n,H] fp32; train: indices of the training rows; floor: the minimum standard deviation."""
        self.centre, self.unit = z[train].mean(0), z[train].std(0).clamp(min=floor)
        self.x = (z - self.centre) / self.unit
        self.width = z.shape[1]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.x[rows]

    def begin(self) -> list[nn.Parameter]:
        return []


class Arm(NamedTuple):
    """goal [n]: the training target of each row. outputs: the head's width. further: additional inputs after x.

    read: (head, x [m,H], rows [m], validation loss) -> the predicted laws for these rows.
    """

    goal: Tensor
    outputs: int
    further: int
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]  # (head, x [m,H], goals [m]) -> scalar
    read: Callable[[nn.Module, Tensor, np.ndarray, float], Predicted]


def squared_error(y: np.ndarray, train: np.ndarray) -> Arm:
    """Predicts the means of normal laws, with the validation error as spread. y [n]; train: as in `Stored`."""
    goal, centre, unit = _standardised(y, train)

    def read(head: nn.Module, x: Tensor, rows: np.ndarray, lost: float) -> Predicted:
        return Predicted.normal(head(x)[:, 0].double().numpy() * unit + centre, math.sqrt(lost) * unit, y[rows])

    return Arm(goal, 1, 0, lambda head, x, goals: F.mse_loss(head(x)[:, 0], goals), read)


def pinball(y: np.ndarray, train: np.ndarray) -> Arm:
    """Predicts quantiles, sorted afterwards so that they do not cross. y [n]; train: as in `Stored`."""
    at = torch.tensor(QUANTILES)
    goal, centre, unit = _standardised(y, train)

    def loss(head: nn.Module, x: Tensor, goals: Tensor) -> Tensor:
        error = goals[:, None] - head(x)
        return torch.maximum(at * error, (at - 1) * error).mean()

    def read(head: nn.Module, x: Tensor, rows: np.ndarray, lost: float) -> Predicted:
        return Predicted(np.sort(head(x).double().numpy() * unit + centre, 1))

    return Arm(goal, len(QUANTILES), 0, loss, read)


def digits(y: np.ndarray, train: np.ndarray) -> Arm:
    """Samples values digit by digit (Song and Bahri 2025, "Decoding-based Regression"). y [n]; train: as in `Stored`.

    `DIGITS` decimal digits encode a value's position between the smallest and largest training value. The inputs are x
    and the earlier digits, with -1 for later digits.
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


ADAPTED = ("squared error", "quantiles")  # arms also trained with adapters
ARMS = {"squared error": squared_error, "quantiles": pinball, "digits, median of 64": digits}


def _standardised(y: np.ndarray, train: np.ndarray) -> tuple[Tensor, float, float]:
    """(standardised values in fp32, mean, standard deviation), with the last two from the training rows."""
    centre, unit = float(y[train].mean()), float(y[train].std()) or 1.0
    return torch.from_numpy((y - centre) / unit).float(), centre, unit


def learnt(arm: Arm, stages: Sequence[Features], train: np.ndarray, valid: np.ndarray, test: np.ndarray) -> Predicted:
    """Trains a head with two layers on each of the `stages` in turn, and predicts the law of each test row.

    train: indices of the training rows. valid: rows that choose rates and epochs; the final head trains on both, but
    for one trained `once`. A stage that makes the head worse is skipped.
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
    """Continues training the heads from `head_of` on these features; returns the same pair as `best`."""

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

    if features.once:
        head = head_of(train)
        train_once(
            [*head.parameters(), *features.begin()],
            lambda some: arm.loss(head, features(some), arm.goal[some]),
            train,
            features.epochs,
            features.rates[0],
            features.batch,
        )
        with torch.no_grad():
            return lambda rows: head, lost(head)
    return best(epochs, lost, features.rates, train)


def train_once(
    parameters: Sequence[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    rows: np.ndarray,
    epochs: int,
    rate: float,
    batch: int,
) -> None:
    """Trains parameters in place, by the loss of row indices [m]. The rate falls as a run's does: a cosine after `WARM`
    steps."""
    optimizer, steps = torch.optim.AdamW(parameters, lr=rate), epochs * -(-len(rows) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for _ in range(epochs):
        for some in torch.from_numpy(rows)[torch.randperm(len(rows))].split(batch):
            optimizer.zero_grad()
            loss(some).backward()
            optimizer.step()
            schedule.step()


def _read(features: Features, rows: np.ndarray) -> Tensor:
    """x [m,H] for rows [m], computed in batches."""
    return torch.cat([features(some) for some in torch.from_numpy(rows).split(READ)])


def best(
    epochs: Callable[[float, np.ndarray], Iterator[T]], lost: Callable[[T], float], rates: Sequence[float], train: Any
) -> tuple[Callable[[np.ndarray], T], float]:
    """Finds the best rate and number of epochs; returns (a function that trains so on given rows, the best loss).

    epochs: (rate, rows) -> yields the trained model after each epoch. lost: the validation loss of a model.
    """
    found = (math.inf, rates[0], 0)
    for rate in rates:
        for epoch, trained in enumerate(epochs(rate, train)):
            with torch.no_grad():
                found = min(found, (lost(trained), rate, epoch))
    least, rate, epoch = found
    return lambda rows: next(islice(epochs(rate, rows), epoch, None)), least


def natural_boosting(table: Table, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Means and standard deviations [m] for the test rows from NGBoost's normal law; None if not installed."""
    if not find_spec("ngboost"):
        return None
    from ngboost import NGBRegressor

    y = table.values()
    x = np.nan_to_num(EncodedRows(table, [""] * len(y), y, train).dense, nan=-1.0)
    law = NGBRegressor(verbose=False, random_state=0).fit(x[train], y[train]).pred_dist(x[test])
    return law.params["loc"], law.params["scale"]
