"""Times a full training step by part and compares it with HF + PEFT on the same backbone.

Every stage in the config runs at its shapes with random weights. A row contains tokens/s, MFU (useful operations over
the device peak), seconds by part, bytes sent, measured and planned peak memory, and launched operations by part.
A stage that trains only heads runs twice: with the backbone, and with z as if from the feature cache. Measured ratios
are shown next to the ratios predicted from operation counts (`sizes.flops`). With `loss.words: none` the same stage
with words, and HF + PEFT with a scalar head, are timed in turns with it. With `both`, our step and the peers are
measured eager and compiled, and each pair gets a ratio.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.launches import counting
from benchmarks.numbers_step import numbers_rows
from benchmarks.parts import Marks, between, device_counts, marked, profile_steps
from benchmarks.peer import PeerStep, peer_step
from benchmarks.rig import DOCUMENTS, Rig, build_rig
from benchmarks.step_memory import allocated_bytes
from benchmarks.timing import device_name, said, seconds_of, spread, wait_for
from benchmarks.traffic import Traffic, Transfer
from cqwen_dist.batch import Batch
from cqwen_dist.config import Config
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.parallel.collectives import barrier
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.sizes.architecture import Architecture, read_architecture
from cqwen_dist.sizes.flops import peak_tflops
from cqwen_dist.tools.plan.cost import MACHINES, TERA, Machine, machine, stage_cost
from cqwen_dist.tools.plan.memory import GIB
from cqwen_dist.tools.plan.stage_sizes import Sizes, flops, stage_sizes, work_of
from cqwen_dist.training.stages import StagePlan

PEERS = {"hf+peft": False, "hf+peft+liger": True}  # name -> whether it uses Liger kernels
COMPILED = ", compiled"  # suffix to a row name
WARM_UP = 3  # steps


def measure(config: Config, *, gpu: str, **how: Any) -> dict[str, Any] | None:
    """Calls `run` in the launcher's process group, or in a new one. Returns None on every rank except the first."""
    architecture = read_architecture(config)
    with distributed() as runtime:
        known = machine(gpu or "cpu", "ib400")
        peak: float | None = known.peak(dtype_of(config.train.precision).itemsize)
        if runtime.device.type == "cuda" and not gpu:
            shown = torch.cuda.get_device_name()
            known = machine(next((name for name in MACHINES if name in shown.lower()), "h100"), "ib400")
            stated = peak_tflops(shown) if config.train.precision == "bf16" else known.fp32 / TERA
            peak = None if stated is None else stated * TERA
        result = run(config, architecture, runtime, known, peak, **how)
        return result if runtime.is_main else None


def run(
    config: Config,
    architecture: dict[str, Any],
    runtime: Runtime,
    machine: Machine,
    peak: float | None,
    *,
    rounds: int,
    peers: bool = True,
    profile: Path | None = None,
    both: bool = False,
) -> dict[str, Any]:
    """Measure every stage of the config. Collective over the world; returns a JSON-ready document on every rank.

    machine: its stated rates are the plan's. peak: flop/s for MFU, None if unknown. both: run
    eager and compiled; else `model.compile_layers` decides. Raises `UserError` if the config does not fit the ranks.
    """
    device = runtime.device
    timer, traffic = Timer(device, peak, rounds), Traffic(Marks(device).now)
    rows: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    kinds = (False, True) if both and config.parallel.zero_stage < 3 else (config.model.compile_layers,)
    with traffic.watching():  # before any engine exists: DeepSpeed keeps the collectives that it finds first
        for compiled in kinds:
            own = config.model_copy(update={"model": config.model.model_copy(update={"compile_layers": compiled})})
            try:
                found, batches, sizes = _ours(timer, own, architecture, runtime, traffic, profile, profiles)
                rows += [row | {"name": row["name"] + COMPILED * (both and compiled)} for row in found]
            except RuntimeError as error:  # from the compiler: keep the eager and peer rows
                if not (both and compiled and rows):
                    raise
                rows.append({"name": f"all stages{COMPILED}", "skipped": said(error), "trainable": []})
            _empty(device)
    factors = _factors(found, sizes, machine, runtime.world_size)
    if peers and runtime.world_size == 1:
        rows += _peers(timer, config, architecture, kinds if both else (False,), batches, sizes, rows)
        rows += [] if config.learns_words else numbers_rows(config, architecture, runtime, rounds)
    return {
        "device": device_name(device),
        "world": runtime.world_size,
        "torch": torch.__version__,
        "precision": config.train.precision,
        "micro_batch_size": config.train.micro_batch_size,
        "sequence_length": config.data.sequence_length,
        "rounds": rounds,
        "compiled": config.model.compile_layers,
        "rows": rows,
        "profiles": profiles,
        "measured_over_planned": {"machine": machine.name, "factors": factors},
    }


