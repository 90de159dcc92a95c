"""Measures training steps on the ranks of a launcher and compares them with the plan.

For each ZeRO stage, on random weights, it reports the collective bytes per step on this rank (counted, and predicted
by `plan.comm`), the peak of torch's allocator over all ranks (measured, and predicted by `plan.memory`) and tokens/s.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.rig import build_rig
from benchmarks.step_memory import ALL, BF16, SMALL, Case, config_of, measure
from benchmarks.timing import device_name, seconds_of
from benchmarks.traffic import Traffic
from cqwen_dist.config import Config
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.sizes.architecture import Architecture, known_architecture
from cqwen_dist.tools.plan.comm import step_messages
from cqwen_dist.tools.plan.stage_sizes import stage_sizes
from cqwen_dist.tools.site.accept import layouts

WARM, TIMED = 2, 5  # steps
TINY = 64  # bytes per rank; counts, norms and flags are smaller, and the plan leaves them out


def measure_ranks() -> dict[str, Any] | None:
    """Returns the results on rank 0 and None on the other ranks. Collective: every rank of the launcher calls it."""
    traffic = Traffic(time.perf_counter)
    # Watch from the start: DeepSpeed keeps the collectives that it finds first.
    with distributed() as runtime, traffic.watching():
        gpu = runtime.device.type == "cuda"
        found: dict[str, Any] = {"ranks": runtime.world_size, "device": device_name(runtime.device)}
        found["layouts"] = [_layout(runtime, traffic, *at, gpu) for at in layouts(runtime.world_size)]
        return found if runtime.is_main else None


def _layout(runtime: Runtime, traffic: Traffic, zero: int, group: int, gpu: bool) -> dict[str, Any]:
    rows, length = (8, 1024) if gpu else (4, 64)
    changes = {
        "parallel.zero_stage": zero,
        "parallel.vocab_group_size": group,
        "data.sequence_length": length,
        "train.micro_batch_size": rows,
        "train.global_batch_size": rows * runtime.world_size,
    }
    architecture = (known_architecture("Qwen/Qwen2.5-0.5B") or SMALL) if gpu else SMALL
    config = config_of(Case("", architecture, changes | (BF16 if gpu else {}), [ALL]))
    seconds = _seconds(runtime, traffic, config, architecture)
    least = TINY * runtime.world_size
    said = sum(message.bytes for message in traffic.take()[0] if message.ranks > 1 and message.bytes > least)
    base = Architecture.of(architecture)
    (sizes,) = stage_sizes(config, base, world=runtime.world_size, kind=runtime.device.type)
    planned = sum(message.bytes for message in step_messages(sizes) if message.bytes > least)
    memory = max(gather_objects(measure(config, architecture, runtime)), key=lambda row: row["measured_mib"])
    return {
        "zero_stage": zero,
        "vocab_group_size": group,
        "said_bytes": said,
        "planned_bytes": planned,
        "measured_mib": memory["measured_mib"],
        "planned_mib": memory["predicted_mib"],
        "tokens_per_s": rows * length * runtime.world_size / max(gather_objects(seconds)),
    }


def _seconds(runtime: Runtime, traffic: Traffic, config: Config, architecture: dict[str, Any]) -> float:
    """Median seconds of a step on this rank. Afterwards `traffic` contains the messages from one step."""
    rig = build_rig(config, architecture, runtime)
    plan = rig.enter(0)
    batches = rig.batches(plan)
    for _ in range(WARM):
        rig.step(batches, plan)
    traffic.on = True
    rig.step(batches, plan)
    traffic.on = False
    return statistics.median(seconds_of(lambda: rig.step(batches, plan), runtime.device) for _ in range(TIMED))


def lines(found: dict[str, Any]) -> str:
    """The results of `measure_ranks` as text for a terminal."""
    out = [f"{found['ranks']} ranks, {found['device']}"]
    for row in found["layouts"]:
        out.append(
            f"ZeRO-{row['zero_stage']}, vocabulary group {row['vocab_group_size']}: said {row['said_bytes']:,} bytes "
            f"(planned {row['planned_bytes']:,}), {row['measured_mib']:,.1f} MiB (planned {row['planned_mib']:,.1f}), "
            f"{row['tokens_per_s']:,.0f} tokens/s"
        )
    return "\n".join(out)
