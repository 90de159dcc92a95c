"""Searches the layout with the highest tokens/s, with reasons for the choice, and predicts how layouts scale.

The search tries the micro-batch size (powers of two up to a rank's share), the ZeRO stage, the vocabulary group (the
config's value and every divisor of the ranks per node), gradient checkpointing and offload. The meaning of a run
(global batch, lengths, losses) never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import gcd
from typing import Any

from cqwen_dist.config import Config, UserError
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.stage_sizes import ceil_div

SIMPLER_WITHIN = 0.01  # a plainer layout is preferred if it is slower by less than this share
MAX_GROUP = 64
MOST = 5  # layouts to return
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8
# (ZeRO stage, vocabulary group). A group is limited to the ranks in a node, but 64 spans nodes.
LAYOUTS = ((1, 1), (1, NODE), (3, 1), (3, NODE), (3, 64))
ON_HOST = {"optimizer": "moments and the engine's masters", "activations": "layer inputs"}
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


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits into memory, and the plan for it."""

    layout: Layout
    plan: Plan

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s over all ranks in the slowest stage."""
        return self.plan.slowest.tokens_per_s

    @property
    def why(self) -> str:
        """The slowest part of a step, and the effect of each setting."""
        layout, planned = self.layout, self.plan
        parts = [f"bound by {planned.slowest.bound}"]
        if layout.vocab_group_size > 1:
            spared = planned.head_bytes_sent_unsharded - planned.head_bytes_sent
            verb = "spares" if spared > 0 else "costs"
            rows = f"the word head's rows over {layout.vocab_group_size} ranks"
            parts.append(f"{rows}: {verb} {abs(spared) / 2**20:,.0f} MiB on the wire a step")
        elif planned.world > 1:
            parts.append("every rank has the whole word head")
        if layout.zero_stage == 3:
            parts.append("ZeRO-3 spreads the frozen backbone")
        if layout.gradient_checkpointing:
            parts.append("activations computed twice to hold fewer")
        if layout.offload != "none":
            parts.append(f"{ON_HOST[layout.offload]} on the host")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "overrides": self.layout.to_overrides(),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.plan.slowest.mfu,
            "device_gib": round(self.plan.device_gib, 3),
            "host_gib": round(self.plan.host_gib, 3),
            "hours": self.plan.hours,
            "gpu_hours": self.plan.gpu_hours,
            "why": self.why,
        }


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
    rest = sorted((found for found in picked if found not in near), key=lambda found: -found.tokens_per_s)
    return [*near, *rest][:MOST]


def of_layout(error: UserError) -> bool:
    """Whether a different layout might avoid this error."""
    return error.key.startswith(("train.micro", "parallel.", "model.lora.dora", "model.quantize"))


def _near(found: list[FittingLayout]) -> list[FittingLayout]:
    """The layouts within SIMPLER_WITHIN of the fastest one."""
    top = max((each.tokens_per_s for each in found), default=0.0)
    return [each for each in found if each.tokens_per_s >= top * (1 - SIMPLER_WITHIN)]


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
    return with_keys(config, {}, **sections)


def with_keys(config: Config, of_stages: Mapping[str, Any], **sections: Mapping[str, Any]) -> Config:
    """The config with keys of sections, and of every stage, replaced; not validated."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update={**changed, "stages": [s.model_copy(update=of_stages) for s in config.stages]})


# -------------------------------------------------------------------------------------------- weak scaling


@dataclass(frozen=True)
class Point:
    """The prediction for one layout on a number of ranks."""

    ranks: int
    zero_stage: int
    vocab_group_size: int
    tokens_per_s: float
    efficiency: float
    communication: float  # share of the step
    device_gib: float
    fits: bool


def scaling(config: Config, **options: Any) -> list[Point]:
    """Plans every layout for every number of ranks, with 8 ranks per node.

    options: those of `plan` except nodes and GPUs. Raises `UserError` like `plan`.
    """
    alone = _planned(config, 1, 1, 1, options).slowest.tokens_per_s
    found = []
    for (zero, group), ranks in product(LAYOUTS, RANKS):
        if group > NODE and ranks < group:
            continue
        size = min(group, ranks)
        planned = _planned(config, ranks, zero, size, options)
        rate, share = planned.slowest.tokens_per_s, planned.slowest.time["communication"] / planned.slowest.seconds
        found.append(Point(ranks, zero, size, rate, rate / ranks / alone, share, planned.device_gib, planned.fits))
    return found


def _planned(config: Config, ranks: int, zero: int, group: int, options: dict[str, Any]) -> Plan:
    """The plan for a layout with one micro-batch per step on every rank."""
    sequence = gcd(ranks, config.parallel.sequence_group_size)
    batch = config.train.micro_batch_size * ranks // sequence
    own = {"global_batch_size": None, "micro_batch_size": None}
    parallel = {"zero_stage": zero, "vocab_group_size": group, "sequence_group_size": sequence}
    grown = with_keys(config, own, train={"global_batch_size": batch}, parallel=parallel)
    return plan(grown, nodes=max(1, ranks // NODE), gpus_per_node=min(ranks, NODE), **options)
