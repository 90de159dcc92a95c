"""Two tiers of config keys: those that most runs set, and the others, which have defaults that rarely change."""

from __future__ import annotations

from typing import Any

# In the order of a config. A section that is not named has expert keys alone.
BASIC = (
    "model.name_or_path",
    "model.architecture",
    "model.tokenizer",
    "model.gradient_checkpointing",
    "model.compile_layers",
    "model.lora.r",
    "model.lora.alpha",
    "model.lora.dropout",
    "model.lora.target_modules",
    "model.warm_start",
    "data.train",
    "data.eval",
    "data.eval_fraction",
    "data.watch",
    "data.recipe",
    "data.text_field",
    "data.text_template",
    "data.prompt_template",
    "data.sequence_length",
    "data.pack",
    "data.numeric_targets",
    "start",
    "loss.reg_weight",
    "loss.target_transform",
    "loss.constraint.mode",
    "loss.constraint.eps",
    "stages.name",
    "stages.train",
    "stages.steps",
    "stages.epochs",
    "stages.until.metric",
    "stages.until.patience",
    "stages.until.max_steps",
    "stages.lr",
    "stages.lr_groups",
    "stages.warmup_steps",
    "parallel.zero_stage",
    "parallel.vocab_group_size",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.precision",
    "train.seed",
    "train.checkpoint_every",
    "train.eval_every",
    "train.best_metric",
    "run.dir",
    "run.name",
    "run.resume",
    "run.wandb",
)


def with_tiers(schema: dict[str, Any], basic_only: bool) -> dict[str, Any]:
    """A JSON Schema of the config with `x-tier` at every key; basic_only: without the expert keys."""
    definitions = schema.get("$defs", {})

    def mark(section: dict[str, Any], path: str) -> None:
        kept = {}
        for name, found in section.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            basic = any(f"{place}.".startswith(f"{key}.") or f"{key}.".startswith(f"{place}.") for key in BASIC)
            if basic_only and not basic:
                continue
            kept[name] = {**found, "x-tier": "basic" if basic else "expert"}
            for other in sections_of(found):
                mark(definitions[other], place)
        section["properties"] = kept

    mark(schema, "")
    if basic_only:
        _drop_unused(schema)
    return schema


def sections_of(key: dict[str, Any]) -> list[str]:
    """Names of the sections that a key refers to."""
    found = [key["$ref"].rsplit("/", 1)[1]] if "$ref" in key else []
    parts = (*key.get("anyOf", ()), *key.get("allOf", ()), *key.get("patternProperties", {}).values())
    for part in (*parts, key.get("items"), key.get("additionalProperties")):
        found += sections_of(part) if isinstance(part, dict) else []
    return found


def _drop_unused(schema: dict[str, Any]) -> None:
    """Without the definitions that nothing refers to any more."""
    definitions = schema.pop("$defs", {})
    used: set[str] = set()
    left = [schema]
    while left:
        for key in left.pop().get("properties", {}).values():
            for name in set(sections_of(key)) - used:
                used.add(name)
                left.append(definitions[name])
    schema["$defs"] = {name: definition for name, definition in definitions.items() if name in used}
