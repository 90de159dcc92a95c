"""How the layers of a base run while it trains: what they keep, how adapters and attention are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cqwen_dist.config.base_model import ModelConfig
from cqwen_dist.model.fused_lora import fuse_adapters
from cqwen_dist.model.varlen import attend_within_texts


def run_layers_as(transformer: Any, asked: ModelConfig) -> None:
    """Set a transformer's layers up for training, in place; names of modules and parameters stay."""
    if asked.gradient_checkpointing:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    fuse_adapters(transformer)
    if asked.attention == "varlen":
        attend_within_texts(transformer)
    if asked.compile_layers:
        compile_layers(transformer)


def compile_layers(transformer: nn.Module, **options: Any) -> None:
    """Compile every layer in place by itself; options: torch.compile's.

    The layers share their code, so it is compiled once: for each of gradients or none, adapters on or off, a mask or
    none, and at first for new shapes. What DeepSpeed and PEFT put around the layers is not touched.
    """
    # At its default of 8 kinds, dynamo gives the layers up for good and runs them uncompiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in transformer.get_submodule("layers").children():
        layer.compile(**options)
