"""Shows the results from `bench.step` in a terminal: times by part, launched operations by part, ratios."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

# Table column -> parts of a step.
SHARES = {
    "data": "data",
    "forward": "backbone_forward",
    "heads": "heads",
    "backward": "backbone_backward",
    "optimizer": "optimizer",
    "communication": "communication",
}


def table(result: dict[str, Any]) -> Group:
    """The result of `run` for a terminal."""
    shape = f"{result['micro_batch_size']} x {result['sequence_length']} tokens a micro-batch, {result['precision']}"
    columns = (Column(name, justify="right") for name in ("s (min-max)", "tokens/s", "MFU", *SHARES, "GiB"))
    title = f"Training step, {shape}, {result['world']} x {result['device']}"
    out = Table("", *columns, title=title, title_justify="left")
    ratios = []
    for row in result["rows"]:
        if "skipped" in row:
            out.add_row(row["name"], "skipped", row["skipped"], *[""] * 8)
            continue
        s, parts = row["step_s"], row.get("parts_s")
        shares = [""] * len(SHARES)
        if parts:
            seconds, whole = {**parts, "communication": row["communication_s"]}, sum(parts.values())
            shares = [f"{seconds.get(part, 0) / whole:.0%}" for part in SHARES.values()]
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
    profiles = [
        f"profile: {found['trace']}, {found['table']}; {found['host_waits']:.0f} host waits a step"
        for found in result["profiles"]
    ]
    return Group(out, _launch_table(result["rows"]), *(Text(line) for line in (*ratios, *profiles)))


def _launch_table(rows: list[dict[str, Any]]) -> Table:
    """Operations per step by part, and on CUDA the kernels and waits from the profiler."""
    parts = [part for part in (*SHARES.values(), "rest") if part != "communication"]
    names = (*(part.removeprefix("backbone_") for part in parts), "all", "waits", "kernels")
    columns = (Column(name, justify="right") for name in names)
    out = Table("", *columns, title="Operations launched in a step (compiled: kernels alone)", title_justify="left")
    for row in rows:
        if "operations" in row or "kernels" in row:
            found, waits = row.get("operations", {}), row.get("host_waits", sum(row.get("waits", {}).values()))
            cells = [found.get(part, "") for part in parts]
            out.add_row(row["name"], *map(str, [*cells, sum(found.values()) or "", waits, row.get("kernels", "")]))
    return out
