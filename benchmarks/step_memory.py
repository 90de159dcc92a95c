"""Measured and planned peak memory of real training steps, on random weights.

The measured value is the peak in torch's allocator: on CUDA from the allocator statistics, on a CPU from the totals
that the profiler records at each allocation. The planned value is the tensor memory in `cqwen plan`, without context
and fragmentation.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.rig import build_rig
from cqwen_dist.config import Config
from cqwen_dist.config.architectures.base_architecture import USUAL
from cqwen_dist.config.reading import given_config
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.make import tensor_bytes, worst
from cqwen_dist.tools.plan.memory import MIB, WORKSPACE, of_run
from cqwen_dist.tools.plan.stage_sizes import Sizes, stage_sizes
from cqwen_dist.training.shared import Shared

STEPS = 2  # plain steps, before the step that measures accuracy and constraint
ALL = ["heads", "embedding", "lora"]
BF16 = {"train.precision": "bf16"}
SMALL: dict[str, Any] = {
    "model_type": USUAL,
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def allocated_bytes(sizes: list[Sizes]) -> int:
    """The planned peak in torch's allocator over these stages, on a GPU including the maths library's workspaces."""
    return tensor_bytes(worst(sizes)[2]) + WORKSPACE * (sizes[0].kind == "cuda")


class Case(NamedTuple):
    """A configuration. changes: dotted config keys. trains: the trainable groups in each stage. runs: of one job."""

    name: str
    architecture: dict[str, Any]
    changes: dict[str, Any]
    trains: list[list[str]]
    runs: int = 1


def config_of(case: Case) -> Config:
    """The config for a case."""
    document = {
        "model": {"architecture": case.architecture},
        "data": {"train": "unused", "sequence_length": 256},
        "stages": [
            {"name": f"stage {i}" if i else "first", "train": groups, "steps": 10}
            for i, groups in enumerate(case.trains)
        ],
        "train": {"micro_batch_size": 4, "global_batch_size": 4},
    }
    return given_config(document, case.changes)


def measure(
    config: Config, architecture: dict[str, Any], runtime: Runtime, groups: Groups | None = None, runs: int = 1
) -> dict[str, Any]:
    """Returns {measured_mib, predicted_mib, ratio, stage, moment} for a config. Collective over the world.

    runs: so many runs with the config, which take their steps in turns, as those of a job.
    """

    def build() -> Callable[[], None]:
        shared = Shared(Path(config.run.dir), runs)
        rigs = [build_rig(config, architecture, runtime, groups, shared=shared) for _ in range(runs)]

        def steps() -> None:
            for index in range(len(config.stages)):
                plans = [rig.enter(index) for rig in rigs]
                batches = rigs[0].batches(plans[0])
                for i in range(STEPS + 1):
                    for rig, at in zip(rigs, plans, strict=True):
                        rig.step(batches, at, looking=i == STEPS)

        return steps

    measured = peak_of(build, runtime.device)
    base = Architecture.of(architecture)
    sizes = stage_sizes(config, base, world=runtime.world_size, kind=runtime.device.type)
    (s, phase, _), predicted = worst(sizes), allocated_bytes(sizes) + (runs - 1) * of_run(sizes)
    return {
        "measured_mib": measured / MIB,
        "predicted_mib": predicted / MIB,
        "ratio": predicted / measured,
        "stage": s.stage.name,
        "moment": phase,
    }


def peak_of(build: Callable[[], Callable[[], None]], device: torch.device) -> int:
    """Peak allocator bytes during the work that `build` returns, including the bytes that `build` allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        work = build()
        gc.collect()
        return torch.cuda.memory_allocated() - before + (peak_growth_bytes(work, device) or 0)
    _count_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        work = build()
        gc.collect()
        with record_function("the work"):
            work()
    assert traced.profiler is not None
    events = list(_with_children(traced.profiler.kineto_results.experimental_event_tree()))
    # The peak counts only while the work runs; `before` is the total just before the first recorded allocation.
    began = min(event.start_time_ns for event in events if event.name == "the work")
    memory = sorted((e for e in events if e.name == "[memory]"), key=lambda e: e.start_time_ns)
    before = memory[0].extra_fields.total_allocated - memory[0].extra_fields.alloc_size
    return max(e.extra_fields.total_allocated for e in memory if e.start_time_ns >= began) - before


def _count_all_threads() -> None:
    """Make torch's CPU memory total include every thread from now on.

    The profiler records only this thread, but Gloo threads also free tensors from collectives, and more of them on a
    busy machine. torch exposes the switch only as a C++ variable.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _with_children(events: list[Any]) -> Iterator[Any]:
    """Yields the profiler events and all their descendants."""
    left = list(events)
    while left:
        event = left.pop()
        yield event
        left += event.children


def peak_growth_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes during ``work`` minus the bytes allocated before it.

    CUDA: from torch's allocator. CPU: from the resident high-water mark, so scratch space inside the maths library
    counts too; Linux only, None elsewhere.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise freed blocks still count as resident before the work
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = status_bytes("self", "VmRSS")
    except OSError:
        work()
        return None
    work()
    return status_bytes("self", "VmHWM") - before


def status_bytes(pid: int | str, field: str) -> int:
    """A field in /proc/PID/status in bytes. Raises OSError if it is missing."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/{pid}/status")
