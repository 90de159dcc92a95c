"""PEFT adapters on the backbone: injected once before training, with B = 0, so the base does not change."""

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.training import LoraConfig

ADAPTER = "default"


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """Convert our config to PEFT's."""
    return PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_dora=config.dora,
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


def refuse_rounded(model: nn.Module) -> None:
    """Raises `UserError` for a base in 8 or 4 bits: it has no room for adapters, and no folder for its scales."""
    if any(p.dtype in (torch.int8, torch.uint8) for p in model.parameters()):
        allowed = "a full base (`cqwen export` writes it, and merges with --merge)"
        raise UserError("model", Said("its base has 8 or 4 bits"), allowed)


def merge_lora(transformer: nn.Module) -> None:
    """Merge all adapters into their layers and remove them, in place. Raises `UserError`."""
    refuse_rounded(transformer)
    for name, module in list(transformer.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())
