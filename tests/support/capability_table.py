"""What works on each architecture, as a page: `python tests/support/capability_table.py`."""

import sys
from dataclasses import fields

from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.architectures.base_architecture import Capabilities, Support

FEATURES = {
    "varlen": "`model.attention: varlen`",
    "packing": "`data.pack`",
    "compiled_layers": "`model.compile_layers`",
    "gradient_checkpointing": "`model.gradient_checkpointing`",
    "quantize": "`model.quantize`",
    "zero_3": "`parallel.zero_stage: 3`",
    "sequence_groups": "`parallel.sequence_group_size`",
    "fused_adapters": "an adapter and its map in one product",
    "expert_adapters_zero_3": "`experts` in `target_modules` under ZeRO-3",
    "merge": "`cqwen export --merge`",
    "plain_export": "`cqwen export --as-base`",
    "vllm": "`cqwen serve --engine vllm`",
}
_HEAD = """# What works on each architecture

Written by `make docs` from `cqwen_dist/config/architectures/`; [bases](bases.md) explains the features.
A run lists the experimental features that it uses; unsupported ones are refused with the reason, also by `cqwen plan`.
"""


def page() -> str:
    """The features by architecture, and the reason for each that is not supported."""
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
    return _HEAD + "\n" + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
