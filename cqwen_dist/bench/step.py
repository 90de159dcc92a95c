"""``cqwen bench step``: the whole training step by part, beside the same backbone trained by HF + PEFT.

Every stage of the config is run at its shapes with random weights: tokens/s, MFU (useful operations over the device's
peak), seconds by part, bytes said, peak memory beside the plan's. A stage of heads alone is run twice, with the
backbone and with z given as from the feature cache. Ratios stand beside those that operations predict (`plan.flops`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cqwen_dist.batch import Batch
from cqwen_dist.bench.parts import Marks, between, marked
from cqwen_dist.bench.peer import peer_step
from cqwen_dist.bench.profile import profile_steps
from cqwen_dist.bench.rig import Rig, build_rig
from cqwen_dist.config import Config
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.parallel.collectives import barrier
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.parallel.traffic import Traffic, Transfer
from cqwen_dist.plan import Architecture, read_architecture
from cqwen_dist.plan.cost import stage_cost
from cqwen_dist.plan.flops import cache_ratio, flops, softmax_head_ratio
from cqwen_dist.plan.machine import MACHINES, Machine, machine
from cqwen_dist.plan.make import tensor_bytes
from cqwen_dist.plan.memory import GIB, WORKSPACE, kept, phases
from cqwen_dist.plan.sizes import Kind, Sizes, stage_sizes
from cqwen_dist.training.stages import StagePlan

PEERS = {"hf+peft": False, "hf+peft+liger": True}
WARM_UP = 3


def measure(config: Config, *, rounds: int, peers: bool, profile: Path | None, gpu: str) -> dict[str, Any] | None:
    """`run` in a process group of its own (or the launcher's); None on other ranks than the first."""
    architecture = read_architecture(config)
    with distributed(config.parallel.timeout_min * 60) as runtime:
        if runtime.device.type == "cuda":
            shown = torch.cuda.get_device_name().lower()
            gpu = gpu or next((name for name in MACHINES if name in shown), "h100")
        known = machine(gpu or "cpu", "ib400")
        options = {"rounds": rounds, "peers": peers, "profile": profile}
        result = run(config, architecture, runtime, known, **options)  # type: ignore[arg-type]
        return result if runtime.is_main else None


def run(
    config: Config,
    architecture: dict[str, Any],
    runtime: Runtime,
    machine: Machine,
    *,
    rounds: int = 10,
    peers: bool = True,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Measure every stage of the config. Collective over the world; returns a JSON-ready document on every rank.

    machine: whose peak MFU is of, and whose stated rates the calibration is against. Raises `UserError` where config
    and ranks do not fit, ValueError for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, found {rounds}")
    kind: Kind = "cuda" if runtime.device.type == "cuda" else "cpu"
    sizes = stage_sizes(config, Architecture.of(architecture), world=runtime.world_size, kind=kind)
    traffic = Traffic(Marks(runtime.device).now)
    before = _allocated(runtime.device)
    rows: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    with traffic.watching():
        rig = build_rig(config, architecture, runtime)
        for index, s in enumerate(sizes):
            stage_plan = rig.enter(index)
            row = _stage(rig, stage_plan, s, traffic, machine, rounds, before)
            rows.append(row)
            if profile is not None:
                profiles.append(_profile(rig, stage_plan, profile / f"rank{runtime.rank}-{s.stage.name}"))
            if not s.graph:
                rows.append(_cached(rig, stage_plan, s, machine, rounds, row))
        batches = rig.batches(rig.schedule.plans[-1])
    del rig
    _empty(runtime.device)
    last = next((row for row in reversed(rows) if "lora" in row["trainable"]), None)
    if peers and runtime.world_size == 1 and last is not None:
        rows += _peers(config, architecture, runtime.device, batches, rounds, last, sizes, machine)
    return {
        "device": torch.cuda.get_device_name() if kind == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "world": runtime.world_size,
        "torch": torch.__version__,
        "precision": config.train.precision,
        "micro_batch_size": config.train.micro_batch_size,
        "sequence_length": config.data.sequence_length,
        "rounds": rounds,
        "compiled": config.model.compile_layers,
        "rows": rows,
        "profiles": profiles,
        "calibration": {"machine": machine.name, "factors": _factors(rows, sizes, machine, runtime.world_size)},
    }


def _stage(
    rig: Rig, at: StagePlan, s: Sizes, traffic: Traffic, machine: Machine, rounds: int, before: int
) -> dict[str, Any]:
    """One stage as it is trained."""
    batches = rig.batches(at)
    device = rig.runtime.device
    for _ in range(WARM_UP):
        rig.step(batches, at)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = _times(lambda: rig.step(batches, at), device, rounds)
    rig.step(batches, at, looking=True)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
    parts: dict[str, list[float]] = {}
    marks = Marks(device)
    traffic.on = True
    communication = 0.0
    messages: list[Transfer] = []
    with marked(rig, marks):
        for _ in range(rounds):
            marks.end("begin")
            rig.step(batches, at)
            marks.end("rest")
            for name, seconds in marks.seconds().items():
                parts.setdefault(name, []).append(seconds)
            messages, pairs = traffic.take()  # marks.seconds() waited for the device
            communication += sum(between(*pair) for pair in pairs) / rounds
    traffic.on = False
    by_part = {name: statistics.median(values) for name, values in parts.items()}
    tensors = tuple(kept(s))
    planned = tensor_bytes(tensors) + max(phase.bytes for phase in phases(s))
    planned += WORKSPACE * (device.type == "cuda")
    row = _row(s.stage.name, times, s, machine)
    row |= {
        "parts_s": by_part,
        "communication_s": communication,
        "bytes_sent": sum(message.bytes for message in messages),
        "collectives": len(messages),
        "peak_gib": None if peak is None else peak / GIB,
        "planned_peak_gib": planned / GIB,
        "trainable": sorted(s.trainable),
    }
    return row


def _profile(rig: Rig, at: StagePlan, folder: Path) -> dict[str, Any]:
    batches = rig.batches(at)
    return profile_steps(lambda: rig.step(batches, at), folder, rig.runtime.device)


def _cached(
    rig: Rig, at: StagePlan, s: Sizes, machine: Machine, rounds: int, computed: dict[str, Any]
) -> dict[str, Any]:
    """The same stage with z given, as the feature cache gives it (on the host, in the backbone's precision)."""
    batches, device = rig.batches(at), rig.runtime.device
    dtype = dtype_of(rig.config.train.precision)
    z = [torch.randn(int(batch.label_mask.sum()), s.base.hidden).to(dtype) for batch in batches]
    if device.type == "cuda":
        z = [part.pin_memory() for part in z]

    def step() -> None:
        rig.step(batches, at, cached=[part.to(device, non_blocking=True) for part in z])

    for _ in range(WARM_UP):
        step()
    row = _row(f"{s.stage.name}, z cached", _times(step, device, rounds), s, machine)
    useful = row["flops_per_token"] - flops(s).backbone_forward
    row["flops_per_token"] = useful
    row["mfu"] = useful * row["tokens_per_s"] / (machine.peak(s.width) * s.world)
    row["trainable"] = sorted(s.trainable)
    row["ratio"] = {
        "against": f"{s.stage.name}, z computed",
        "measured": computed["step_s"]["median"] / row["step_s"]["median"],
        "by_operations": cache_ratio(s),
    }
    return row


def _peers(
    config: Config,
    architecture: dict[str, Any],
    device: torch.device,
    batches: list[Batch],
    rounds: int,
    ours: dict[str, Any],
    sizes: list[Sizes],
    machine: Machine,
) -> list[dict[str, Any]]:
    """Plain HF + PEFT, and with Liger; each beside our last stage that trains adapters."""
    s = next(s for s in reversed(sizes) if "lora" in s.trainable)
    rows = []
    for name, liger in PEERS.items():
        if liger and device.type != "cuda":
            rows.append({"name": name, "skipped": "needs CUDA", "trainable": []})
            continue
        before = _allocated(device)
        try:
            step = peer_step(config, architecture, device, liger)
            for _ in range(WARM_UP):
                step(batches)
        except Exception as error:  # a peer that cannot run here is told, and ours stands
            rows.append({"name": name, "skipped": f"{type(error).__name__}: {error}"[:200], "trainable": []})
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = _times(lambda step=step: step(batches), device, rounds)  # type: ignore[misc]
        row = _row(name, times, s, machine)
        row["mfu"] = None
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB if device.type == "cuda" else None
        row["trainable"] = []
        row["ratio"] = {
            "against": f"{ours['name']} over {name}, tokens/s",
            "measured": row["step_s"]["median"] / ours["step_s"]["median"],
            "by_operations": softmax_head_ratio(s),
        }
        rows.append(row)
        del step
        _empty(device)
    return rows


def _row(name: str, times: list[float], s: Sizes, machine: Machine) -> dict[str, Any]:
    median = statistics.median(times)
    useful = flops(s).useful
    return {
        "name": name,
        "step_s": {"median": median, "min": min(times), "max": max(times)},
        "tokens_per_s": s.step_tokens / median,
        "flops_per_token": useful,
        "mfu": useful * s.step_tokens / s.world / median / machine.peak(s.width),
    }


def _times(step: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of `rounds` steps, every rank beginning together."""
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        barrier()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def _factors(rows: list[dict[str, Any]], sizes: list[Sizes], machine: Machine, world: int) -> dict[str, float]:
    """Measured seconds over those the stated rates give, by part, of the stage in which most trains."""
    index = max(range(len(sizes)), key=lambda i: (sizes[i].graph, len(sizes[i].trainable)))
    s = sizes[index]
    row = next(row for row in rows if row["name"] == s.stage.name)
    said = asdict(stage_cost(s, machine, world).time)
    found = {}
    for part in ("backbone_forward", "backbone_backward", "heads", "optimizer"):
        if said[part] > 0 and row["parts_s"].get(part, 0) > 0:
            found[part] = row["parts_s"][part] / said[part]
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(result: dict[str, Any]) -> Group:
    """``run``'s result for a terminal."""
    shape = f"{result['micro_batch_size']} x {result['sequence_length']} tokens a micro-batch, {result['precision']}"
    out = Table(title=f"Training step, {shape}, {result['world']} x {result['device']}", title_justify="left")
    columns = (
        "",
        "s (min-max)",
        "tokens/s",
        "MFU",
        "data",
        "forward",
        "heads",
        "backward",
        "optimizer",
        "communication",
        "GiB",
    )
    for column in columns:
        out.add_column(column, justify="left" if column == "" else "right")
    ratios = []
    for row in result["rows"]:
        if "skipped" in row:
            out.add_row(row["name"], "skipped", row["skipped"], *[""] * 8)
            continue
        s, parts = row["step_s"], row.get("parts_s")
        shares = [""] * 6
        if parts:
            whole = sum(parts.values())
            names = ("data", "backbone_forward", "heads", "backbone_backward", "optimizer")
            shares = [f"{parts.get(name, 0) / whole:.0%}" for name in names]
            shares.append(f"{row['communication_s'] / whole:.0%}")
        peak, planned = row.get("peak_gib"), row.get("planned_peak_gib")
        memory = "" if peak is None else f"{peak:.2f}" + (f" (plan {planned:.2f})" if planned else "")
        out.add_row(
            row["name"],
            f"{s['median']:.4g} ({s['min']:.4g}-{s['max']:.4g})",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.0%}",
            *shares,
            memory,
        )
        if "ratio" in row:
            ratio = row["ratio"]
            ratios.append(
                f"{row['name']} (against {ratio['against']}): {ratio['measured']:.2f} measured, "
                f"{ratio['by_operations']:.2f} by operations, {ratio['measured'] / ratio['by_operations']:.0%} of it"
            )
    shown: list[RenderableType] = [out, *(Text(line) for line in ratios)]
    shown += [
        Text(f"profile: {p['trace']}, {p['table']}; {p['host_syncs']:.0f} host waits a step")
        for p in result["profiles"]
    ]
    return Group(*shown)
