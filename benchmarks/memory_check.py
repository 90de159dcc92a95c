"""Measured and planned peak memory of training steps, over many configurations.

Each case builds a model and an engine, enters every stage and takes steps. The last step in a stage also measures
the accuracy and the constraint (`site.step_memory`).

With --world, this process is rank 0 in a fake world (`fake_world`).
"""

from __future__ import annotations

import sys
from importlib.resources import files
from math import gcd
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from benchmarks.fake_world import one_of
from benchmarks.step_memory import ALL, BF16, SMALL, Case, config_of, measure
from benchmarks.timing import device_name, said
from cqwen_dist.config import Config, load_config
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.sizes.architecture import known_architecture, read_architecture

PARTS = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 8}
PARTS |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts_per_tok": 2}
PARTS |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
FURTHER: list[dict[str, Any]] = [
    {"model_type": kind, **{key: size for key, size in PARTS.items() if key in base.defaults}}
    for kind, base in ARCHITECTURES.items()
    if base.experts or any(mixer.qk_norm for mixer in base.mixers.values())
]
NO_LORA, HEADS = ["heads", "embedding"], ["heads"]
QV = {"model.lora.target_modules": ["q_proj", "v_proj"]}
PACKED = {"data.pack": True}
CHECKPOINTING = {"model.gradient_checkpointing": True}
ZERO_2, ZERO_3 = {"parallel.zero_stage": 2}, {"parallel.zero_stage": 3}
WITHIN = PACKED | {"model.attention": "varlen"}  # each text attends only to itself
KL_HELD = {"loss.constraint.mode": "dual"}
# A 72B model's proportions at an eighth of its width. A layer has 0.88 of the numbers that ZeRO-3 may keep gathered.
LIKE_72B = {
    **SMALL,
    "vocab_size": 19_008,
    "hidden_size": 1024,
    "intermediate_size": 3696,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
}
LIVE = {f"stage3_max_{key}": 15_600_000 for key in ("live_parameters", "reuse_distance")}
LIVE |= {"stage3_prefetch_bucket_size": 780_000, "stage3_param_persistence_threshold": 1560}
AS_72B = BF16 | ZERO_3 | CHECKPOINTING | PACKED | {"deepspeed.zero_optimization": LIVE}
OF_A_JOB: dict[str, Any] = {
    "heads": (None, HEADS),
    "heads, numbers alone": ({"loss.words": "none"}, HEADS),
    "heads, bf16": (BF16, HEADS),
    "all": (None, ALL),
    "all, numbers alone": ({"loss.words": "none"}, ALL),
    "heads, then all, bf16": (BF16, HEADS, ALL),
}
OWN_CONFIGS = ("7b", "14b", "32b", "72b")  # measured on a GPU with --world


def cases(kind: str) -> list[Case]:
    """The cases for a kind of device: small models on a CPU, full-width models on a GPU."""
    return _on_gpu() if kind == "cuda" else _on_cpu()


