"""`cqwen plan`: the plan, and the changes with which a run fits, as JSON and as console tables."""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cqwen_dist.config import Config, UserError, as_list, source_files
from cqwen_dist.config.reading import given_config
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.cost import machine
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.memory import GIB, MIB
from cqwen_dist.tools.plan.question import Question

WHAT_MAY_FIT = "more ranks, more memory, shorter texts, or bf16 in place of fp32"
COUNTED_BYTES = 2**30  # texts in larger files are not counted, as that would take too long


def remedy(config: Config, **options: Any) -> tuple[dict[str, Any], Plan] | None:
    """Changes that make a run fit that does not, and the plan with them; None if nothing helps.

    Smaller micro-batches are tried first, then the same with each change below added to those before it; what a later
    change makes superfluous is left out. The meaning of a run (global batch, lengths, losses) never changes. options:
    those of `plan`.
    """
    ranks, features = max(1, options["gpus_per_node"]), config.trains("lora") or config.trains("embedding")
    largest, batch = config.train.micro_batch_size, config.train.global_batch_size
    ladder: list[tuple[str, Any]] = [("train.micro_batch_size", largest)]
    ladder += [("parallel.vocab_group_size", ranks)] * (ranks > 1)
    ladder += [("model.gradient_checkpointing", True)] * features
    ladder += [("parallel.zero_stage", 3)] * (ranks * options["nodes"] > 1)
    ladder += [("parallel.offload", "optimizer")] * features

    def fitting(changes: dict[str, Any]) -> Plan | None:
        with suppress(UserError):  # two keys that exclude each other
            if (planned := plan(given_config(config, changes), **options)).fits:
                return planned
        return None

    sizes = [size for size in range(largest, 0, -1) if batch % size == 0]
    for rungs, size in product(range(1, len(ladder) + 1), sizes):
        changes = {**dict(ladder[:rungs]), "train.micro_batch_size": size}
        if found := fitting(changes):
            for key in [*changes]:
                fewer = {name: value for name, value in changes.items() if name != key}
                if better := fitting(fewer):
                    changes, found = fewer, better
            return changes, found
    return None


def run(configs: Sequence[Config], asked: Question) -> tuple[dict[str, Any], RenderableType]:
    """Returns the plan, with a remedy if it does not fit, for JSON and as tables for a terminal.

    configs: of the runs of one job; the plan is of the one with the peak, with the memory of all. Raises `UserError`.
    """
    config = configs[0]
    known = machine(asked.gpu or ("h100" if asked.gpus_per_node else "cpu"), asked.interconnect)
    options: dict[str, Any] = {"gpu_memory_gib": asked.gpu_memory_gib, "machine": known, "text": asked.text_tokens}
    options |= {"nodes": asked.nodes, "gpus_per_node": asked.gpus_per_node, "architecture": read_architecture(config)}
    options |= {"sequences": asked.sequences or count_sequences(config), "price": asked.price}
    if configs[1:]:
        beside = {i: [*configs[:i], *configs[i + 1 :]] for i in range(len(configs))}
        peak = max(beside, key=lambda i: plan(configs[i], beside=beside[i], **options).device_gib)
        config, options["beside"] = configs[peak], beside[peak]
    planned = plan(config, **options)
    document, shown = planned.to_dict(), [*render(planned).renderables]
    if not planned.fits:
        found = remedy(config, **options)
        changes, better = found or ({}, planned)
        overrides = [f"{key}={str(value).lower()}" for key, value in changes.items()]
        document["remedy"] = {"overrides": overrides, "plan": better.to_dict()} if found else None
        said = f"with {' '.join(overrides)} it fits: {better.device_gib:.2f} GiB, {better.tokens_per_s:,.0f} tokens/s"
        shown.append(Text(said if found else f"nothing that was tried makes it fit: {WHAT_MAY_FIT}", style="yellow"))
    if planned.hours is None:
        try:  # a source of data.train that is not here
            for source in as_list(config.data.train):
                source_files(source, "data.train")
        except UserError as error:
            why = f"no steps and hours: {error.key}: {error.found} in {Path.cwd()} (--sequences N counts the texts)"
            shown.append(Text(why, style="yellow"))
    return document, Group(*shown)


