"""A plan as tables for the console, and as the lines that head a config file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cqwen_dist.plan.cost import StageCost
from cqwen_dist.plan.make import Plan
from cqwen_dist.plan.memory import GIB
from cqwen_dist.plan.scaling import Point
from cqwen_dist.plan.search import Choice


def render(plan: Plan, choices: Sequence[Choice] = ()) -> Group:
    """What `rich` prints: a line of facts, memory by part, time by stage, the verdict, better layouts."""
    ranks = f"{plan.world} rank{'s' * (plan.world > 1)} on {plan.nodes} node{'s' * (plan.nodes > 1)}"
    facts = (
        f"{ranks}; base {plan.base_parameters:,} parameters, trained {plan.trainable_parameters:,}; "
        f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} a step; "
        f"checkpoint {plan.checkpoint_bytes / GIB:.2f} GiB"
    )
    if plan.world > 1:
        sent, whole = (size / GIB for size in (plan.head_bytes_sent, plan.head_bytes_sent_unsharded))
        facts += f"\nheads: a rank sends {sent:.3f} GiB a step ({whole:.3f} GiB with the whole head on every rank)"
    verdict = Text(plan.reason, style="green" if plan.fits else "red")
    shown: list[RenderableType] = [Text(facts), _memory(plan), _stages(plan), Text(_total(plan)), verdict]
    if choices:
        shown.append(_choices(choices))
    return Group(*shown)


def _memory(plan: Plan) -> Table:
    table = Table(title=f"Memory of one rank (stage {plan.stage}, {plan.moment})", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("how")
    for part in plan.parts:
        how = Text(part.how + (" (host)" if part.place == "host" else ""))  # brackets are meant
        table.add_row(part.name, f"{part.bytes / GIB:.3f}", how)
    table.add_section()
    table.add_row("all", f"{plan.device_gib:.3f}", f"host: {plan.host_gib:.3f} GiB" if plan.host_gib else "")
    return table


_FIGURES = ("seconds", "forward", "backward", "heads", "communication", "optimizer", "tokens/s", "MFU", "sent", "hours")


def _stages(plan: Plan) -> Table:
    """A row a figure, a column a stage: few stages fit any terminal."""
    how = "measured rates" if plan.machine.calibrated else "stated rates"
    table = Table(title=f"One optimizer step on {plan.machine.name} ({how})", title_justify="left")
    table.add_column("stage")
    for stage in plan.stages:
        table.add_column(stage.stage, justify="right")
    for name, *cells in zip(_FIGURES, *map(_stage_cells, plan.stages), strict=True):
        table.add_row(name, *cells)
    return table


def _stage_cells(stage: StageCost) -> list[str]:
    """`_FIGURES` of one stage."""
    t = stage.time
    parts = (t.backbone_forward, t.backbone_backward, t.heads, t.communication, t.optimizer)
    return [
        f"{t.seconds:.4g}",
        *(f"{part / t.seconds:.0%}" for part in parts),
        f"{stage.tokens_per_s:,.0f}",
        f"{stage.mfu:.0%}",
        f"{stage.bytes_sent / GIB:.3f} GiB in {stage.collectives}",
        "?" if stage.hours is None else f"{stage.hours:.2f}",
    ]


def _total(plan: Plan) -> str:
    if plan.hours is None or plan.gpu_hours is None:
        return "hours: not known (a stage is given in epochs; say --sequences)"
    return f"{plan.hours:.2f} hours, {plan.gpu_hours:.1f} GPU-hours (evaluations and checkpoints not counted)"


def _choices(choices: Sequence[Choice]) -> Table:
    table = Table(title="Layouts that fit, the best first", title_justify="left")
    for name in ("micro", "ZeRO", "group", "recompute", "offload", "GiB", "tokens/s", "why"):
        table.add_column(name, justify="left" if name in ("why", "offload") else "right")
    for choice in choices:
        at, planned = choice.layout, choice.plan
        table.add_row(
            str(at.micro_batch_size),
            str(at.zero_stage),
            str(at.vocab_group_size),
            "yes" if at.gradient_checkpointing else "no",
            at.offload,
            f"{planned.device_gib:.1f}",
            f"{planned.slowest.tokens_per_s:,.0f}",
            choice.why,
        )
    return table


def render_scaling(points: Sequence[Point]) -> Table:
    """Efficiency by number of ranks (rows) and layout (columns)."""
    layouts = list(dict.fromkeys((p.zero_stage, p.vocab_group_size) for p in points if p.ranks >= 64))
    table = Table(title="Weak scaling: tokens/s a GPU against one GPU, and the share of the step spent talking")
    table.add_column("GPUs", justify="right")
    for zero, group in layouts:
        table.add_column(f"ZeRO-{zero}, group {group}", justify="right")
    by = {(p.ranks, p.zero_stage, min(p.vocab_group_size, p.ranks)): p for p in points}
    for ranks in dict.fromkeys(p.ranks for p in points):
        cells = []
        for zero, group in layouts:
            point = by.get((ranks, zero, min(group, ranks)))
            missing = point is None or (group > 8 and ranks < group)
            cells.append("" if missing or point is None else _point(point))
        table.add_row(f"{ranks:,}", *cells)
    return table


def _point(point: Point) -> str:
    return f"{point.efficiency:.0%} ({point.communication:.0%})" + ("" if point.fits else " *")


def head_lines(plan: Plan, command: str) -> list[str]:
    """What a config file says of itself: the command, memory, time. A test makes them again and compares."""
    lines = [command, f"{plan.reason} ({plan.stage}: {plan.moment})"]
    for stage in plan.stages:
        lines.append(
            f"{stage.stage}: {stage.time.seconds:.3g} s a step of {stage.tokens:,} tokens, "
            f"{stage.tokens_per_s:,.0f} tokens/s, {stage.mfu:.0%} MFU, bound by {stage.bound}"
        )
    rates = "measured" if plan.machine.calibrated else "stated"
    if plan.hours is not None and plan.gpu_hours is not None:
        lines.append(f"{plan.hours:.1f} hours, {plan.gpu_hours:.3g} GPU-hours at the {rates} rates")
    lines.append(f"checkpoint {plan.checkpoint_bytes / GIB:.1f} GiB")
    return lines
