"""The options of `cqwen plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Question:
    """The machines to plan for, and whether to search for layouts."""

    nodes: Annotated[int, typer.Option(help="Machines.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="Ranks per machine; 0: one CPU rank per machine.")] = 1
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory per GPU; default: as in --gpu.")] = None
    gpu: Annotated[str, typer.Option(help="Rates of this GPU: h200, h100 (default), a100, l40s, cpu.")] = ""
    interconnect: Annotated[str, typer.Option(help="Network between machines, per rank: ib400, ib200, eth100, ...")] = (
        "ib400"
    )
    calibrate: Annotated[
        Path | None, typer.Option(help="Measured rates: output of `python -m benchmarks step --json`.")
    ] = None
    sequences: Annotated[int | None, typer.Option(min=1, help="Texts per epoch; default: counted if cheap.")] = None
    text_tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens per packed text (data.pack); default: one text per row.")
    ] = None
    search: Annotated[bool, typer.Option("--search", help="Try every layout; print the best.")] = False