def _peers(
    timer: Timer,
    config: Config,
    architecture: dict[str, Any],
    kinds: Sequence[bool],
    batches: list[Batch],
    sizes: list[Sizes],
    ours: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Peer rows, each compared with our row in the last stage that trains adapters, eager or compiled alike."""
    rows: list[dict[str, Any]] = []
    last = next((s for s in reversed(sizes) if "lora" in s.trainable), None)
    if last is None or not config.learns_words:
        return rows
    stages = {row["name"]: row for row in ours}
    for name in PEERS:
        for compiled in kinds:
            own = stages.get(last.stage.name + COMPILED * compiled)
            build = partial(peer_step, config, architecture, timer.device, PEERS[name], compiled)
            rows.append(_peer(timer, name + COMPILED * compiled, build, batches, last, own))
            _empty(timer.device)
    return rows


def _ours(
    timer: Timer,
    config: Config,
    architecture: dict[str, Any],
    runtime: Runtime,
    traffic: Traffic,
    profile: Path | None,
    profiles: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[Batch], list[Sizes]]:
    """(one or two rows per stage, the batches in the last stage, the sizes of all stages). Adds to `profiles`."""
    device, rows = runtime.device, []
    sizes = sizes_of(config, architecture, device, runtime.world_size)
    before = torch.cuda.memory_allocated()
    rig = build_rig(config, architecture, runtime)
    for index, s in enumerate(sizes):
        plan = rig.enter(index)
        batches = rig.batches(plan)
        row = _stage(timer, rig, plan, batches, s, traffic, before)
        rows.append(row | _launches(rig, plan, batches))
        if profile is not None:
            folder = profile / f"rank{runtime.rank}-{s.stage.name}{COMPILED[2:] * config.model.compile_layers}"
            profiles.append(profile_steps(partial(rig.step, batches, plan), folder, device))
        if not s.graph:
            rows.append(_cached(timer, rig, plan, batches, s, row))
    return rows, batches, sizes


def sizes_of(config: Config, architecture: dict[str, Any], device: torch.device, world: int = 1) -> list[Sizes]:
    """The sizes of every stage, for packed rows as in the rig."""
    text = config.data.sequence_length * sum(share**2 for share in DOCUMENTS)
    return stage_sizes(config, Architecture.of(architecture), world=world, kind=device.type, text=text)


def _launches(rig: Rig, plan: StagePlan, batches: list[Batch]) -> dict[str, Any]:
    """Launches and host waits in a step: operations by part unless compiled, and kernels on CUDA."""
    step = partial(rig.step, batches, plan)
    kernels = device_counts(step) if rig.runtime.device.type == "cuda" else {}
    if rig.config.model.compile_layers:
        return kernels
    with counting(value for batch in batches for value in batch.tensors()) as launches, marked(rig, launches):
        step()
        launches.end("rest")
    return {**launches.totals(), **kernels}


@dataclass(frozen=True)
class Timer:
    """Times every contender in the same way."""

    device: torch.device
    peak: float | None
    rounds: int

    def row(self, name: str, step: Callable[[], object], s: Sizes, saved: float = 0.0) -> dict[str, Any]:
        """Times a step and returns a row. Resets the peak memory. Collective: all ranks start each round together.

        saved: operations per token that this contender avoids.
        """
        for _ in range(WARM_UP):
            step()
        wait_for(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.rounds):
            wait_for(self.device)
            barrier()
            times.append(seconds_of(step, self.device))
        median, useful = statistics.median(times), flops(s).useful - saved
        return {
            "name": name,
            "step_s": spread(times),
            "tokens_per_s": s.step_tokens / median,
            "flops_per_token": useful,
            "mfu": None if self.peak is None else useful * s.step_tokens / s.world / median / self.peak,
        }


def _stage(
    timer: Timer, rig: Rig, plan: StagePlan, batches: list[Batch], s: Sizes, traffic: Traffic, before: int
) -> dict[str, Any]:
    """The row for one stage with the backbone. before: bytes allocated before the rig was built."""
    device, rounds = timer.device, timer.rounds
    row = timer.row(s.stage.name, partial(rig.step, batches, plan), s)
    rig.step(batches, plan, looking=True)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
    # Marks and message counting cost time, so the parts are measured in separate rounds.
    parts: dict[str, list[float]] = {}
    marks = Marks(device)
    communication = 0.0
    messages: list[Transfer] = []
    traffic.on = True
    with marked(rig, marks):
        for _ in range(rounds):
            marks.end("begin")
            rig.step(batches, plan)
            marks.end("rest")
            for name, seconds in marks.seconds().items():
                parts.setdefault(name, []).append(seconds)
            messages, pairs = traffic.take()  # safe now: marks.seconds() has synchronised
            communication += sum(between(*pair) for pair in pairs) / rounds
    traffic.on = False
    return row | {
        "parts_s": {name: statistics.median(values) for name, values in parts.items()},
        "communication_s": communication,
        "bytes_sent": sum(message.bytes for message in messages),
        "collectives": len(messages),
        "peak_gib": None if peak is None else peak / GIB,
        "planned_peak_gib": allocated_bytes([s]) / GIB,
        "trainable": sorted(s.trainable),
    }


def stage_parts(timer: Timer, rig: Rig, plan: StagePlan, batches: list[Batch], s: Sizes, before: int) -> dict[str, Any]:
    """The row for one stage on one rank, with parts, memory, kernels and host waits."""
    row = _stage(timer, rig, plan, batches, s, Traffic(Marks(timer.device).now), before)
    return row | (device_counts(partial(rig.step, batches, plan)) if timer.device.type == "cuda" else {})


def _cached(
    timer: Timer, rig: Rig, plan: StagePlan, batches: list[Batch], s: Sizes, computed: dict[str, Any]
) -> dict[str, Any]:
    """The same stage with z as if from the feature cache: on the host, in the precision of the backbone."""
    device, dtype = timer.device, dtype_of(rig.config.train.precision)
    z = [torch.randn(int(batch.label_mask.sum()), s.base.hidden).to(dtype) for batch in batches]
    if device.type == "cuda":
        z = [part.pin_memory() for part in z]

    def step() -> None:
        rig.step(batches, plan, cached=[part.to(device, non_blocking=True) for part in z])

    row = timer.row(f"{s.stage.name}, z cached", step, s, saved=flops(s).backbone_forward)
    row["trainable"] = sorted(s.trainable)
    row["ratio"] = {
        "against": f"{s.stage.name}, z computed",
        "measured": computed["step_s"]["median"] / row["step_s"]["median"],
        "by_operations": cache_ratio(s),
    }
    return row


def _peer(
    timer: Timer, name: str, build: Callable[[], PeerStep], batches: list[Batch], s: Sizes, ours: dict[str, Any] | None
) -> dict[str, Any]:
    """A peer row, compared with our row `ours` if given. If the peer cannot run, the row contains the reason."""
    cuda = timer.device.type == "cuda"
    if "liger" in name and not cuda:
        return {"name": name, "skipped": "needs CUDA", "trainable": []}
    before = torch.cuda.memory_allocated()
    try:
        step = build()
        row = timer.row(name, partial(step, batches), s)
    except Exception as error:
        return {"name": name, "skipped": said(error), "trainable": []}
    row["mfu"] = None
    row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB if cuda else None
    row["trainable"] = []
    if not name.endswith(COMPILED):
        with counting(value for batch in batches for value in batch.tensors()) as launches:
            step(batches, launches.end)
        row |= launches.totals()
    row |= device_counts(partial(step, batches)) if cuda else {}
    if ours is not None:
        row["ratio"] = {
            "against": f"{ours['name']} over {name}, tokens/s",
            "measured": row["step_s"]["median"] / ours["step_s"]["median"],
            "by_operations": softmax_head_ratio(s),
        }
    return row


def _factors(rows: list[dict[str, Any]], sizes: list[Sizes], machine: Machine, world: int) -> dict[str, float]:
    """Measured over planned seconds, by part, in the stage with the most trainable groups."""
    index = max(range(len(sizes)), key=lambda i: (sizes[i].graph, len(sizes[i].trainable)))
    s = sizes[index]
    row = next(row for row in rows if row["name"] == s.stage.name)
    measured, planned = row["parts_s"], stage_cost(s, machine, world).time
    parts = ("backbone_forward", "backbone_backward", "heads", "optimizer")
    return {part: measured[part] / planned[part] for part in parts if planned[part] > 0 and measured.get(part, 0) > 0}


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def softmax_head_ratio(s: Sizes) -> float:
    """Predicted tokens/s of this stage relative to the same backbone with a trained softmax head, by operations."""
    each = flops(s)
    return (each.backbone + 6 * s.base.hidden * s.base.vocab) / each.useful


def cache_ratio(s: Sizes) -> float:
    """Predicted tokens/s with z from a cache relative to computing z, by operations."""
    heads = flops(s).heads
    return (work_of(s).forward(s.attended) + heads) / heads
