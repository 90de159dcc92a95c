"""`cqwen plan`: the plan and, with --search, the layouts with the highest tokens/s, as JSON and as console tables.

The search tries the micro-batch size (powers of two up to a rank's share), the ZeRO stage, the vocabulary group (the
config's value and every divisor of the ranks per node), gradient checkpointing and offload. The meaning of a run
(global batch, lengths, losses) never changes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cqwen_dist.config import Config, Said, UserError, as_list, source_files
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.cost import machine
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.memory import GIB, MIB
from cqwen_dist.tools.plan.question import Question
from cqwen_dist.tools.plan.stage_sizes import ceil_div

SIMPLER_WITHIN = 0.01  # a plainer layout is preferred if it is slower by less than this share
MAX_GROUP = 64
MOST = 5  # layouts to return
WHAT_MAY_FIT = "more ranks, more memory, shorter texts, or bf16 in place of fp32"
COUNTED_BYTES = 2**30  # texts in larger files are not counted, as that would take too long


# The keys that the search may choose, each with the config section.
SECTION = {
    "micro_batch_size": "train",
    "zero_stage": "parallel",
    "vocab_group_size": "parallel",
    "gradient_checkpointing": "model",
    "offload": "parallel",
}


@dataclass(frozen=True)
class Layout:
    """A value for each key of `SECTION`."""

    micro_batch_size: int
    zero_stage: int
    vocab_group_size: int
    gradient_checkpointing: bool
    offload: str

    @property
    def plainness(self) -> tuple[bool, bool, int, int]:
        """A sort key, plainest first: no offload, no recomputation, a lower ZeRO stage, a smaller group."""
        return (self.offload != "none", self.gradient_checkpointing, self.zero_stage, self.vocab_group_size)

    def makes_sense(self) -> bool:
        """Only recomputed layers have inputs to move."""
        return self.offload != "activations" or self.gradient_checkpointing

    def to_overrides(self) -> list[str]:
        """The layout as command-line overrides."""
        return [f"{SECTION[key]}.{key}={str(value).lower()}" for key, value in asdict(self).items()]


class FittingLayout(NamedTuple):
    """A layout that fits into memory, and the plan for it."""

    layout: Layout
    plan: Plan


def search(config: Config, **options: Any) -> list[FittingLayout]:
    """Returns at most MOST layouts that fit, best first; an empty list if none fits.

    Layouts with equal plainness differ only in the micro-batch size: the one with the lowest memory is kept among the
    fastest. The results are sorted by tokens/s. Speeds within SIMPLER_WITHIN of the best count as equal, and the
    plainest comes first. options: those of `plan`. Raises `UserError` like `plan`.
    """
    ranks_per_node = max(1, options["gpus_per_node"])
    kinds: dict[tuple[Any, ...], list[FittingLayout]] = {}
    for layout in layouts(config, options["nodes"] * ranks_per_node, ranks_per_node):
        try:
            planned = plan(with_layout(config, layout), **options)
        except UserError as error:
            if not of_layout(error):
                raise
            continue
        if planned.fits:
            kinds.setdefault(layout.plainness, []).append(FittingLayout(layout, planned))
    picked = [min(_near(kind), key=lambda found: found.plan.device_gib) for kind in kinds.values()]
    near = sorted(_near(picked), key=lambda found: found.layout.plainness)
    rest = sorted((found for found in picked if found not in near), key=lambda found: -found.plan.tokens_per_s)
    return [*near, *rest][:MOST]


def of_layout(error: UserError) -> bool:
    """Whether a different layout might avoid this error."""
    return error.key.startswith(("train.micro", "parallel.", "model.lora.dora", "model.quantize"))


def _near(found: list[FittingLayout]) -> list[FittingLayout]:
    top = max((each.plan.tokens_per_s for each in found), default=0.0)
    return [each for each in found if each.plan.tokens_per_s >= top * (1 - SIMPLER_WITHIN)]


def layouts(config: Config, world: int, ranks_per_node: int) -> Iterator[Layout]:
    """All layouts to try."""
    batch, own = config.train.global_batch_size, config.train.micro_batch_size
    share = ceil_div(batch, max(1, world // config.parallel.sequence_group_size))
    sizes = sorted({own, *(2**k for k in range(share.bit_length()) if 2**k <= share)})
    groups = {g for g in range(1, min(MAX_GROUP, ranks_per_node) + 1) if world % g == 0 and ranks_per_node % g == 0}
    adapters = config.trains("lora")
    compiled = config.model.compile_layers and config.model.attention == "varlen"  # excludes checkpointing
    combinations = product(
        [size for size in sizes if batch % size == 0],
        (1, 2, 3) if world > 1 else (1,),
        sorted({*groups, config.parallel.vocab_group_size}),
        (False, True) if (adapters or config.trains("embedding")) and not compiled else (False,),
        ("none", "optimizer", "activations") if adapters else ("none",),
    )
    return filter(Layout.makes_sense, (Layout(*each) for each in combinations))


def with_layout(config: Config, layout: Layout) -> Config:
    """The config with the five layout keys replaced. No validation is needed, as the values are allowed ones."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in asdict(layout).items():
        sections.setdefault(SECTION[key], {})[key] = value
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


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
    if planned.hours is None:
        try:  # a source of data.train that is not here
            for source in as_list(config.data.train):
                source_files(source, "data.train")
        except UserError as error:
            why = f"no steps and hours: {error.key}: {error.found} in {Path.cwd()} (--sequences N counts the texts)"
            shown.append(Text(why, style="yellow"))
    if asked.search:
        document["choices"] = [
            {
                "overrides": layout.to_overrides(),
                "tokens_per_s": found.tokens_per_s,
                "device_gib": round(found.device_gib, 3),
                "host_gib": round(found.host_gib, 3),
                "hours": found.hours,
            }
            for layout, found in choices
        ]
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


def count_sequences(config: Config) -> int | None:
    """Counts the texts in an epoch: the lines in data.train, without held-out texts.

    Returns None for texts that are packed or mixed, and for files that are missing, large, or without a text per line.
    """
    data = config.data
    if data.pack or data.weights:
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
    total = "hours: not known (a stage is given in epochs; give --sequences)"
    if plan.hours is not None:
        gpus = f", {plan.gpu_hours:.1f} GPU-hours" if plan.gpus_per_node else ""
        total = f"{_duration(plan.hours)}{gpus} (evaluations and checkpoints not counted)"
    shown: list[RenderableType] = [Text(facts), _memory(plan), _stages(plan), Text(total), verdict]
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
        gain = round(100 * (planned.tokens_per_s / plan.tokens_per_s - 1))
        keys = (number, at.micro_batch_size, at.zero_stage, at.vocab_group_size, recomputed, at.offload)
        table.add_row(*map(str, keys), f"{planned.device_gib:.1f}", f"{planned.tokens_per_s:,.0f}", f"{gain:+d}%")
    overrides = " ".join(choices[0].layout.to_overrides())
    return [table, Text(f"The first, as overrides: {overrides}")]
