"""Heads on the base's features that a benchmark compares: a mean squared error and quantiles (pinball loss)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RATES = (1e-4, 1e-3, 1e-2)
HIDDEN, BATCH, EPOCHS, PATIENCE = 256, 64, 100, 10


def features_of(model: Any, tokenizer: Any, prompts: Sequence[str]) -> Tensor:
    """z [n,H] fp32 on the CPU at the last token of each prompt. Prompts of one length share a batch."""
    encoded = [tokenizer.encode(prompt)[:2] for prompt in prompts]
    of_length: dict[int, list[int]] = {}
    for row, (ids, _) in enumerate(encoded):
        of_length.setdefault(len(ids), []).append(row)
    z = torch.zeros(len(prompts), model.config.hidden_size)
    with torch.inference_mode():
        for rows in of_length.values():
            for chunk in (rows[at : at + 32] for at in range(0, len(rows), 32)):
                ids = torch.tensor([encoded[row][0] for row in chunk], device=model.device)
                values = torch.tensor([encoded[row][1] for row in chunk], dtype=torch.float64, device=model.device)
                z[chunk] = model.model.features(ids, values)[:, -1].float().cpu()
    return z


def squared(found: Tensor, y: Tensor) -> Tensor:
    """found [n,1], y [n]."""
    return (found[:, 0] - y).square().mean()


def pinball(levels: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of quantiles [n,levels]."""
    at = torch.tensor(levels)

    def loss(found: Tensor, y: Tensor) -> Tensor:
        error = y[:, None] - found
        return torch.maximum(at * error, (at - 1) * error).mean()

    return loss


def head_predictions(
    z: Tensor,
    y: np.ndarray,
    train: np.ndarray,
    valid: np.ndarray,
    outputs: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> np.ndarray:
    """[n,outputs] in y's unit: two layers on z, at the best of `RATES` and epochs by the loss of the rows `valid`."""
    centre, unit = float(y[train].mean()), float(y[train].std()) or 1.0
    goal = torch.from_numpy((y - centre) / unit).float()
    x = (z - z[train].mean(0)) / z[train].std(0).clamp(min=1e-6)
    found = [_trained(x, goal, train, valid, outputs, loss, rate) for rate in RATES]
    _, predicted = min(found, key=lambda pair: pair[0])
    return predicted.double().numpy() * unit + centre


def _trained(
    x: Tensor,
    goal: Tensor,
    train: np.ndarray,
    valid: np.ndarray,
    outputs: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    rate: float,
) -> tuple[float, Tensor]:
    """(Least loss of the rows `valid`, that epoch's outputs of all rows)."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, outputs))
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate)
    best, kept, since = float("inf"), copy.deepcopy(head.state_dict()), 0
    for _ in range(EPOCHS):
        for rows in torch.from_numpy(train)[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            loss(head(x[rows]), goal[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            now = float(loss(head(x[valid]), goal[valid]))
        since += 1
        if now < best:
            best, kept, since = now, copy.deepcopy(head.state_dict()), 0
        if since == PATIENCE:
            break
    head.load_state_dict(kept)
    with torch.no_grad():
        return best, head(x)
