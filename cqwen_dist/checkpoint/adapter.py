"""Adapters in PEFT's format. `PeftModel.from_pretrained(base, folder)` reads them without this package.

    adapter/adapter_model.safetensors    unsharded tensors, fp32, with PEFT's names
    adapter/adapter_config.json          rank, alpha, modules, and the base model's name

PEFT's tensor names omit the adapter's name. Our names, also for optimizer moments, are the parameter names in
`CausalQwenModel.features`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cqwen_dist.checkpoint.manifest import refuse_pickles
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.config.training import LoraConfig
from cqwen_dist.model.lora import ADAPTER, peft_config

FOLDER = "adapter"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OURS, _PEFT = "backbone.transformer.", "base_model.model.model."
# PEFT settings that add the same tensors differently, and initialisations that leave the base unchanged
_OTHER_SUMS = ("use_rslora", "alpha_pattern", "rank_pattern", "layer_replication", "alora_invocation_tokens",
               "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")  # fmt: skip
_KEEPS_BASE = ("gaussian", "orthogonal", "eva")


def to_peft(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapter tensors from the features, with PEFT's names."""
    found = {}
    for name, tensor in features.items():
        if is_lora(name):
            theirs = _PEFT + name.removeprefix(_OURS).replace(f".{ADAPTER}", "")
            found[theirs.removesuffix(".weight") if ".lora_magnitude_vector" in name else theirs] = tensor
    return found


def write_config(folder: Path, lora: dict[str, Any], base: str | None) -> None:
    """Write adapter_config.json. lora: our settings; base: the base model's name or folder."""
    config = peft_config(LoraConfig(**lora))
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.base_model_name_or_path = base
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # a set's order differs between processes
    config.save_pretrained(str(folder))


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read adapters in PEFT's format; returns them with our names. Raises `UserError`."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        refuse_pickles(folder)
        raise UserError("adapter", Said(f"no {WEIGHTS}"), "an adapter that PEFT saved", str(folder)) from None
    except (OSError, SafetensorError) as error:
        raise UserError("adapter", Said(str(error)), "safetensors that can be read", str(folder / WEIGHTS)) from None
    odd = [name for name in tensors if not name.startswith(_PEFT)]
    if odd:
        allowed = f"adapters of a causal base model alone: names that begin with {_PEFT}"
        raise UserError("adapter", odd[0], allowed, str(folder / WEIGHTS))
    found = {}
    for name, tensor in tensors.items():
        stem, weight, _ = (_OURS + name.removeprefix(_PEFT)).partition(".weight")
        found[f"{stem}.{ADAPTER}{'.weight' if '.lora_magnitude_vector' in name else weight}"] = tensor
    return found


def _last(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def refuse_lora_changes(folder: Path, lora: LoraConfig) -> None:
    """Raises `UserError` with the key if an adapter's shape or scale differs from the settings."""
    try:
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("adapter", Said(str(error)), f"an {CONFIG} that can be read", str(folder)) from None
    kind = saved.get("peft_type") if isinstance(saved, dict) else None
    if kind != "LORA":
        raise UserError("peft_type", kind, "LORA", str(folder / CONFIG))
    wanted = peft_config(lora)
    # Older PEFT versions do not write these keys.
    saved = {"use_dora": False, "target_parameters": None, **saved}
    if isinstance(saved.get("target_modules"), str):  # a pattern: the names of its tensors are compared later
        saved["target_modules"] = wanted.target_modules
    names = {"alpha": "lora_alpha", "dora": "use_dora"}  # PEFT's names that differ from ours
    for key in ("r", "alpha", "dora", "target_modules", "target_parameters"):
        ours, theirs = getattr(wanted, names.get(key, key)), saved.get(names.get(key, key))
        if isinstance(theirs, list):  # PEFT writes all-linear as the full name of each map
            ours, theirs = (_last(ours) if isinstance(ours, (set, list)) else ours), _last(theirs)
        if ours != theirs:
            raise UserError(f"model.lora.{key}", ours, f"{theirs!r}, as in {folder / CONFIG}")
    for key in _OTHER_SUMS:
        if saved.get(key):
            raise UserError(key, saved[key], "none: adapters that are added in one way", str(folder / CONFIG))
    start = saved.get("init_lora_weights")
    if isinstance(start, str) and start not in _KEEPS_BASE:
        allowed = f"true, false, {', '.join(_KEEPS_BASE)}: others change the base too (save with PEFT's conversion)"
        raise UserError("init_lora_weights", start, allowed, str(folder / CONFIG))
