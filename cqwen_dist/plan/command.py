"""`cqwen plan`: the plan, and by its options the search, the scaling and the written config."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cqwen_dist.config import Config, UserError, source_files
from cqwen_dist.plan.architecture import read_architecture
from cqwen_dist.plan.machine import machine
from cqwen_dist.plan.make import Plan, plan
from cqwen_dist.plan.scaling import Point, scaling
from cqwen_dist.plan.search import FittingLayout, search, with_layout
from cqwen_dist.plan.show import head_lines, render, render_scaling

NOTHING_FITS = "no layout fits: more ranks, more memory, shorter texts, or bf16 where it is fp32"
COUNTED_BYTES = 2**30  # a file of texts larger than this is not counted through


@dataclass(frozen=True)
class Planned:
    """A plan with what else was asked for."""

    plan: Plan
    choices: list[FittingLayout] | None
    points: list[Point] | None
    written: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        document = self.plan.to_dict()
        if self.choices is not None:
            document["choices"] = [choice.to_dict() for choice in self.choices]
        if self.points is not None:
            document["scaling"] = [asdict(point) for point in self.points]
        if self.written is not None:
            document["written"] = str(self.written)
        return document

    def show(self) -> RenderableType:
        """For a terminal."""
        shown: list[RenderableType] = [render(self.plan, self.choices or ())]
        if self.choices == []:
            shown.append(Text(NOTHING_FITS, style="red"))
        if self.points is not None:
            shown.append(render_scaling(self.points))
            shown.append(Text("* does not fit. 8 GPUs a node; every rank keeps its micro-batch, once a step."))
        if self.written is not None:
            shown.append(Text(f"written: {self.written}"))
        return Group(*shown)


def run(
    config: Config,
    *,
    nodes: int,
    gpus_per_node: int,
    gpu_memory_gib: float,
    gpu: str = "",
    interconnect: str = "ib400",
    calibration: Path | None = None,
    sequences: int | None = None,
    searching: bool = False,
    scale: bool = False,
    write: Path | None = None,
) -> Planned:
    """The plan, and what else was asked for. write: the config with the best layout that was found, or as it is where
    nothing was searched. Raises `UserError`."""
    known = machine(gpu or ("h100" if gpus_per_node else "cpu"), interconnect, calibration)
    architecture = read_architecture(config)
    options: dict[str, Any] = {"gpu_memory_gib": gpu_memory_gib, "architecture": architecture, "machine": known}
    points = scaling(config, **options) if scale else None
    options |= {"nodes": nodes, "gpus_per_node": gpus_per_node, "sequences": sequences or count_sequences(config)}
    planned = plan(config, **options)
    choices = search(config, **options) if searching else None
    if write is not None:
        chosen, shown = config, planned
        if choices is not None:
            if not choices:
                raise UserError("--write", str(write), "a layout that fits (none was found)")
            chosen, shown = with_layout(config, choices[0].layout), choices[0].plan
        command = f"cqwen plan {write} --nodes {nodes} --gpus-per-node {gpus_per_node}"
        write_config(write, chosen, shown, f"{command} --gpu-memory-gib {gpu_memory_gib:g} --gpu {known.name}")
    return Planned(planned, choices, points, write)


def write_config(path: Path, config: Config, planned: Plan, command: str) -> None:
    """The config as resolved, with the plan's summary as comments above. Raises `UserError` where there is a file."""
    head = "".join(f"# {line}\n" for line in head_lines(planned, command))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(head + config.to_yaml())
    except FileExistsError:
        raise UserError("--write", str(path), "a file that does not exist yet") from None
    except OSError as error:
        raise UserError("--write", str(path), f"a place that can be written ({error.strerror})") from None


def count_sequences(config: Config) -> int | None:
    """Texts in an epoch: the lines of data.train. None where texts are packed or files are not here, large, or not of
    one text a line."""
    data = config.data
    if data.pack:
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
                    total += sum(1 for line in lines if line.strip())
    except (OSError, UserError):
        return None
    held_out = round(total * data.eval_fraction) if data.eval is None else 0
    return min(total - held_out, data.limit or total) or None
