"""A plan as a table for the console."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cqwen_dist.plan.memory import GIB, Plan


def render(plan: Plan) -> Group:
    """What `rich` prints: a line of facts, the parts, the verdict."""
    ranks = f"{plan.world} rank{'s' * (plan.world > 1)} on {plan.nodes} node{'s' * (plan.nodes > 1)}"
    facts = (
        f"{ranks}; base {plan.base_parameters:,} parameters, trained {plan.trainable_parameters:,}; "
        f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} a step"
    )
    if plan.world > 1:
        sent, whole = (size / GIB for size in (plan.head_bytes_sent, plan.head_bytes_sent_unsharded))
        facts += f"\nheads: a rank sends {sent:.3f} GiB a step ({whole:.3f} GiB with the whole head on every rank)"
    table = Table(title="Memory of one rank", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("how")
    for part in plan.parts:
        table.add_row(part.name, f"{part.bytes / GIB:.3f}", part.how + (" (host)" if part.place == "host" else ""))
    table.add_section()
    table.add_row("all", f"{plan.device_gib:.3f}", f"host: {plan.host_gib:.3f} GiB" if plan.host_gib else "")
    return Group(Text(facts), table, Text(plan.reason, style="green" if plan.fits else "red"))
