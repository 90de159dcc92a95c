"""Searches the layout with the highest tokens/s.

The search tries the micro-batch size (powers of two up to a rank's share), the ZeRO stage, the vocabulary group (the
config's value and every divisor of the ranks per node), gradient checkpointing and offload. The meaning of a run
(global batch, lengths, losses) never changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from cqwen_dist.config import Config, UserError
from cqwen_dist.tools.plan.make import Plan, plan
from cqwen_dist.tools.plan.stage_sizes import ceil_div

SIMPLER_WITHIN = 0.01  # a plainer layout is preferred if it is slower by less than this share
MAX_GROUP = 64
MOST = 5  # layouts to return
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

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s over all ranks in the slowest stage."""
        return self.plan.slowest.tokens_per_s


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
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)
