"""``cqwen bench memory``: peak memory of real training steps beside the plan's prediction, over many configurations.

Each case builds the model and its engine, enters every stage and takes steps, some of them looking at the accuracy and
the constraint. Measured is the most that torch's allocator has given out at once: on CUDA its own statistics, on a CPU
the allocations and frees that the profiler records. Predicted is `Plan`'s tensors, without context and fragmentation.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from cqwen_dist.bench.rig import build_rig
from cqwen_dist.config import Config
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.plan import Architecture
from cqwen_dist.plan.make import tensor_bytes, worst
from cqwen_dist.plan.memory import MIB, WORKSPACE
from cqwen_dist.plan.sizes import stage_sizes

STEPS = 2  # and one that looks


class Case(NamedTuple):
    """A configuration by what it changes; keys of `changes` are dotted, as on the command line."""

    name: str
    architecture: dict[str, Any]
    changes: dict[str, Any]


SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
# Qwen2.5-0.5B, with as many layers as a case asks for.
HALF: dict[str, Any] = {
    **SMALL,
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
SEVEN: dict[str, Any] = {
    **SMALL,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
ALL, NO_LORA, HEADS = ["heads", "embedding", "lora"], ["heads", "embedding"], ["heads"]
QV = ["q_proj", "v_proj"]


def cases(kind: str) -> list[Case]:
    """What is tried by itself: small models on a CPU, those of real width on a GPU."""
    return _on_gpu() if kind == "cuda" else _on_cpu()


def _on_cpu() -> list[Case]:
    def case(name: str, changes: dict[str, Any] | None = None, **architecture: Any) -> Case:
        return Case(name, {**SMALL, **architecture}, {"stages.0.train": ALL, **(changes or {})})

    bf16 = {"train.precision": "bf16"}
    return [
        case("adapters on all, fp32"),
        case("adapters on all, bf16", bf16),
        case("embedding alone", {"stages.0.train": NO_LORA}),
        case("heads alone", {"stages.0.train": HEADS}),
        case("heads alone, bf16", {"stages.0.train": HEADS, **bf16}),
        case("adapters alone", {"stages.0.train": ["lora"]}),
        case("the classifier alone", {"stages.0.train": ["classifier"]}),
        case("adapters on q and v", {"model.lora.target_modules": QV}),
        case("rank 64", {"model.lora.r": 64}),
        case("dropout", {"model.lora.dropout": 0.1}),
        case("checkpointing", {"model.gradient_checkpointing": True}),
        case("checkpointing, bf16", {"model.gradient_checkpointing": True, **bf16}),
        case("packed", {"data.pack": True}),
        case("packed, bf16", {"data.pack": True, **bf16}),
        case("accumulation", {"train.global_batch_size": 12}),
        case("a large vocabulary", vocab_size=40_000),
        case("a large vocabulary, accumulation", {"train.global_batch_size": 8}, vocab_size=40_000),
        case("a large vocabulary, heads, bf16", {"stages.0.train": HEADS, **bf16}, vocab_size=40_000),
        case("qwen3", model_type="qwen3", head_dim=32),
        case("qwen3, bf16", bf16, model_type="qwen3", head_dim=32),
        case("ZeRO-2", {"parallel.zero_stage": 2}),
        case("C of 128", {"model.causal_size": 128}),
        case(
            "long sequences", {"data.sequence_length": 768, "train.micro_batch_size": 1, "train.global_batch_size": 1}
        ),
        case("one short sequence", {"data.sequence_length": 32, "train.micro_batch_size": 1}),
        case("wide", hidden_size=512, intermediate_size=1024),
        case("KL held", {"loss.constraint.mode": "dual"}, hidden_size=512, num_hidden_layers=2),
        case("no constraint", {"loss.constraint.mode": "off"}),
        case("scalar C, seeds' start", {"train.thresholds": "scalar", "start": "seed"}),
        Case("heads, then all", SMALL, {"stages.0.train": HEADS, "stages.1.train": ALL}),
        case("ZeRO-3", {"parallel.zero_stage": 3}),  # last: it changes torch's linear map for the whole process
        case("ZeRO-3, q and v", {"parallel.zero_stage": 3, "model.lora.target_modules": QV}),
    ]


def _on_gpu() -> list[Case]:
    def case(name: str, micro: int, layers: int = 24, of: dict[str, Any] = HALF, **changes: Any) -> Case:
        own = {key.replace("__", "."): value for key, value in changes.items()}
        size = own.pop("train.global_batch_size", micro)
        common = {
            "data.sequence_length": 1024,
            "stages.0.train": ALL,
            "train.precision": "bf16",
            "train.micro_batch_size": micro,
            "train.global_batch_size": size,
        }
        return Case(name, {**of, "num_hidden_layers": layers}, {**common, **own})

    return [
        case("0.5B, 8 x 1024", 8),
        case("0.5B, 1 x 1024", 1),
        case("0.5B, 16 x 1024", 16),
        case("0.5B, 32 x 256", 32, data__sequence_length=256),
        case("0.5B, 2 x 4096", 2, data__sequence_length=4096),
        case("0.5B, checkpointing", 8, model__gradient_checkpointing=True),
        case("0.5B, dropout", 8, model__lora__dropout=0.1),
        case("0.5B, q and v", 8, model__lora__target_modules=QV),
        case("0.5B, accumulation", 4, train__global_batch_size=12),
        case("0.5B, packed", 8, data__pack=True),
        case("0.5B, heads", 8, stages__0__train=HEADS),
        case("0.5B, embedding and heads", 8, stages__0__train=NO_LORA),
        case("0.5B, fp32", 4, train__precision="fp32"),
        case("0.5B, ZeRO-2", 8, parallel__zero_stage=2),
        case("0.5B, KL held", 8, loss__constraint__mode="dual"),
        case("0.5B, chunked loss", 8, 6, loss__impl="chunked"),
        case("7B wide, 4 layers, 4 x 1024", 4, 4, SEVEN),
        case("7B wide, 4 layers, heads", 8, 4, SEVEN, stages__0__train=HEADS),
        case("7B wide, 8 layers, checkpointing", 8, 8, SEVEN, model__gradient_checkpointing=True),
        case("7B, 2 x 1024", 2, 28, SEVEN),
    ]


def config_of(case: Case) -> Config:
    """The case's config."""
    document: dict[str, Any] = {
        "model": {"architecture": case.architecture},
        "data": {"train": "unused", "sequence_length": 256},
        "stages": [{"name": "first", "steps": 10}],
        "train": {"micro_batch_size": 4, "global_batch_size": 4},
    }
    for key, value in case.changes.items():
        *path, last = key.split(".")
        at: Any = document
        for step in path:
            if isinstance(at, list):
                if int(step) == len(at):
                    at.append({"name": f"stage {step}", "steps": 10})
                at = at[int(step)]
            else:
                at = at.setdefault(step, {})
        at[last] = value
    train = document["train"]
    train["global_batch_size"] = max(train["global_batch_size"], train["micro_batch_size"])
    return Config.model_validate(document)


