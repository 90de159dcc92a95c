"""The same training by the engine on ranks: every combination runs in one set of processes a world size."""

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matrix.plain_training import (
    CLIP,
    DECAY,
    KINDS,
    LR,
    ROWS,
    SCALES_LR,
    STEPS,
    Trained,
    fresh_model,
    gate_grad_of,
    step_batch,
)
from support.ranks import groups_of
from support.runs import as_rank
from support.tiny import NUM, VOCAB
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.config import Config
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.model.layers import fuse_adapters
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.training.assembly import engine_settings
from cqwen_dist.training.stages import Schedule
from cqwen_dist.training.zero.engine import Engine


class Case(NamedTuple):
    """One combination of the matrix."""

    world: int
    group: int
    zero: int
    precision: str
    accumulation: int
    kind: str
    offload: bool = False
    checkpointing: bool = False


class Found(NamedTuple):
    """How far a case is from the oracle: the worst of all ranks."""

    loss: float  # relative, worst step
    norm: float  # relative, worst step
    parameter: float  # absolute, worst entry
    drift: float  # ||p - oracle|| / ||oracle - start|| over all parameters
    name: str  # of rank 0's worst parameter


def config_of(case: Case) -> Config:
    stages = KINDS[case.kind]
    named = [
        {"name": str(i), "train": train, "steps": STEPS // len(stages), "lr": LR, "schedule": "constant",
         "lr_groups": {"scales": SCALES_LR}}
        for i, train in enumerate(stages)
    ]  # fmt: skip
    offload = "optimizer" if case.offload else "none"
    return Config.model_validate(
        {
            "model": {"name_or_path": "unused"},
            "data": {"train": "unused"},
            "start": "seed",
            "stages": named,
            "parallel": {"zero_stage": case.zero, "vocab_group_size": case.group, "offload": offload},
            "train": {"precision": case.precision, "max_grad_norm": CLIP, "weight_decay": DECAY},
        }
    )


def shares(case: Case, step: int, rank: int) -> list[Batch]:
    """This rank's micro-batches of a step: rows cut at random, some of them none, the text-only ones at the end."""
    batch, cells = step_batch(step), case.world * case.accumulation
    cuts = random.Random(f"{case.world} {case.accumulation} {step}")
    inner = sorted(cuts.randint(0, ROWS) for _ in range(cells - 1))
    if step % 2 and inner:
        inner[0] = 0  # the first one gets nothing
    edges = [0, *inner, ROWS]
    return [
        _rows(batch, edges[i], edges[i + 1]) for i in range(rank * case.accumulation, (rank + 1) * case.accumulation)
    ]


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    if start < stop:
        return Batch(**{name: value[start:stop] for name, value in vars(batch).items()})
    none = {name: value[:1] for name, value in vars(batch).items()}
    for name in ("attention_mask", "numeric_mask"):
        none[name] = torch.zeros_like(none[name])
    none["labels"] = torch.full_like(none["labels"], IGNORE_INDEX)
    return Batch(**none)


def begin(case: Case, groups: Groups, timeout_s: float | None = None) -> Engine:
    """The engine at its start, on this rank's rows; its groups asleep."""
    start, stop = vocab_range(VOCAB, groups.vocab_rank, groups.vocab_size)
    model = fresh_model(case.kind, vocab_start=start, rows=stop - start)
    fuse_adapters(model.transformer)
    if case.checkpointing:
        model.transformer.gradient_checkpointing_enable({"use_reentrant": False})
    settings = engine_settings(config_of(case), groups.world_size, model.config.base["model_type"])
    return Engine(model, settings, as_rank().device, groups, timeout_s)


def enter(engine: Engine, schedule: Schedule, step: int) -> None:
    """What comes before a step: its stage, its rates."""
    plan = schedule.at(step)
    if step == plan.start:
        engine.enter_stage(plan, schedule.newly_trained(plan))
    engine.set_lr(plan, step)


def token_counts(case: Case, groups: Groups, step: int) -> list[list[int]]:
    """[micro-batch][rank of this rank's vocabulary group]: kept tokens."""
    ranks = dist.get_process_group_ranks(groups.vocab)
    by_rank = [[int(batch.label_mask.sum()) for batch in shares(case, step, rank)] for rank in ranks]
    return [list(counts) for counts in zip(*by_rank, strict=True)]


