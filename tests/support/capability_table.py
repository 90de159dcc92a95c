"""What works on each architecture, and with what, as a page: `python tests/support/capability_table.py`."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.architectures.base_architecture import Capabilities, Support
from cqwen_dist.config.reading import given_config

FEATURES = {
    "varlen": "`model.attention: varlen`",
    "packing": "`data.pack`",
    "compiled_layers": "`model.compile_layers`",
    "gradient_checkpointing": "`model.gradient_checkpointing`",
    "quantize": "`model.quantize`",
    "zero_3": "`parallel.zero_stage: 3`",
    "sequence_groups": "`parallel.sequence_group_size`",
    "fused_adapters": "an adapter and its map in one product",
    "merge": "`cqwen export --merge`",
    "vllm": "`cqwen serve --engine vllm`",
}
# One key each, beside a config of defaults
OPTIONS: dict[str, Any] = {
    "model.quantize: int8": "int8",
    "model.quantize: nf4": "nf4",
    "parallel.zero_stage: 2": 2,
    "parallel.zero_stage: 3": 3,
    "parallel.vocab_group_size: 2": 2,
    "parallel.sequence_group_size: 2": 2,
    "parallel.offload: optimizer": "optimizer",
    "data.pack: true": True,
    "model.attention: varlen": "varlen",
    "model.gradient_checkpointing: true": True,
    "model.compile_layers: true": True,
    "model.wide: 64": 64,
    "model.candidates: arithmetic": "arithmetic",
    "model.number_head: laplace": "laplace",
    "model.lora.dora: true": True,
    "train.precision: bf16": "bf16",
    "start: seed": "seed",
}
_HEAD = """# What works on each architecture, and with what

Written by `make docs` from `cqwen_dist/config/architectures/`; [bases](bases.md) explains the features.
A run lists the experimental features that it uses; unsupported ones are refused with the reason, also by `cqwen plan`.
"""
_PAIRS = """## What goes with what
Each option is one key beside the defaults, on `qwen2`. + trains: a test takes two steps with each of these pairs
(`tests/training/test_pairs.py`). A number refers to the reason below."""


def keys_of(*options: str) -> dict[str, Any]:
    """Overrides for these options."""
    return {option.partition(":")[0]: OPTIONS[option] for option in options}


def pairs() -> list[tuple[str, str]]:
    """All pairs of options with two keys."""
    return [pair for pair in combinations(OPTIONS, 2) if len(keys_of(*pair)) == 2]


def refusal(options: Sequence[str], kind: str = "qwen2") -> UserError | None:
    """Why a config with these options on an architecture is refused; None if it is allowed."""
    try:
        given_config({"model": {"architecture": {"model_type": kind}}, "data": {"train": "x"}}, keys_of(*options))
    except UserError as error:
        return error
    return None


def refusal_of_vllm(option: str) -> UserError | None:
    """The same of `cqwen serve --engine vllm` for an export that is not merged."""
    from cqwen_dist.tools.vllm.plugin import VllmRules

    keys = keys_of(option)
    lora = {"dora": keys.get("model.lora.dora", False)}
    exported = SimpleNamespace(base={"model_type": "qwen2"}, wide=keys.get("model.wide", 0), lora=lora, further=())
    compiled = SimpleNamespace(cudagraph_mode=None)
    asked = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=exported),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        cache_config=SimpleNamespace(),
        additional_config={},
        compilation_config=compiled,
        speculative_config=None,
        use_v2_model_runner=False,
    )
    try:
        VllmRules.verify_and_update_config(asked)
    except UserError as error:
        return error
    return None


def _together() -> list[str]:
    """The pairs as a matrix, and why those that are refused are."""
    refused = {pair: error for pair in pairs() if (error := refusal(pair))}
    numbers = {pair: str(number) for number, pair in enumerate(refused, 1)}
    both = numbers | {(second, first): number for (first, second), number in numbers.items()}
    known = {pair for first, second in pairs() for pair in ((first, second), (second, first))}
    names = [*OPTIONS]
    lines = [f"| | {' | '.join(chr(ord('a') + i) for i in range(len(names)))} |", "|---|" + "---|" * len(names)]
    for i, row in enumerate(names):
        cells = [both.get((row, column), "+") if (row, column) in known else "" for column in names]
        lines.append(f"| {chr(ord('a') + i)} `{row}` | {' | '.join(cells)} |")
    why = [f"| {number} | `{refused[pair].key}` | {refused[pair].allowed} |" for pair, number in numbers.items()]
    others = [f"`{option}`: {error}" for option in OPTIONS if (error := refusal_of_vllm(option))]
    exports = (
        "A run with any of these options can be exported: with its adapters or with `--merge`, and "
        f"`cqwen serve` answers for it. `--engine vllm` refuses {'; '.join(others)}."
    )
    return ["\n".join(lines), "\n".join(["| | key | allowed |", "|---|---|---|", *why]), exports]


def page() -> str:
    """The features by architecture, and the reason for each that is not supported; then the options by pairs."""
    lines = [f"| | {' | '.join(f'`{kind}`' for kind in ARCHITECTURES)} |", "|---|" + "---|" * len(ARCHITECTURES)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in fields(Capabilities):
        found: list[Support] = [getattr(base.capabilities, each.name) for base in ARCHITECTURES.values()]
        lines.append(f"| {FEATURES[each.name]} | {' | '.join(support.level for support in found)} |")
        for kind, support in zip(ARCHITECTURES, found, strict=True):
            if support.note:
                reasons.setdefault((FEATURES[each.name], support.note), []).append(f"`{kind}`")
    why = [f"| {feature} | {note} | {', '.join(kinds)} |" for (feature, note), kinds in reasons.items()]
    tables = ["\n".join(lines), "\n".join(["| feature | reason | on |", "|---|---|---|", *why])]
    return "\n\n".join([_HEAD, *tables, _PAIRS, *_together()]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
