"""Module 2: the base's transformer, fed with embeddings (seed S0 section 2); loading and building base models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cqwen_dist.config import UserError
from cqwen_dist.config.bases import check_model_type, rows_with_number
from cqwen_dist.model.quantized import quantized_loading


class FeatureExtractionNetwork(nn.Module):
    """z = Transformer(e): composition, not a rebuilt transformer; weights are the base's own.

    The transformer is fed with `inputs_embeds`; its token table lives in `NumericalAwareEmbedding`.
    """

    def __init__(self, qwen_model: PreTrainedModel) -> None:
        """qwen_model: a transformer, or a causal model, whose transformer alone is kept (S2 3.2)."""
        super().__init__()
        self.transformer = qwen_model.base_model

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


@contextmanager
def seen_inside(transformer: nn.Module, **asked: Any) -> Iterator[dict[str, Any]]:
    """Inside, a call of the transformer leaves here what is asked for: with output_hidden_states hidden_states [B,T,H]
    each (embeddings, each layer's, the last is z), with output_attentions attentions [B,heads,T,T] of each layer."""
    seen: dict[str, Any] = {}
    hooks = (
        transformer.register_forward_pre_hook(lambda _, args, given: (args, {**given, **asked}), with_kwargs=True),
        transformer.register_forward_hook(lambda _, args, output: seen.update(output)),
    )
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def load_base(
    name_or_path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    quantize: str = "none",
    device: torch.device | None = None,
    rows_for: Callable[[int], int] | None = None,
) -> PreTrainedModel:
    """A causal model (Qwen2/2.5/3, Llama, Mistral) by folder or hub name, safetensors only. Raises `UserError`.

    quantize: `model.quantize`; with nf4 it is loaded on the device, in 4 bits (`model.quantized`). rows_for: how many
    rows its vocabulary is to have, from how many it has (a tokenizer's own `rows_for`); those missing are added.
    """
    loading = quantized_loading(quantize, device or torch.device("cpu"))
    looks_local = name_or_path.startswith((".", "/", "~")) or os.path.isdir(name_or_path)
    path = str(Path(name_or_path).expanduser()) if looks_local else name_or_path
    if looks_local and not Path(path, "config.json").is_file():
        raise UserError("model.name_or_path", name_or_path, "a folder with a config.json, or a hub name")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        check_model_type(getattr(config, "model_type", None), "model_type", name_or_path)
        rows = config.vocab_size if rows_for is None else rows_for(config.vocab_size)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **loading,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise base_refusal(name_or_path, error) from None
    base, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would draw it at random
        raise UserError("model.name_or_path", f"no {missing[0]} in {name_or_path}", "all weights of the architecture")
    if loading:
        base.model.is_loaded_in_4bit = True  # where PEFT looks, and adapters go on the transformer alone
        del base.config.quantization_config  # of this run's memory, not of the model that is exported
    add_rows(base, rows)
    return base


def tokenizer_rows(name_or_path: str) -> int | None:
    """Rows that the tokenizer of a model's folder uses, as `data.tokenizer` counts them; None without a tokenizer."""
    tokenizer = tokenizer_beside(name_or_path)
    return None if tokenizer is None else max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def tokenizer_beside(name_or_path: str) -> Any:
    """transformers' tokenizer of a model's folder or hub name; None where it has none."""
    folder = Path(name_or_path).expanduser()
    # From a folder without these files transformers builds an empty tokenizer.
    if folder.is_dir() and not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    try:
        where = str(folder) if folder.is_dir() else name_or_path
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)  # None would ask at the terminal
    except (OSError, ValueError, KeyError):
        return None
    return getattr(tokenizer, "tokenizer", tokenizer)  # of `cqwen_dist.auto`'s own class


def rows_with_number_for(used: int | None, num_token_id: int | None) -> Callable[[int], int] | None:
    """`load_base`'s rows_for for a tokenizer that uses this many rows; None without a tokenizer."""
    if used is None or num_token_id is None:
        return None
    return lambda rows: rows_with_number(rows, used, num_token_id)


@torch.no_grad()
def add_rows(base: PreTrainedModel, rows: int) -> None:
    """Append rows to a causal model's vocabulary, in place, until it has `rows`: each is the mean of its own rows.

    In the output head an added word gets the mean of all logits, so at most 1/V of the softmax (Jensen). Zero rows
    would give it logit 0, perhaps the largest, and scale 0. The config records how many rows were added.
    """
    table: Any = base.get_input_embeddings()
    head: Any = base.get_output_embeddings()
    if rows <= base.config.vocab_size:
        return
    tied = head.weight is table.weight
    table.weight = nn.Parameter(with_mean_rows(table.weight, rows), requires_grad=table.weight.requires_grad)
    if tied:
        head.weight = table.weight
    else:
        head.weight = nn.Parameter(with_mean_rows(head.weight, rows), requires_grad=head.weight.requires_grad)
    table.num_embeddings = head.out_features = rows
    say_added(base.config, rows)


def with_mean_rows(matrix: Tensor, rows: int) -> Tensor:
    """[V,H] -> [rows,H]."""
    return torch.cat([matrix, mean_row(matrix, len(matrix)).to(matrix).expand(rows - len(matrix), -1)])


def mean_row(matrix: Any, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of the rows of [rows,H], a tensor or a file's slice, in float64; of numbers as `dtype` holds them."""
    parts = (matrix[first : min(first + 8192, rows)] for first in range(0, rows, 8192))
    total: Tensor = sum((part.to(dtype or part.dtype).double().sum(0) for part in parts), torch.tensor(0.0))
    return total / rows


def say_added(config: Any, rows: int) -> None:
    """In a base's config: its rows, and that the last `added_rows` of them are not its own."""
    config.added_rows = rows - config.vocab_size
    config.vocab_size = rows


def build_base(architecture: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A randomly initialised base from a transformers config given in the file. Raises `UserError`."""
    check_model_type(architecture.get("model_type"), "model.architecture.model_type")
    kind = str(architecture["model_type"])
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
    """Compile every layer in place by itself. They share one code, so it is compiled once; what DeepSpeed and PEFT put
    around the layers is not touched. options: torch.compile's."""
    for layer in transformer.get_submodule("layers").children():
        layer.compile(**options)


def base_folder_of(name_or_path: str) -> Path:
    """The folder of a base model's files, downloaded if it must be. Raises `UserError`."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if name_or_path.startswith((".", "/", "~")):
        raise UserError("model.name_or_path", name_or_path, "a folder with a config.json, or a hub name")
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise base_refusal(name_or_path, error) from None


def base_refusal(name_or_path: str, error: Exception) -> UserError:
    """A base model that does not load, in one line."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UserError("model.name_or_path", name_or_path, f"a model that loads ({reason})")
