"""PEFT adapters on the backbone: injected once before training, with B = 0, so the base does not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from cqwen_dist.config.architectures.base_architecture import EXPERTS
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.training import LoraConfig

ADAPTER = "default"
EXPERT_PARAMETERS = ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """Convert our config to PEFT's."""
    modules, parameters = config.target_modules, None
    if EXPERTS in modules:  # all experts are one parameter each for two maps, which PEFT adapts by name
        modules, parameters = [name for name in modules if name != EXPERTS], list(EXPERT_PARAMETERS)
    return PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=modules,
        target_parameters=parameters,
        use_dora=config.dora,
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )


def inject_lora(transformer: nn.Module, config: LoraConfig) -> None:
    """Add adapters in place. Raises `UserError` if a target name is unknown, or for DoRA on partitioned weights.

    The outputs of the model stay equal to the bit: B = 0, and DoRA's magnitude equals the norm that it divides by.
    """
    if config.dora and any(hasattr(p, "ds_id") for p in transformer.parameters()):
        raise UserError("model.lora.dora", True, "false if ZeRO-3 partitions the base: its norms need whole weights")
    try:
        inject_adapter_in_model(peft_config(config), transformer, adapter_name=ADAPTER)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in transformer.named_modules() if isinstance(m, nn.Linear)})
        allowed = f"names out of {', '.join(linear)}, or all-linear"
        raise UserError("model.lora.target_modules", config.target_modules, allowed) from error


def held_start(lora: dict[str, Any]) -> dict[str, Any]:
    """The settings of the adapters in the model, for adapters that start from weights: see `start_from_weights`."""
    config = LoraConfig(**lora)
    return {**lora, "r": 2 * config.r, "alpha": 2 * config.alpha, "init": "default"} if config.from_weights else lora


@torch.no_grad()
def start_from_weights(transformer: nn.Module, init: Any) -> None:
    """Start adapters by PEFT's decomposition of their own weights: PiSSA or OLoRA.

    PEFT takes the start B0 A0 away from the base's weight W. Here W stays, so that switched-off adapters are the base,
    and checkpoints and exports contain plain adapters of twice the rank: W + s [B, -B0] [A; A0]. A0, B0 get no
    gradient.
    """
    adapted: list[Any] = [each for each in transformer.modules() if isinstance(each, PeftLinear)]
    for module in adapted:
        a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        r, rank = len(a) // 2, min(len(a) // 2, a.shape[1], len(b))  # a small map's; beyond it A is random, and B 0
        settings = PeftLoraConfig(r=rank, target_modules=["map"], init_lora_weights=init)
        settings.lora_alpha = module.scaling[ADAPTER] * rank
        alone: Any = nn.ModuleDict({"map": copy.deepcopy(module.get_base_layer())})
        inject_adapter_in_model(settings, alone, adapter_name=ADAPTER)
        begin = alone["map"]
        for at, sign in ((0, 1), (r, -1)):
            a[at : at + rank] = begin.lora_A[ADAPTER].weight
            b[:, at : at + rank] = sign * begin.lora_B[ADAPTER].weight
        a.register_hook(partial(_first_part, dim=0, size=r))
        b.register_hook(partial(_first_part, dim=1, size=r))


def _first_part(gradient: Tensor, dim: int, size: int) -> Tensor:
    """The gradient of A or B, with zeros for the part of the start."""
    kept = gradient.clone()
    kept.narrow(dim, size, size).zero_()
    return kept


def is_lora(name: str) -> bool:
    """Whether a parameter name belongs to an adapter."""
    return ".lora_" in name


def is_lora_b(name: str) -> bool:
    """Whether this is a B matrix, which has a separate learning rate in LoRA+."""
    return ".lora_B." in name or ".lora_embedding_B." in name


def is_magnitude(name: str) -> bool:
    """Whether this is a DoRA magnitude, a vector without weight decay."""
    return ".lora_magnitude_vector." in name


@contextmanager
def adapters_disabled(transformer: nn.Module) -> Iterator[None]:
    """Inside, all adapters are bypassed, which gives the outputs of the base."""
    layers = [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's enable_adapters would also toggle requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def refuse_rounded(model: nn.Module) -> None:
    """Raises `UserError` for a base in 8 or 4 bits: it has no room for adapters, and no folder for its scales."""
    if any(p.dtype in (torch.int8, torch.uint8) for p in model.parameters()):
        allowed = "a full base (`cqwen export` writes it, and merges with --merge)"
        raise UserError("model", Said("its base has 8 or 4 bits"), allowed)


def merge_lora(transformer: nn.Module) -> None:
    """Merge all adapters into their layers and remove them, in place. Raises `UserError`."""
    refuse_rounded(transformer)
    for name, module in reversed(list(transformer.named_modules())):  # experts have one adapter inside of the other
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())