def forward_and_backward(case: Case, groups: Groups, engine: Engine, step: int) -> Tensor:
    """All micro-batches of this rank; its share of the mean loss, []."""
    whole = step_batch(step)
    words, numbers = int(whole.label_mask.sum()), int(whole.numeric_mask.sum())
    counts = token_counts(case, groups, step)
    model, device = engine.model, engine.device
    total = torch.zeros((), device=device)
    for i, own in enumerate(shares(case, step, dist.get_rank())):
        batch = own.to(device)
        keep = batch.label_mask.flatten().nonzero()[:, 0]
        z = engine.forward(batch, keep)
        terms = fused_loss(
            model.action,
            model.abduction(z),
            TokenLabels(batch.labels.flatten()[keep], model.action.number_head.labels(batch, keep)),
            LossOptions(
                NUM,
                gemm_dtype=torch.bfloat16 if case.precision == "bf16" else torch.float32,
                gate_grad=gate_grad_of(case.kind),
            ),
            token_weight=case.world / words,
            number_weight=case.world / numbers,
            group=groups.vocab,
            token_counts=counts[i],
        )
        engine.backward(terms.loss, i == case.accumulation - 1)
        total += terms.cls_sum / words + terms.reg_sum / numbers
    return total


def train_sharded(case: Case, groups: Groups) -> Trained:
    """The training of `case`; parameters as this rank holds them (its rows; features whole)."""
    return take_steps(case, groups, begin(case, groups))


def take_steps(case: Case, groups: Groups, engine: Engine) -> Trained:
    """All steps of `case` with an engine that has just begun."""
    schedule = Schedule(config_of(case).stages, 1)
    losses, norms = [], []
    for step in range(STEPS):
        enter(engine, schedule, step)
        total = forward_and_backward(case, groups, engine, step)
        norms.append(engine.step())
        dist.all_reduce(total)
        losses.append(float(total))
    return Trained(losses, norms, parameters(engine), {})


def parameters(engine: Engine) -> dict[str, Tensor]:
    """Everything that trains, by name, on the CPU: this rank's rows, the rest whole. Collective."""
    features, _, _ = engine.feature_state()
    named = {f"features.{name}": value for name, value in features.items()}
    return named | {m.name: m.parameter.detach().cpu().clone() for m in engine.heads.members}


def distance(case: Case, groups: Groups, found: Trained, oracle: Trained) -> Found:
    """How far; equal on every rank."""
    start, stop = vocab_range(VOCAB, groups.vocab_rank, groups.vocab_size)
    worst, name = 0.0, ""
    squares = torch.zeros(2, 2, dtype=torch.float64)  # [replicated or rows][off, moved]
    assert found.parameters.keys() == oracle.parameters.keys()
    for key, value in found.parameters.items():
        expected, begin = oracle.parameters[key], oracle.start[key]
        by_rows = key in ("action.cls_weight", "action.threshold") and len(expected) == VOCAB
        if by_rows:
            expected, begin = expected[start:stop], begin[start:stop]
        assert value.shape == expected.shape, key
        error = float((value - expected).abs().max()) if value.numel() else 0.0
        if not error <= worst:
            worst, name = error, key
        squares[int(by_rows)] += torch.stack([(value - expected).square().sum(), (expected - begin).square().sum()])
    dist.all_reduce(squares[1], group=groups.vocab)
    off, moved = squares.sum(0).tolist()
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in ((found.losses, oracle.losses), (found.norms, oracle.norms))
    )
    everyone: list[Any] = [None] * case.world
    dist.all_gather_object(everyone, (losses, norms, worst, (off / moved) ** 0.5))
    return Found(*(max(column) for column in zip(*everyone, strict=True)), name)  # type: ignore[arg-type]


def run_case(case: Case, oracle: Trained) -> Found:
    """How far this rank's training is from the oracle's."""
    groups = groups_of(case.group)
    return distance(case, groups, train_sharded(case, groups), oracle)


def train_alone(case: Case) -> tuple[list[float], list[float], dict[str, Any]]:
    """One rank's losses, norms and parameters (arrays: they outlive the rank)."""
    trained = train_sharded(case, groups_of(1))
    return trained.losses, trained.norms, {name: value.numpy() for name, value in trained.parameters.items()}
