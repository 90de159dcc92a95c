"""Two tiers of config keys: basic ones, which most runs set, and expert ones, whose defaults rarely change."""

from __future__ import annotations

from typing import Any

# By section, in the order of a config. A section that is not named has expert keys alone.
_BASIC = {
    "model": "name_or_path architecture tokenizer gradient_checkpointing compile_layers warm_start",
    "model.lora": "r alpha dropout target_modules",
    "data": "train eval eval_fraction watch recipe text_field text_template prompt_template sequence_length pack "
    "numeric_targets",
    "loss": "reg_weight target_transform constraint.mode constraint.eps",
    "stages": "name train steps epochs until.metric until.patience until.max_steps lr lr_groups warmup_steps",
    "parallel": "zero_stage vocab_group_size",
    "train": "global_batch_size micro_batch_size precision seed checkpoint_every eval_every best_metric",
    "run": "dir name resume wandb",
}
BASIC = ("start", *(f"{section}.{key}" for section, keys in _BASIC.items() for key in keys.split()))


def with_tiers(schema: dict[str, Any], basic_only: bool) -> dict[str, Any]:
    """A JSON Schema of the config with `x-tier` at every key; basic_only: without the expert keys."""
    definitions: dict[str, Any] = schema["$defs"]
    used = set()

    def mark(section: dict[str, Any], path: str) -> None:
        kept = {}
        for name, found in section.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            basic = any(f"{place}.".startswith(f"{key}.") or f"{key}.".startswith(f"{place}.") for key in BASIC)
            if basic_only and not basic:
                continue
            kept[name] = {**found, "x-tier": "basic" if basic else "expert"}
            for other in sections_of(found):
                used.add(other)
                mark(definitions[other], place)
        section["properties"] = kept

    mark(schema, "")
    schema["$defs"] = {name: definition for name, definition in definitions.items() if name in used}
    return schema


def sections_of(key: dict[str, Any]) -> list[str]:
    """Names of the sections that a key refers to."""
    found = [key["$ref"].rsplit("/", 1)[1]] if "$ref" in key else []
    parts = (*key.get("anyOf", ()), *key.get("allOf", ()), *key.get("patternProperties", {}).values())
    for part in (*parts, key.get("items"), key.get("additionalProperties")):
        found += sections_of(part) if isinstance(part, dict) else []
    return found
