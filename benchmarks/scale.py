"""Traffic and time of a step on 2 to 1,024 GPUs: the planner, scaled to steps that were measured on one GPU.

This is arithmetic, no measurement. Computation takes the planned time, times measured over planned of one GPU; messages
take the planned time, at the manufacturers' rates. Each GPU has one micro-batch a step: most messages for its work.
Published rows are of another project; beside them is this project's plan with the same texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from cqwen_dist.config import load_config
from cqwen_dist.config.reading import given_config
from cqwen_dist.sizes.architecture import read_architecture
from cqwen_dist.tools.plan.cost import StageCost, machine
from cqwen_dist.tools.plan.make import plan

CONFIGS = Path(__file__).parents[1] / "configs"
NODE = 8  # GPUs of a machine, and the largest vocabulary group
WORLDS = (2, 8, 64, 1024)


class Measured(NamedTuple):
    """A base on an H200 (docs/gpu.md). tokens_per_s: of a compiled LoRA step of one GPU; None: of no run."""

    size: str
    texts: int  # of 1,024 tokens in a micro-batch
    tokens_per_s: float | None


class Published(NamedTuple):
    """A row of NeMo Automodel's performance summary (August 2026): LoRA on H100s, the head frozen, tensor parallel 2.

    A step has 32 texts of 4,096 tokens, a micro-batch two of them.
    """

    name: str
    size: str  # of the nearest config
    base: str  # its hub name; "": the config's base
    gpus: int
    tokens_per_s: float  # of one GPU


MEASURED = (Measured("0.5b", 8, 78_100), Measured("7b", 4, 14_500), Measured("72b", 8, None))
LLAMA = "meta-llama/Llama-3.1-70B"  # of the shape of Llama 3
PUBLISHED = (
    Published("Qwen2.5-32B", "32b", "", 8, 2250.31),
    Published("Qwen2.5-32B", "32b", "", 16, 2072.89),
    Published("Llama-3-70B", "72b", LLAMA, 8, 1091.85),
    Published("Llama-3-70B", "72b", LLAMA, 16, 984.85),
)


def lora_step(size: str, gpus: int, gpu: str, base: str = "", **train: int) -> StageCost:
    """The planned cost of a shipped config's last stage on machines of `NODE` GPUs, joined by 50 GB/s a GPU.

    base: hub name of another base; "": the config's. train: texts, micro, length. Raises `UserError`, and `ValueError`
    if the step does not fit.
    """
    config = load_config(CONFIGS / f"qwen2.5-{size}.yaml")
    changes = {
        "model.name_or_path": base or config.model.name_or_path,
        "data.sequence_length": train["length"],
        "train.global_batch_size": train["texts"],
        "train.micro_batch_size": train["micro"],
        "parallel.vocab_group_size": min(config.parallel.vocab_group_size, NODE, gpus),
    }
    config, each = given_config(config, changes), min(gpus, NODE)
    found = plan(
        config,
        nodes=gpus // each,
        gpus_per_node=each,
        architecture=read_architecture(config),
        machine=machine(gpu, "ib400"),
    )
    if not found.fits and gpus > 1:
        raise ValueError(f"{size} on {gpus} GPUs: {found.reason}")
    return found.stages[-1]


def row(cost: StageCost, gpus: int, slower: float, **more: Any) -> dict[str, Any]:
    """A row of `run`. slower: measured over planned seconds of computation."""
    messages = max(0.0, cost.time["communication"])  # that no computation hides
    seconds = slower * (cost.seconds - messages) + messages
    found = {"gpus": gpus, "bytes_sent": cost.bytes_sent, "messages_s": messages, "seconds": seconds}
    return {**more, **found, "tokens_per_s_a_gpu": cost.tokens / gpus / seconds}


def run() -> dict[str, Any]:
    """Rows of the three bases by number of GPUs, and of the published points."""
    rows, slower = [], 1.0
    for one in MEASURED:
        for gpus in (1, *WORLDS):
            cost = lora_step(one.size, gpus, "h200", texts=one.texts * gpus, micro=one.texts, length=1024)
            if gpus > 1:
                rows.append(row(cost, gpus, slower, base=one.size))
            elif one.tokens_per_s is not None:  # a base that was not measured takes the factor of the one before
                slower = cost.tokens_per_s / one.tokens_per_s
    published = []
    for name, size, base, gpus, found in PUBLISHED:
        cost = lora_step(size, gpus, "h100", base, texts=32, micro=2, length=4096)
        published.append(row(cost, gpus, slower, base=name, published=found))
    return {"rows": rows, "published": published}


def table(found: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    title = "A LoRA step by the plan, computation as measured on one GPU; no measurement"
    names = ("base", "GPUs", "a GPU sends, GB", "messages, ms", "step, ms", "tokens/s a GPU", "published")
    out = Table(*names, title=title, title_justify="left")
    for each in (*found["rows"], *found["published"]):
        out.add_row(
            each["base"],
            f"{each['gpus']:,}",
            f"{each['bytes_sent'] / 1e9:,.3g}",
            f"{1e3 * each['messages_s']:,.3g}",
            f"{1e3 * each['seconds']:,.0f}",
            f"{each['tokens_per_s_a_gpu']:,.0f}",
            f"{each['published']:,.0f}" if "published" in each else "",
        )
    return out