def _on_cpu() -> list[Case]:
    def case(name: str, changes: dict[str, Any] | None = None, *trains: list[str], **architecture: Any) -> Case:
        return Case(name, {**SMALL, **architecture}, changes or {}, [*trains] or [ALL])

    return [
        case("adapters on all, fp32"),
        case("adapters on all, bf16", BF16),
        case("embedding alone", None, NO_LORA),
        case("heads alone", None, HEADS),
        case("heads alone, bf16", BF16, HEADS),
        case("adapters alone", None, ["lora"]),
        case("the classifier alone", None, ["classifier"]),
        case("adapters on q and v", QV),
        case("rank 64", {"model.lora.r": 64}),
        case("dropout", {"model.lora.dropout": 0.1}),
        case("checkpointing", CHECKPOINTING),
        case("checkpointing, bf16", CHECKPOINTING | BF16),
        case("packed", PACKED),
        case("packed, bf16", PACKED | BF16),
        case("packed without a mask", WITHIN),
        case("packed without a mask, bf16", WITHIN | BF16),
        case("packed without a mask, long", WITHIN | _batch(768, 1)),
        case("packed without a mask, q and v", WITHIN | QV),
        case("accumulation", {"train.global_batch_size": 12}),
        case("accumulation, bf16", BF16 | {"train.global_batch_size": 12, "model.lora.r": 64}),
        case("a large vocabulary", vocab_size=40_000),
        case("a large vocabulary, accumulation", {"train.global_batch_size": 8}, vocab_size=40_000),
        case("a large vocabulary, heads, bf16", BF16, HEADS, vocab_size=40_000),
        *(case(each["model_type"], **each) for each in FURTHER),
        *(case(f"{each['model_type']}, bf16", BF16, **each) for each in FURTHER),
        case("ZeRO-2", ZERO_2),
        case("C of 128", {"model.causal_size": 128}),
        case("long sequences", _batch(768, 1)),
        case("one short sequence", {"data.sequence_length": 32, "train.micro_batch_size": 1}),
        case("wide", hidden_size=512, intermediate_size=1024),
        case("KL held", KL_HELD, hidden_size=512, num_hidden_layers=2),
        case("no constraint", {"loss.constraint.mode": "off"}),
        case("seeds' start", {"start": "seed"}),
        case("heads, then all", None, HEADS, ALL),
        *(case(f"4 runs of a job, {name}", *given)._replace(runs=4) for name, given in OF_A_JOB.items()),
        case("ZeRO-3", ZERO_3),  # last, because DeepSpeed then patches torch's linear map for the process
        case("ZeRO-3, q and v", ZERO_3 | QV),
    ]


def _on_gpu() -> list[Case]:
    def case(
        name: str,
        micro: int,
        changes: dict[str, Any] | None = None,
        trains: list[str] = ALL,
        size: str = "0.5B",
        **architecture: int,
    ) -> Case:
        architecture = {**(known_architecture(f"Qwen/Qwen2.5-{size}") or {}), **architecture}
        return Case(name, architecture, BF16 | _batch(1024, micro) | (changes or {}), [trains])

    return [
        case("0.5B, 8 x 1024", 8),
        case("0.5B, 1 x 1024", 1),
        case("0.5B, 16 x 1024", 16),
        case("0.5B, 32 x 256", 32, {"data.sequence_length": 256}),
        case("0.5B, 2 x 4096", 2, {"data.sequence_length": 4096}),
        case("0.5B, checkpointing", 8, CHECKPOINTING),
        case("0.5B, dropout", 8, {"model.lora.dropout": 0.1}),
        case("0.5B, q and v", 8, QV),
        case("0.5B, accumulation", 4, {"train.global_batch_size": 12}),
        case("0.5B, packed", 8, PACKED),
        case("0.5B, packed without a mask", 8, WITHIN),
        case("0.5B, heads", 8, trains=HEADS),
        case("0.5B, embedding and heads", 8, trains=NO_LORA),
        case("0.5B, fp32", 4, {"train.precision": "fp32"}),
        case("0.5B, ZeRO-2", 8, ZERO_2),
        case("0.5B, KL held", 8, KL_HELD),
        case("7B wide, 4 layers, 4 x 1024", 4, size="7B", num_hidden_layers=4),
        case("7B wide, 4 layers, heads", 8, trains=HEADS, size="7B", num_hidden_layers=4),
        case("7B wide, 8 layers, checkpointing", 8, CHECKPOINTING, size="7B", num_hidden_layers=8),
        case("7B, 2 x 1024", 2, size="7B"),
    ]


