"""Module 2: the base's transformer, fed with embeddings (seed S0 section 2); and how a base model is had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cqwen_dist.config import UserError
from cqwen_dist.model.quantized import quantized_loading

SUPPORTED = ("qwen2", "qwen3")


class FeatureExtractionNetwork(nn.Module):
    """z = QwenTransformer(e): composition, not a rebuilt transformer; weights are the base's own.

    The transformer is fed with `inputs_embeds`; its token table lives in `NumericalAwareEmbedding`.
    """

    def __init__(self, qwen_model: PreTrainedModel) -> None:
        super().__init__()
        self.transformer = qwen_model

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        """embeddings [B,T,H], attention_mask [B,T] -> z [B,T,H], the last hidden state after the final norm.

        past_key_values: a transformers cache, extended in place.
        """
        return self.transformer(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        ).last_hidden_state


def check_architecture(config: Any, where: str) -> None:
    """Raises `UserError` unless the config is of a model family that is supported."""
    if getattr(config, "model_type", None) not in SUPPORTED:
        raise UserError("model_type", getattr(config, "model_type", None), " or ".join(SUPPORTED), where)


def load_base(
    name_or_path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    quantize: str = "none",
    device: torch.device | None = None,
) -> PreTrainedModel:
    """A Qwen2/2.5/3 causal model by folder or hub name, safetensors only. Raises `UserError`.

    quantize: `model.quantize`; with nf4 it is loaded on the device, in 4 bits (`model.quantized`).
    """
    loading = quantized_loading(quantize, device or torch.device("cpu"))
    looks_local = name_or_path.startswith((".", "/", "~")) or os.path.isdir(name_or_path)
    path = str(Path(name_or_path).expanduser()) if looks_local else name_or_path
    if looks_local and not Path(path, "config.json").is_file():
        raise UserError("model.name_or_path", name_or_path, "a folder with a config.json, or a hub name")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        check_architecture(config, name_or_path)
        base = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, **loading
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError("model.name_or_path", name_or_path, f"a model that loads ({reason})") from None
    if loading:
        base.model.is_loaded_in_4bit = True  # where PEFT looks, and adapters go on the transformer alone
        del base.config.quantization_config  # of this run's memory, not of the model that is exported
    return base


def build_base(architecture: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A randomly initialised base from a transformers config given in the file. Raises `UserError`."""
    kind = architecture.get("model_type")
    if kind not in SUPPORTED:
        raise UserError("model.architecture.model_type", kind, " or ".join(SUPPORTED))
    known = set(AutoConfig.for_model(kind).to_dict())
    unknown = sorted(set(architecture) - known)
    if unknown:
        raise UserError(f"model.architecture.{unknown[0]}", "no such key", f"a key of transformers' {kind} config")
    try:
        config = AutoConfig.for_model(**architecture)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError("model.architecture", architecture, f"a config that builds ({reason})") from None


def compile_layers(transformer: nn.Module, **options: Any) -> None:
    """Compile every layer in place, each by itself: their code is one, so it is compiled once, and DeepSpeed's and
    PEFT's parts around the layers stay as they are. options: torch.compile's."""
    for layer in transformer.get_submodule("layers").children():
        layer.compile(**options)