def measure(case: Case, runtime: Runtime, groups: Groups | None = None) -> dict[str, Any]:
    """One case: {name, measured, predicted, ratio, stage, moment}, MiB. Collective over the world."""
    config, device = config_of(case), runtime.device
    kind = "cuda" if device.type == "cuda" else "cpu"

    def work() -> Callable[[], None]:
        rig = build_rig(config, case.architecture, runtime, groups)

        def steps() -> None:
            for index in range(len(config.stages)):
                at = rig.enter(index)
                batches = rig.batches(at)
                for i in range(STEPS + 1):
                    rig.step(batches, at, looking=i == STEPS)

        return steps

    measured = peak_of(work, device)
    base = Architecture.of(case.architecture)
    sizes = stage_sizes(config, base, world=runtime.world_size, kind="cuda" if kind == "cuda" else "cpu")
    s, phase, parts = worst(sizes)
    predicted = tensor_bytes(parts) + (WORKSPACE if kind == "cuda" else 0)
    return {
        "name": case.name,
        "measured_mib": measured / MIB,
        "predicted_mib": predicted / MIB,
        "ratio": predicted / measured,
        "stage": s.stage.name,
        "moment": phase.name,
    }


def measure_all(only: list[str]) -> tuple[list[dict[str, Any]], str]:
    """(every case whose name holds one of `only`, or all, on this machine's device; the device's name)."""
    with distributed() as runtime:
        kind = runtime.device.type
        chosen = [case for case in cases(kind) if not only or any(word in case.name for word in only)]
        rows = []
        for case in chosen:
            rows.append(measure(case, runtime))
            print(f"{case.name}: {rows[-1]['ratio']:.3f} of measured", file=sys.stderr)
        return rows, torch.cuda.get_device_name() if kind == "cuda" else "cpu"


def peak_of(build: Callable[[], Callable[[], None]], device: torch.device) -> int:
    """Most bytes that torch's allocator has given out at once during the work that `build` returns, of what was
    allocated since `build` began."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        work = build()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        work = build()
        gc.collect()
        with record_function("the work"):
            work()
    assert traced.profiler is not None
    events = list(traced.profiler.kineto_results.events())
    began = min(event.start_ns() for event in events if event.name() == "the work")
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= began:
            peak = max(peak, held)
    return peak


def table(rows: list[dict[str, Any]], device: str) -> Table:
    """For a terminal."""
    out = Table(title=f"Peak memory of training steps, {device}", title_justify="left")
    for column in ("configuration", "measured MiB", "planned MiB", "planned / measured", "most at"):
        out.add_column(column, justify="left" if column in ("configuration", "most at") else "right")
    for row in rows:
        cells = (f"{row['measured_mib']:,.1f}", f"{row['predicted_mib']:,.1f}", f"{row['ratio']:.3f}")
        out.add_row(row["name"], *cells, f"{row['stage']}: {row['moment']}")
    return out
