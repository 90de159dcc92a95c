"""Module 2: the base's transformer, fed with embeddings (seed S0 section 2); loading and building base models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.bases import rows_with_number
from cqwen_dist.config.errors import Said, UserError, reason_of


class FeatureExtractionNetwork(nn.Module):
    """z = Transformer(e): the base's own transformer, fed with `inputs_embeds`.

    Its token table is part of `NumericalAwareEmbedding`.
    """

    def __init__(self, qwen_model: PreTrainedModel) -> None:
        """qwen_model: a transformer, or a causal model, whose transformer is kept (S2 3.2)."""
        super().__init__()
        self.transformer = qwen_model.base_model
        self._cache = cache_name(self.transformer)

    def forward(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        texts: Any = None,
    ) -> Tensor:
        """embeddings [B,T,H], attention_mask [B,T] -> z [B,T,H], the last hidden state after the final norm.

        past_key_values: a transformers cache, extended in place. texts: the batch's `Texts`, for a transformer that
        attends inside each (`model.varlen`).
        """
        within = {} if texts is None else {"texts": texts}
        if texts is not None:  # a mask of four dimensions is taken as it is, so none is made
            attention_mask = embeddings.new_empty(0, 0, 0, 0)
        return self.transformer(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=past_key_values is not None,
            **{self._cache: past_key_values},
            **within,
        ).last_hidden_state


def cache_name(transformer: nn.Module) -> str:
    """The argument that takes a transformers model's cache: past_key_values, which 5.24 renamed and warns of since."""
    return "cache" if "cache" in inspect.signature(transformer.forward).parameters else "past_key_values"


@contextmanager
def seen_inside(transformer: nn.Module, **asked: Any) -> Iterator[dict[str, Any]]:
    """Inside, a call of the transformer writes the outputs that are asked for into the dict.

    With output_hidden_states: hidden_states, [B,T,H] each (the embeddings, then each layer's; the last is z). With
    output_attentions: attentions, [B,heads,T,T] of each layer.
    """
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
    """A causal model of one of `ARCHITECTURES` by folder or hub name, safetensors only. Raises `UserError`.

    quantize: `model.quantize`, as `quantized_loading`. rows_for: the rows that its vocabulary has -> those that it
    needs (a tokenizer's own `rows_for`); missing rows are added.
    """
    loading = quantized_loading(quantize, device or torch.device("cpu"))
    config = base_config(name_or_path, trust_remote_code)
    path = str(_local_folder(name_or_path) or name_or_path)
    try:
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
        base.model.is_loaded_in_4bit = True  # PEFT looks here, as adapters go on the transformer alone
        del base.config.quantization_config  # it describes this run's memory, not the model that is exported
    add_rows(base, rows)
    return base


def base_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """transformers' config of a base, by folder or hub name. Raises `UserError`, also for what cannot be a base."""
    path = _local_folder(name_or_path) or name_or_path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        raise base_refusal(name_or_path, error) from None
    architecture(getattr(config, "model_type", None), "model_type", name_or_path)
    return config


def quantized_loading(kind: str, device: torch.device) -> dict[str, Any]:
    """Keywords for `from_pretrained` of a frozen base in 4 bits (QLoRA): bitsandbytes' NF4. None for "none".

    The backbone's linear maps hold 4 bits a weight and are multiplied in bf16. Adapters, w_num, the heads and the
    output head that W_cls is copied from are not quantized. z is the quantized base's from the first step on, also in
    calibration and `eval/base_accuracy`. Not yet measured on a GPU. Raises `UserError` without a GPU or bitsandbytes.
    """
    if kind == "none":
        return {}
    if device.type != "cuda":
        raise UserError("model.quantize", kind, "none on a CPU: bitsandbytes' 4-bit kernels need a GPU")
    if find_spec("bitsandbytes") is None:
        raise UserError("model.quantize", Said(f"{kind} without bitsandbytes"), "none, or pip install bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.uint8,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def tokenizer_rows(tokenizer: Any) -> int | None:
    """The rows that a tokenizer of transformers uses, as `data.tokenizer` counts them; None without one."""
    return None if tokenizer is None else max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def base_tokenizer(name_or_path: str) -> Any:
    """transformers' tokenizer of a model's folder or hub name; None where it has none."""
    folder = Path(name_or_path).expanduser()
    # transformers builds an empty tokenizer from a folder without these files.
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
    """Append rows to a causal model's vocabulary, in place, until it has `rows`. Each is the mean of the base's rows.

    In the output head an added word gets the mean of all logits, so at most 1/V of the softmax (Jensen). Zero rows
    would give it logit 0, perhaps the largest, and scale 0. The config records how many rows were added.
    """
    table: Any = base.get_input_embeddings()
    head: Any = base.get_output_embeddings()
    if rows <= base.config.vocab_size:
        return
    tied = head.weight is table.weight
    for module in (table,) if tied else (table, head):
        own = module.weight
        added = mean_row(own, len(own)).to(own).expand(rows - len(own), -1)
        module.weight = nn.Parameter(torch.cat([own, added]), requires_grad=own.requires_grad)
    if tied:
        head.weight = table.weight
    table.num_embeddings = head.out_features = rows
    record_added_rows(base.config, rows)


def mean_row(matrix: Any, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of the rows of [rows,H], a tensor or a file's slice, in float64, after rounding to `dtype`."""
    parts = (matrix[first : min(first + 8192, rows)] for first in range(0, rows, 8192))
    total: Tensor = sum((part.to(dtype or part.dtype).double().sum(0) for part in parts), torch.tensor(0.0))
    return total / rows


def record_added_rows(config: Any, rows: int) -> None:
    """Write the new number of rows, and how many of them were added, into a base's config."""
    config.added_rows = rows - config.vocab_size
    config.vocab_size = rows


def build_base(settings: dict[str, Any], seed: int) -> PreTrainedModel:
    """A randomly initialised fp32 base from `model.architecture`, a transformers config. Raises `UserError`."""
    kind = architecture(settings.get("model_type"), "model.architecture.model_type").model_type
    if unknown := sorted(set(settings) - set(AutoConfig.for_model(kind).to_dict())):
        raise UserError(f"model.architecture.{unknown[0]}", "no such key", f"a key of transformers' {kind} config")
    try:
        config = AutoConfig.for_model(**settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, AttributeError) as error:
        raise UserError("model.architecture", settings, f"a config that builds ({reason_of(error)})") from None


def base_folder_of(name_or_path: str) -> Path:
    """The folder of a base model's files, downloaded where needed. Raises `UserError`."""
    if (folder := _local_folder(name_or_path)) is not None:
        return folder
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise base_refusal(name_or_path, error) from None


def _local_folder(name_or_path: str) -> Path | None:
    """The folder that is meant, if none of a hub is. Raises `UserError`."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir() and not name_or_path.startswith((".", "/", "~")):
        return None
    if not (folder / "config.json").is_file():
        raise UserError("model.name_or_path", name_or_path, "a folder with a config.json, or a hub name")
    return folder


def base_refusal(name_or_path: str, error: Exception) -> UserError:
    """The error of a base model that does not load, in one line."""
    return UserError("model.name_or_path", name_or_path, f"a model that loads ({reason_of(error)})")
