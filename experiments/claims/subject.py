"""The model that the experiments question: a real base at its calibrated start, its features, a training of its
heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cqwen_dist.batch import Batch
from cqwen_dist.config import Stage
from cqwen_dist.config.trainable import dense_rate, group_rates
from cqwen_dist.config.training import HEADS
from cqwen_dist.data.store import Document
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.ops.ovr import OvrOptions, TermOptions
from cqwen_dist.ops.regression import counts_text
from cqwen_dist.parallel.groups import ALONE
from cqwen_dist.parallel.runtime import pick_device
from cqwen_dist.training.optim import HeadOptimizer
from cqwen_dist.training.parameter_groups import head_members
from cqwen_dist.training.stages import StagePlan
from experiments.claims.texts import Sizes
from experiments.learn.answers import whole_texts
from experiments.learn.arms import require_base

WARM_UP = 5


class Ask(NamedTuple):
    """Settings that all experiments of a seed share: result folder, base, texts, size."""

    out: Path
    base: str
    data: str
    size: Sizes
    seed: int
    seeds: int
    say: Callable[[str], None]


class Training(NamedTuple):
    """A training of the heads: its losses (docs/training.md), what it trains, its rates by the usual ones."""

    cls_weight: float = 1.0  # of the words' loss
    reg_weight: float = 1.0  # lambda
    gate: str = "alpha"
    alpha: float = 0.0
    gate_grad: str = "stop"
    groups: tuple[str, ...] = HEADS
    rate: float = 1.0


class Positions(NamedTuple):
    """N label positions of some texts, on the model's device."""

    z: Tensor  # [N,H] features
    labels: Tensor  # [N] int64
    values: Tensor  # [N] float64; 0 where the label is no number
    is_number: Tensor  # [N] bool
    text: Tensor  # [N] int64: which of the texts


def batches_of(texts: list[str], tokenizer: NumericalAwareTokenizer) -> list[Batch]:
    """A batch for each text, which ends with the end token; every number is to be learnt."""
    documents = []
    for encoded in tokenizer.encode_batch(texts):
        ids = np.array([*encoded.ids, tokenizer.eos_token_id])
        documents.append(Document(ids, np.array([*encoded.values, 0.0]), ids == tokenizer.num_token_id))
    return whole_texts(documents, tokenizer, rows=1)


def calibrated(
    base: str, texts: list[str], seed: int, tokens: int, **shape: Any
) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """The base, turned causal and calibrated on about so many tokens of the texts. seed: of w_num and W_reg. shape:
    of the model (`CausalQwenConfig`).

    Raises `UserError`.
    """
    require_base(base)
    tokenizer = NumericalAwareTokenizer.from_pretrained(base)
    batches, taken = [], 0
    for batch in batches_of(texts, tokenizer):
        batches.append(batch)
        taken += int(batch.attention_mask.sum())
        if taken >= tokens:
            break
    values = torch.cat([batch.numeric_labels[batch.numeric_mask] for batch in batches]).numpy()
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else (-1.0, 0.0, 1.0)
    unit = TargetTransform("standardise", float(median), float((high - low) / 2) or 1.0)
    torch.manual_seed(seed)
    model = CausalQwenForCausalLM.from_base(
        base,
        calibration_batches=batches,
        device=pick_device(0),
        number_dims=8,
        target={"name": unit.name, "median": unit.median, "scale": unit.scale},
        **shape,
    )
    return model.eval(), tokenizer


@torch.no_grad()
def read(model: CausalQwenModel, texts: list[str], tokenizer: NumericalAwareTokenizer) -> Positions:
    """The features of every label position of the texts."""
    parts, device = [], model.action.cls_weight.device
    for number, read_batch in enumerate(batches_of(texts, tokenizer)):
        batch, keep = read_batch.to(device), read_batch.kept.to(device)
        columns = (batch.labels, batch.numeric_labels, batch.numeric_mask)
        z = model.kept_features(batch, keep)
        parts.append((z, *(column.flatten()[keep] for column in columns), torch.full_like(keep, number)))
    return Positions(*(torch.cat(column) for column in zip(*parts, strict=True)))


def train_heads(
    model: CausalQwenModel, seen: Positions, steps: int, tokens: int, seed: int, training: Training | None = None
) -> list[float]:
    """Train the heads on features that were read once, at the rates for a real base (docs/training.md).

    Every step takes `tokens` positions at random. Returns the loss of each step, in nats a token.
    """
    training = training or Training()
    hidden = model.config.hidden_size
    rate, rates = dense_rate(hidden), group_rates(hidden)
    groups = {group: training.rate * rates[group] for group in training.groups if group in rates}
    train = list(training.groups)
    stage = Stage(
        name="heads", train=train, steps=steps, lr=training.rate * rate, lr_groups=groups, warmup_steps=WARM_UP
    )
    plan = StagePlan(stage, 0, 0, steps)
    members = head_members(nn.ModuleDict(model.heads))
    optimizer = HeadOptimizer(members, ALONE, weight_decay=0.0)
    optimizer.noise_unit = float(model.action.b_noise.detach().abs().median()) or 1.0
    model.requires_grad_(False)
    optimizer.enter_stage(plan, plan.stage.groups)
    ovr = OvrOptions(terms=TermOptions(slope_limit=1.0), want_prob_sum=True)
    loss = (training.alpha, training.gate, training.gate_grad)
    options = LossOptions(int(model.config.num_token_id), *loss, ovr=ovr)
    targets = model.target.forward(seen.values)
    draw = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(seen.labels), generator=draw) for _ in range(_epochs(seen, steps, tokens))])
    losses = []
    for step in range(steps):
        at = order[step * tokens : (step + 1) * tokens]
        labels = TokenLabels(seen.labels[at], NumberLabels(targets[at], seen.is_number[at]))
        numbers = len(at) if counts_text(options.gate) else max(int(labels.numbers.is_number.sum()), 1)
        lam = training.reg_weight / numbers
        u = model.abduction(seen.z[at])
        terms = fused_loss(model.action, u, labels, options, training.cls_weight / len(at), lam)
        terms.loss.backward()
        optimizer.set_lr(plan, step)
        optimizer.step(1.0)
        losses.append(float(terms.cls_sum) / len(at))
    model.requires_grad_(False)
    return losses


def _epochs(seen: Positions, steps: int, tokens: int) -> int:
    return -(-steps * tokens // len(seen.labels))
