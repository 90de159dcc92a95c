"""`cqwen plan`: the plan and, with --search, the layouts that fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cqwen_dist.config import Config, UserError, source_files
from cqwen_dist.config.errors import Said
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.machine import machine
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.question import Question
from cqwen_dist.tools.plan.search import FittingLayout, of_layout, search
from cqwen_dist.tools.plan.show import render

WHAT_MAY_FIT = "more ranks, more memory, shorter texts, or bf16 in place of fp32"
COUNTED_BYTES = 2**30  # texts in larger files are not counted, as that would take too long


def run(config: Config, asked: Question) -> tuple[dict[str, Any], RenderableType]:
    """Returns the plan, and with `asked.search` the layouts found, for JSON and as tables for a terminal.

    Raises `UserError`.
    """
    known = machine(asked.gpu or ("h100" if asked.gpus_per_node else "cpu"), asked.interconnect, asked.calibrate)
    options: dict[str, Any] = {"gpu_memory_gib": asked.gpu_memory_gib, "machine": known, "text": asked.text_tokens}
    options |= {"nodes": asked.nodes, "gpus_per_node": asked.gpus_per_node, "architecture": read_architecture(config)}
    options["sequences"] = asked.sequences or count_sequences(config)
    planned, choices, notes = _planned(config, asked.search, options)
    document, shown = planned.to_dict(), [*notes, *render(planned, choices).renderables]
    shown += _missing(config) if planned.hours is None else []
    if asked.search:
        document["choices"] = [choice.to_dict() for choice in choices]
        shown += [] if choices else [Text(f"no layout fits: {WHAT_MAY_FIT}", style="red")]
    return document, Group(*shown)


def _planned(
    config: Config, searching: bool, options: dict[str, Any]
) -> tuple[Plan, list[FittingLayout], list[RenderableType]]:
    """(plan, layouts found, notes). If the config's layout cannot run, the plan is that for the best layout found."""
    try:
        planned, refused = plan(config, **options), None
    except UserError as error:
        if not (searching and of_layout(error)):
            raise
        refused = error
    choices = search(config, **options) if searching else []
    if refused is None:
        return planned, choices, []
    if not choices:
        raise UserError("--search", Said("no layout that fits"), WHAT_MAY_FIT)
    note = f"As it is, the config cannot run here ({refused}). This is the best layout."
    return choices[0].plan, choices, [Text(note, style="yellow")]


def _missing(config: Config) -> list[Text]:
    """Says which source of data.train is not here, if any."""
    try:
        for source in [config.data.train] if isinstance(config.data.train, str) else config.data.train:
            source_files(source, "data.train")
    except UserError as error:
        why = f"no steps and hours: {error.key}: {error.found} in {Path.cwd()} (--sequences N counts the texts)"
        return [Text(why, style="yellow")]
    return []


def count_sequences(config: Config) -> int | None:
    """Counts the texts in an epoch: the lines in data.train, without held-out texts.

    Returns None for texts that are packed or mixed, and for files that are missing, large, or without a text per line.
    """
    data = config.data
    if data.pack or data.weights:
        return None
    total = 0
    try:
        for source in [data.train] if isinstance(data.train, str) else data.train:
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
