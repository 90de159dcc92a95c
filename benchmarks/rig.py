"""Runs training steps outside a run: the real engine and stepper on random batches with the config's shapes.

Engine and stepper are assembled as in `cqwen train`. Weights are random, which affects neither time nor memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cqwen_dist.batch import Batch
from cqwen_dist.config import Config, Stage
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime, seed_everything
from cqwen_dist.training.assembly import build_training, groups_of
from cqwen_dist.training.constraint import EVERY
from cqwen_dist.training.run_parts import Base, Training, Words
from cqwen_dist.training.shared import Shared
from cqwen_dist.training.stages import StagePlan
from cqwen_dist.training.step import ACCURACY_EVERY
from cqwen_dist.training.zero.partitioned_base import partitioned

NUMBER_SHARE = 0.125  # share of <NUM> tokens, as in GSM8K
DOCUMENTS = (0.1, 0.2, 0.3, 0.4)  # lengths of the texts in a packed row, as shares of the row
SPREAD = 0.02  # standard deviation of the random weights


@dataclass(frozen=True)
class Rig(Training):
    """A training with random batches."""

    def enter(self, stage: int) -> StagePlan:
        """Enter a stage at the start and return the plan with trainable groups and rates."""
        plan = self.schedule.plans[stage]
        self.enter_stage(plan, fresh=True)
        self.engine.set_lr(plan, plan.start)
        return plan

    def batches(self, plan: StagePlan, seed: int = 0) -> list[Batch]:
        """This rank's CPU micro-batches for one optimizer step: full sequences with labels everywhere."""
        number = self.engine.model.config.num_token_id
        return random_batches(self.config, plan.stage, number, seed, **self.groups.reading)

    def step(
        self, micro_batches: list[Batch], plan: StagePlan, looking: bool = False, cached: list[Tensor] | None = None
    ) -> dict[str, Any]:
        """Take one optimizer step and return the metrics on the device.

        looking: also measure KL and accuracy. cached: z at the label positions, by micro-batch.
        """
        every = EVERY * ACCURACY_EVERY
        return self.stepper(micro_batches, plan, every if looking else every + 1, cached)[0]


def random_batches(
    config: Config,
    stage: Stage,
    number: int,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    part: int = 0,
    parts: int = 1,
) -> list[Batch]:
    """A rank's CPU micro-batches for one optimizer step: full sequences with labels everywhere.

    number: the <NUM> token id, which is the last row. rank to parts: as in `Loader`.
    """
    whole, micro = config.batch_sizes(stage)
    share = max(1, whole // world)
    length = -(-(stage.sequence_length or config.data.sequence_length) // parts) * parts
    sizes = [min(micro, share - done) for done in range(0, share, micro)]
    return [
        _batch(rows, length, number, config.data.pack, 1000 * seed + i + 7919 * rank).part(part, parts)
        for i, rows in enumerate(sizes)
    ]


def _batch(rows: int, length: int, number: int, packed: bool, seed: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, number, (rows, length + 1), generator=make)
    is_number = torch.rand(ids.shape, generator=make) < NUMBER_SHARE
    ids[is_number] = number
    values = torch.where(is_number, torch.randn(ids.shape, generator=make).double() * 30, 0.0)
    positions = torch.arange(length).expand(rows, -1)
    if packed:
        ends = [round(length * share) for share in accumulate(DOCUMENTS)]
        positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise([0, *ends])]).expand(rows, -1)
    return Batch(
        input_ids=ids[:, :-1].contiguous(),
        numeric_values=values[:, :-1].contiguous(),
        attention_mask=torch.ones(rows, length, dtype=torch.bool),
        position_ids=positions.contiguous(),
        labels=ids[:, 1:].contiguous(),
        numeric_labels=values[:, 1:].contiguous(),
        numeric_mask=is_number[:, 1:].contiguous(),
    )


def build_rig(
    config: Config,
    architecture: dict[str, Any],
    runtime: Runtime,
    groups: Groups | None = None,
    num_token_id: int | None = None,
    shared: Shared | None = None,
) -> Rig:
    """Builds a model with random weights, an engine and a stepper. Collective over the world.

    num_token_id: the last row by default. shared: as in `build_run`. Raises `UserError` if the config does not fit the
    number of ranks.
    """
    seed_everything(config.train.seed)
    groups = groups or groups_of(config, runtime)
    base = _base(config, architecture, runtime, shared or Shared(Path(config.run.dir)))
    vocab = base.model.config.vocab_size
    words = Words(
        vocab - 1 if num_token_id is None else num_token_id, used_rows=vocab, counts=np.ones(vocab, dtype=np.int64)
    )
    rig = Rig(**vars(build_training(config, runtime, groups, base, words, steps_per_epoch=1)))
    if config.constraint.mode != "off":
        batch = rig.batches(rig.schedule.plans[0])[0].to(runtime.device)
        with torch.no_grad():
            z = rig.forward(batch, batch.kept)
        rig.constraint.begin(rig.engine.feature_state()[0], [z])
    return rig


class _RandomRows:
    """An output head [V,H] that draws only the requested rows, on the CPU."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype) -> None:
        self.shape = torch.Size((rows, hidden))
        self._dtype = dtype

    def __getitem__(self, at: slice) -> Tensor:
        start, stop, _ = at.indices(self.shape[0])
        return torch.randn(stop - start, self.shape[1], dtype=self._dtype) * SPREAD


@torch.no_grad()
def _draw(name: str, value: Tensor) -> None:
    """Initialises a parameter in place: norms to 1, all else to small random values."""
    if name.endswith("norm.weight"):
        value.fill_(1.0)
    else:
        value.normal_(std=SPREAD)


def _base(config: Config, architecture: dict[str, Any], runtime: Runtime, shared: Shared) -> Base:
    """Random weights on the device. Under ZeRO-3 they are drawn and partitioned module by module, to save memory."""
    settings, dtype = AutoConfig.for_model(**architecture), dtype_of(config.train.precision)
    if config.parallel.zero_stage == 3:
        head = _RandomRows(settings.vocab_size, settings.hidden_size, dtype)
        return Base(partitioned(settings, config, runtime, _draw), head)
    return Base(*shared.base(lambda: (_whole(settings, dtype, config, runtime),)))


def _whole(settings: Any, dtype: torch.dtype, config: Config, runtime: Runtime) -> Any:
    """A base that is not partitioned, rounded as the config says."""
    with runtime.device:  # draw on the device, as drawing a large model on the CPU is slow
        base = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    if config.model.quantize == "none":
        return base
    with TemporaryDirectory() as folder:  # bases are rounded while they are loaded
        base.save_pretrained(folder)
        base = load_base(folder, dtype, quantize=config.model.quantize, device=runtime.device)
    for parameter in base.parameters():  # out of the file's memory map, which no allocator counts
        parameter.data = parameter.data.clone()
    return base
