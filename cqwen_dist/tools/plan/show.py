"""Shows a plan as console tables, and as the comment lines above a written config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cqwen_dist.tools.plan.make import Plan
from cqwen_dist.tools.plan.memory import GIB, MIB
from cqwen_dist.tools.plan.search import SIMPLER_WITHIN, FittingLayout


def render(plan: Plan, choices: Sequence[FittingLayout] = ()) -> Group:
    """Tables for `rich`: a line of facts, memory by part, time by stage, the verdict, better layouts."""
    ranks = f"{plan.world} rank{'s' * (plan.world > 1)} on {plan.nodes} node{'s' * (plan.nodes > 1)}"
    facts = (
        f"{ranks}; base {plan.base_parameters:,} parameters, trained {plan.trainable_parameters:,}; "
        f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} a step; "
        f"checkpoint {_size(plan.checkpoint_bytes)}"
    )
    if plan.world > 1:
        sent, whole = _size(plan.head_bytes_sent), _size(plan.head_bytes_sent_unsharded)
        facts += f"\nheads: a rank sends {sent} a step ({whole} with the whole head on every rank)"
    verdict = Text(plan.reason, style="green" if plan.fits else "red")
    shown: list[RenderableType] = [Text(facts), _memory(plan), _stages(plan), Text(_total(plan)), verdict]
    if choices:
        shown += _choices(plan, choices)
    return Group(*shown)


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
    """Bytes in a readable unit."""
    for unit, each in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= each:
            return f"{count / each:,.2f} {unit}"
    return f"{count:.0f} bytes"


def _stages(plan: Plan) -> Table:
    """One row per metric and one column per stage, as a run has few stages and terminals are narrow."""
    how = "measured rates" if plan.machine.calibrated else "stated rates"
    table = Table("stage", title=f"One optimizer step on {plan.machine.name} ({how})", title_justify="left")
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
        rows["all steps"].append("?" if stage.hours is None else _duration(stage.hours))
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _total(plan: Plan) -> str:
    if plan.hours is None or plan.gpu_hours is None:
        return "hours: not known (a stage is given in epochs; give --sequences)"
    gpus = f", {plan.gpu_hours:.1f} GPU-hours" if plan.gpus_per_node else ""
    return f"{_duration(plan.hours)}{gpus} (evaluations and checkpoints not counted)"


def _duration(hours: float) -> str:
    if hours >= 0.1:
        return f"{hours:.2f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 60 else "under a minute"


def _choices(plan: Plan, choices: Sequence[FittingLayout]) -> list[RenderableType]:
    """One row per layout within 80 columns, and the overrides for the first.

    gain: tokens/s compared with the layout in the config.
    """
    title = f"Layouts that fit, fastest first (within {SIMPLER_WITHIN:.0%}: plainest, least memory)"
    numbers = [Column(name, justify="right") for name in ("", "micro", "ZeRO", "group", "recompute")]
    rest = [Column(name, justify="right") for name in ("GiB", "tokens/s", "gain")]
    table = Table(*numbers, "offload", *rest, title=title, title_justify="left")
    for number, choice in enumerate(choices, 1):
        at, planned = choice.layout, choice.plan
        recomputed = "yes" if at.gradient_checkpointing else "no"
        gain = round(100 * (choice.tokens_per_s / plan.slowest.tokens_per_s - 1))
        keys = (number, at.micro_batch_size, at.zero_stage, at.vocab_group_size, recomputed, at.offload)
        table.add_row(*map(str, keys), f"{planned.device_gib:.1f}", f"{choice.tokens_per_s:,.0f}", f"{gain:+d}%")
    overrides = " ".join(choices[0].layout.to_overrides())
    return [table, Text(f"The first, as overrides: {overrides}")]
