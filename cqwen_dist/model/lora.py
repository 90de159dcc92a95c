"""PEFT's adapters on the backbone: injected once, before training begins, with B = 0, so the base is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from cqwen_dist.config.errors import UserError
from cqwen_dist.config.training import LoraConfig

ADAPTER = "default"


def peft_config(config: LoraConfig) -> PeftLoraConfig:
    """Our config as PEFT's."""
    return PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_rslora=config.rslora,
        use_dora=config.dora,
    )


def inject_lora(transformer: nn.Module, config: LoraConfig) -> None:
    """Add adapters in place. Raises `UserError` where no module has one of the names, or DoRA's weights are not whole.

    The model's outputs stay the same to the bit: B = 0, and DoRA's magnitude equals the norm that it divides by.
    """
    if config.dora and any(hasattr(p, "ds_id") for p in transformer.parameters()):
        raise UserError("model.lora.dora", True, "false where ZeRO-3 partitions the base: its norms need whole weights")
    try:
        inject_adapter_in_model(peft_config(config), transformer, adapter_name=ADAPTER)
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n, m in transformer.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            "model.lora.target_modules", config.target_modules, f"names out of {', '.join(linear)}, or all-linear"
        ) from error


def is_lora(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ".lora_" in name


def is_lora_b(name: str) -> bool:
    """Whether it is a B matrix, which LoRA+ gives a rate of its own."""
    return ".lora_B." in name or ".lora_embedding_B." in name


def is_magnitude(name: str) -> bool:
    """Whether it is DoRA's magnitude, a vector: no weight decay."""
    return ".lora_magnitude_vector." in name


@contextmanager
def adapters_disabled(transformer: nn.Module) -> Iterator[None]:
    """Inside, every adapter is bypassed: the base's own outputs."""
    layers = [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's own switch, enable_adapters, also toggles requires_grad
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_lora(transformer: nn.Module) -> None:
    """Fold every adapter into its layer and remove it, in place."""
    for name, module in list(transformer.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(transformer.get_submodule(parent), child, module.get_base_layer())
