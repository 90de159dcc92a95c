"""The doctor's document as a page for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def page(document: dict[str, Any]) -> Group:
    """Nodes in columns, what they measured together, red lines last."""
    nodes, together = document["nodes"], document["together"]
    table = Table("", *(node["host"] for node in nodes), box=None, pad_edge=False)
    packages = dict.fromkeys(name for node in nodes for name in node["packages"])
    columns = [_facts(node, packages) for node in nodes]
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(values):
            same = len(set(values)) == 1 and len(values) > 1
            table.add_row(name, *([values[0], *["same"] * (len(values) - 1)] if same else values))
    parts: list[RenderableType] = [table]
    if topology := nodes[0]["interconnect"]["topology"]:
        parts += [Text(f"\ninterconnect of {nodes[0]['host']}\n{topology}")]
    if together["ranks"] > 1:
        parts.append(_measured(together))
    parts += [
        Text(f"\n{line['where']}: {line['what']}; remedy: {line['remedy']}", "bold red") for line in document["red"]
    ]
    if not document["red"]:
        parts.append(Text("\nnothing wrong was found", "green"))
    return Group(*parts)


def _facts(node: dict[str, Any], packages: Iterable[str]) -> dict[str, str]:
    """A node's column: row -> text."""
    ports, tools = node["interconnect"]["infiniband"], node["tools"]
    return {
        "python": node["python"],
        **{name: node["packages"].get(name, "") for name in packages},
        "commit": (node["commit"] or "")[:12],
        "CUDA, NCCL": " ".join(filter(None, (node["cuda"], node["nccl"]))),
        "GPUs": _gpus(node["gpus"]),
        "ports": ", ".join(f"{port['name']} {port['state']} {port['rate']}" for port in ports),
        "cores, memory": f"{node['cpus']}, {node['memory_gib']:.0f} GiB",
        "tools": " ".join(name for name, found in tools.items() if found),
        "no": " ".join(name for name, found in tools.items() if not found),
        "DeepSpeed's operators": _operators(node["operators"]),
        "free disk": ", ".join(f"{path} {free} GiB" for path, free in node["disk_gib"].items()),
        "run folder": _folder(node["folder"]),
        "environment": " ".join(f"{name}={value}" for name, value in node["environment"].items()),
    }


def _gpus(gpus: list[dict[str, Any]]) -> str:
    kinds = dict.fromkeys(f"{gpu['name']} {gpu['memory_gib']:.0f} GiB" for gpu in gpus)
    return f"{len(gpus)} x {', '.join(kinds)}" if gpus else "none"


def _operators(operators: dict[str, str]) -> str:
    kinds: dict[str, list[str]] = {}
    for name, how in operators.items():
        kinds.setdefault(how, []).append(name)
    return "; ".join(f"{how}: {' '.join(names)}" for how, names in kinds.items() if how != "not here")


def _folder(folder: dict[str, Any]) -> str:
    if folder["error"]:
        return str(folder["error"])
    return f"write {1e3 * folder['write_s']:.1f} ms, read {1e3 * folder['read_s']:.1f} ms"


def _measured(together: dict[str, Any]) -> Group:
    table = Table("all-reduce", "time", "bandwidth of a link", box=None, pad_edge=False)
    for line in together["all_reduce"]:
        table.add_row(_size(line["bytes"]), f"{1e3 * line['seconds']:.2f} ms", f"{line['gib_per_s']:.2f} GiB/s")
    words = f"\n{together['ranks']} ranks over {together['backend']}"
    words += f"; clocks within {1e3 * together['clock_spread_s']:.1f} ms"
    if (seen := together["folder_seen_s"]) is not None:
        words += f"; a file of the first is seen by the others after {1e3 * seen:.0f} ms"
    return Group(Text(words), table)


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