def count_sequences(config: Config) -> int | None:
    """Counts the texts in an epoch: the lines in data.train, without held-out texts.

    Returns None for packed texts, and for files that are missing, large, or without a text per line.
    """
    data = config.data
    if data.pack:
        return None
    total = 0
    try:
        for source in as_list(data.train):
            for name in source_files(source, "data.train"):
                file = Path(name).expanduser()
                by_line = file.is_file() and file.suffix.lower() not in (".parquet", ".json", ".gz")
                if not by_line or file.stat().st_size > COUNTED_BYTES:
                    return None
                with file.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip()) - (file.suffix.lower() in (".csv", ".tsv"))
    except (OSError, UserError):
        return None
    total = min(total, data.limit or total)  # first the limit, then the share, as `data.sources` has it
    return total - math.ceil(total * data.eval_fraction) or None


def render(plan: Plan) -> Group:
    """Tables for `rich`: a line of facts, memory by part, time by stage, the verdict."""
    ranks = f"{plan.world} rank{'s' * (plan.world > 1)} on {plan.nodes} node{'s' * (plan.nodes > 1)}"
    facts = (
        f"{ranks}; base {plan.base_parameters:,} parameters, trained {plan.trainable_parameters:,}; "
        f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} a step; "
        f"checkpoint {_size(plan.checkpoint_bytes)}"
    )
    if plan.world > 1:
        facts += f"\nheads: a rank sends {_size(plan.head_bytes_sent)} a step"
    verdict = Text(plan.reason, style="green" if plan.fits else "red")
    total = "hours: not known (a stage is given in epochs; give --sequences)"
    if plan.hours is not None:
        gpus = f", {plan.gpu_hours:.1f} GPU-hours" if plan.gpus_per_node else ""
        total = f"{_takes(plan, plan.hours)}{gpus} (evaluations and checkpoints not counted)"
    return Group(Text(facts), _memory(plan), _stages(plan), Text(total), verdict)


def _memory(plan: Plan) -> Table:
    whole = round(plan.device_gib * GIB)
    unit, each = ("GiB", GIB) if whole >= GIB else ("MiB", MIB)
    title = f"Memory of one rank (stage {plan.stage}, {plan.moment})"
    table = Table("part", Column(unit, justify="right"), "how", title=title, title_justify="left")
    for part in plan.parts:
        how = Text(part.how + (" (host)" if part.place == "host" else ""))  # in a str, brackets are markup
        amount = part.bytes / each
        table.add_row(part.name, f"{amount:.3f}" if amount >= 0.0005 else "<0.001", how)
    table.add_section()
    table.add_row("all", f"{whole / each:.3f}", f"host: {_size(round(plan.host_gib * GIB))}" if plan.host_gib else "")
    return table


def _size(count: float) -> str:
    for unit, each in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= each:
            return f"{count / each:,.2f} {unit}"
    return f"{count:.0f} bytes"


def _stages(plan: Plan) -> Table:
    """One row per metric and one column per stage, as a run has few stages and terminals are narrow."""
    table = Table("stage", title=f"One optimizer step on {plan.machine.name} (stated rates)", title_justify="left")
    shown = {"backbone_forward": "forward", "backbone_backward": "backward", "exposed_launches": "starting kernels"}
    rows: dict[str, list[str]] = defaultdict(list)
    for stage in plan.stages:
        table.add_column(stage.stage, justify="right")
        rows["steps"].append("?" if stage.steps is None else f"{stage.steps:,}")
        rows["seconds of a step"].append(f"{stage.seconds:.4g}")
        for part, seconds in stage.time.items():
            rows[shown.get(part, part)].append(f"{seconds / stage.seconds:.0%}")
        rows["tokens/s"].append(f"{stage.tokens_per_s:,.0f}")
        rows["MFU"].append(f"{stage.mfu:.0%}")
        sent = f"{_size(stage.bytes_sent)} in {stage.collectives} messages" if stage.collectives else "no message"
        rows["a rank sends"].append(sent)
        rows["all steps"].append("?" if stage.hours is None else _takes(plan, stage.hours))
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _takes(plan: Plan, hours: float) -> str:
    """Hours in words, and their cost."""
    minutes = f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else "under a minute"
    money = "" if plan.price is None else f" for {hours * plan.world * plan.price:,.2f}"
    return (f"{hours:.2f} hours" if hours >= 0.1 else minutes) + money
