"""The largest base and the longest text that fit on 1, 8 and 64 GPUs, and the limiting part.

Tries every layout that saves memory: always one text at a time with recomputed activations; ZeRO-3 with more than one
GPU, vocabulary groups, optimizer states or layer inputs on the host, and sequence groups for long texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.table import Table

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan.machine import Machine
from cqwen_dist.tools.plan.make import Plan, largest, plan
from cqwen_dist.tools.plan.memory import GIB
from cqwen_dist.tools.plan.search import with_keys

GPUS, NODE = (1, 8, 64), 8
SHORTEST = 1024  # tokens, also of the texts for which the largest base is looked for
CONTEXT, LARGEST = "the base's context", "no larger one is known"


@dataclass(frozen=True)
class Limit:
    """The limits for a number of GPUs."""

    gpus: int
    base: str  # the largest public one, for texts of `SHORTEST` tokens; empty: none
    base_gib: float  # a rank
    larger: str  # the next larger base, and the largest part of its memory
    longest: int  # tokens of a text, with the config's own base; 0: not even `SHORTEST`
    longer: str  # the limiting part


def limits(config: Config, found: Mapping[str, Any], machine: Machine, gib: float) -> list[Limit]:
    """One `Limit` for each of `GPUS`, of `gib` GiB each. found: the transformers config of the config's base."""
    known = {
        name: {"model_type": kind.model_type, **sizes}
        for kind in ARCHITECTURES.values()
        for name, sizes in kind.public.items()
    }
    by_size = sorted(known, key=lambda name: Architecture.of(known[name]).base_parameters)
    rows = []
    for gpus in GPUS:
        base, base_gib, larger = "", 0.0, LARGEST
        for name in by_size:
            best = _least(config, known[name], gpus, SHORTEST, machine, gib)
            if best is not None and best.fits:
                base, base_gib, larger = name, best.device_gib, LARGEST
            elif best is not None and larger == LARGEST:
                larger = f"{name}: {_bound(best)}"
        longest, longer, length = 0, CONTEXT, SHORTEST
        while (best := _least(config, found, gpus, length, machine, gib)) is not None:
            if not best.fits:
                longer = _bound(best)
                break
            longest, length = length, 2 * length
        rows.append(Limit(gpus, base, base_gib, larger, longest, longer))
    return rows


def _bound(found: Plan) -> str:
    part = largest(found.parts)
    return f"{part.name}, {part.bytes / GIB:,.0f} GiB"


def _least(
    config: Config, found: Mapping[str, Any], gpus: int, length: int, machine: Machine, gib: float
) -> Plan | None:
    """The plan that needs least memory; None if no layout supports texts of this length."""
    plans, model_type = [], Architecture.of(found).model_type
    options: dict[str, Any] = {"architecture": dict(found), "machine": machine, "gpu_memory_gib": gib}
    options |= {"nodes": max(1, gpus // NODE), "gpus_per_node": min(gpus, NODE)}
    for chosen in _layouts(config, gpus, length):
        try:
            chosen.fit_to(model_type)
            chosen.fit_sizes(found)
            plans.append(plan(chosen, **options))
        except UserError:
            continue
    return min(plans, key=lambda each: each.device_gib, default=None)


def _layouts(config: Config, gpus: int, length: int) -> Iterator[Config]:
    """The config with each layout to try, for texts of this length."""
    powers = [2**k for k in range(gpus.bit_length()) if 2**k <= min(gpus, 64)]
    own = {"global_batch_size": None, "micro_batch_size": None, "sequence_length": None}
    for sequence, group, offload in product(
        powers if length > SHORTEST else (1,), {1, min(gpus, NODE)}, ("none", "optimizer", "activations")
    ):
        sizes = {"vocab_group_size": group, "sequence_group_size": sequence}
        attention = "mask" if sequence == 1 else "varlen"
        yield with_keys(
            config,
            own,
            parallel={"zero_stage": 1 if gpus == 1 else 3, "offload": offload, **sizes},
            model={"gradient_checkpointing": True, "attention": attention, "compile_layers": False},
            train={"global_batch_size": max(1, gpus // sequence), "micro_batch_size": 1},
            data={"sequence_length": length, "pack": False},
        )


def render_limits(rows: list[Limit], name: str, gib: float) -> Table:
    """The limits as a table for a terminal."""
    title = f"Largest base for texts of {SHORTEST:,} tokens, and longest text with {name}, on GPUs of {gib:g} GiB"
    columns = ("GPUs", "largest base", "GiB a rank", "the next larger", "longest text", "bound by")
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        longest = f"{row.longest:,}" if row.longest else f"less than {SHORTEST:,}"
        table.add_row(f"{row.gpus}", row.base or "none", f"{row.base_gib:.1f}", row.larger, longest, row.longer)
    return table
