"""The options of `cqwen plan`."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Question:
    """The machines to plan for, and facts about the data."""

    nodes: Annotated[int, typer.Option(help="Machines.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="Ranks per machine; 0: one CPU rank per machine.")] = 1
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory per GPU; default: as in --gpu.")] = None
    gpu: Annotated[str, typer.Option(help="Rates of this GPU: h200, h100 (default), a100, l40s, cpu.")] = ""
    interconnect: Annotated[str, typer.Option(help="Network between machines, per rank: ib200, eth100, ...")] = "ib400"
    sequences: Annotated[int | None, typer.Option(min=1, help="Texts per epoch; default: counted if cheap.")] = None
    text_tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens per packed text (data.pack); default: one text per row.")
    ] = None
    price: Annotated[float | None, typer.Option(min=0, help="Money for an hour of a GPU: adds costs to times.")] = None