def _in_world(world: int) -> list[Case]:
    """Small models in vocabulary groups of up to 8. A large world uses two layers, because the profiler records an
    event per weight and rank."""
    layers = {"num_hidden_layers": 2} if world > 256 else {}
    over = {"model.attention": "varlen", **_batch(2048, 1)}

    def case(name: str, changes: dict[str, Any], *trains: list[str], **architecture: Any) -> Case:
        architecture |= layers
        spread = {"parallel.vocab_group_size": gcd(8, world), **_batch(256, 2), "train.global_batch_size": 2 * world}
        return Case(name, {**SMALL, **architecture}, spread | changes, [*trains] or [ALL])

    return [
        case("ZeRO-1, bf16", BF16),
        case("ZeRO-2, bf16", BF16 | ZERO_2),
        case("ZeRO-3, fp32", ZERO_3),
        case("ZeRO-3, bf16, q and v", BF16 | ZERO_3 | QV),
        case("ZeRO-3, bf16, a large vocabulary", BF16 | ZERO_3, vocab_size=40_000),
        case("texts over 2 ranks", over | {"parallel.sequence_group_size": 2}),
        case(
            "texts over 8 ranks, ZeRO-3, bf16",
            over | BF16 | ZERO_3 | CHECKPOINTING | {"parallel.sequence_group_size": 8},
        ),
        case("as 72B: heads", AS_72B, HEADS, **LIKE_72B),
        case("as 72B: heads, then all", AS_72B, HEADS, ALL, **LIKE_72B),
    ]


def _batch(length: int, micro: int) -> dict[str, Any]:
    """The changes for one micro-batch with `micro` sequences."""
    return {"data.sequence_length": length, "train.micro_batch_size": micro, "train.global_batch_size": micro}


def measure_all(only: list[str]) -> tuple[list[dict[str, Any]], str]:
    """(rows for the cases whose name contains one of `only`, or for all cases; the device name)."""
    with distributed() as runtime:
        chosen = [(case.name, config_of(case), case.architecture, case.runs) for case in cases(runtime.device.type)]
        return _measured(chosen, runtime, only), device_name(runtime.device)


def measure_world(world: int, configs: list[Path], only: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Like `measure_all`, but as rank 0 in a fake world. configs: if empty, the default cases for the device."""
    with one_of(world) as runtime:
        gpu, chosen = runtime.device.type == "cuda", []
        if gpu and not configs:
            configs = [Path(str(files("cqwen_dist") / "configs" / f"qwen2.5-{size}.yaml")) for size in OWN_CONFIGS]
        for path in configs:
            config = load_config(path)
            chosen.append((path.stem, config, read_architecture(config), 1))
        if not chosen:
            chosen = [(case.name, config_of(case), case.architecture, case.runs) for case in _in_world(world)]
        chosen.sort(key=lambda item: item[1].parallel.zero_stage == 3)  # last: see `_on_cpu`
        return _measured(chosen, runtime, only), f"rank 0 of {world}, {device_name(runtime.device)}"


def _measured(
    chosen: list[tuple[str, Config, dict[str, Any], int]], runtime: Runtime, only: list[str]
) -> list[dict[str, Any]]:
    """A row for each (name, config, architecture, runs) whose name contains one of `only`, or for all."""
    rows = []
    for name, config, architecture, runs in chosen:
        if not only or any(word in name for word in only):
            row: dict[str, Any] = {"name": name}
            try:
                row |= measure(config, architecture, runtime, runs=runs)
            except RuntimeError as error:  # for example out of memory: keep the other rows
                row["skipped"] = said(error)
            rows.append(row)
            print(name, row.get("skipped") or f"{row['ratio']:.3f} of measured", sep=": ", file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]], device: str) -> Table:
    """The result of `measure_all` as a table for a terminal."""
    numbers = (Column(name, justify="right") for name in ("measured MiB", "planned MiB", "planned / measured"))
    title = f"Peak memory of training steps, {device}"
    out = Table("configuration", *numbers, "most at", title=title, title_justify="left")
    for row in rows:
        if "skipped" in row:
            out.add_row(row["name"], "skipped", row["skipped"])
            continue
        cells = (f"{row['measured_mib']:,.1f}", f"{row['predicted_mib']:,.1f}", f"{row['ratio']:.3f}")
        out.add_row(row["name"], *cells, f"{row['stage']}: {row['moment']}")
    return out
