"""Loads base models by folder or hub name, or builds them from a config."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from cqwen_dist.config.architectures import architecture, text_part
from cqwen_dist.config.errors import Said, UserError, reason_of


def load_base(
    name_or_path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    quantize: str = "none",
    device: torch.device | None = None,
    rows_for: Callable[[int], int] | None = None,
) -> PreTrainedModel:
    """Load a causal model of `ARCHITECTURES` by folder or hub name, safetensors only. Raises `UserError`.

    quantize: `model.quantize`, as in `quantized_loading`. rows_for: maps the number of vocabulary rows to the required
    number (`rows_for` of a tokenizer); missing rows are added.
    """
    loading = quantized_loading(quantize, device or torch.device("cpu"))
    config = base_config(name_or_path, trust_remote_code)
    rows = config.vocab_size if rows_for is None else rows_for(config.vocab_size)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(_local_folder(name_or_path) or name_or_path),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **loading,
        )
    except Exception as error:  # transformers raises many kinds of error for a config.json or files that do not fit
        raise base_refusal(name_or_path, error) from None
    base, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would initialise them randomly
        raise UserError("model.name_or_path", f"no {missing[0]} in {name_or_path}", "all weights of the architecture")
    if loading:
        from cqwen_dist.model.quantised import use_own_products  # here: bitsandbytes is optional

        use_own_products(base.model)
        del base.config.quantization_config  # it describes the memory of this run, not the exported model
    add_rows(base, rows)
    return base


def with_own_modules(model: nn.Module) -> Any:
    """A copy with modules of its own whose parameters and buffers are the given model's."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def shared_base(known: dict[Any, Any], key: object, *how: Any) -> Any:
    """`load_base` with modules of its own and the weights of the base that `known` has, or gets, under the key."""
    if key not in known:
        known[key] = load_base(*how)
    return with_own_modules(known[key])


def base_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """The transformers config of a base, by folder or hub name. If the model also reads images: that of its text part.

    Raises `UserError`, also for unsupported models.
    """
    path = _local_folder(name_or_path) or name_or_path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise base_refusal(name_or_path, error) from None
    found = config.to_dict()
    part = text_part(found, name_or_path)
    architecture(part.get("model_type"), "model_type", name_or_path)
    if part is found:
        return config
    text = config.get_text_config()
    text.tie_word_embeddings = part["tie_word_embeddings"]
    return text


def find_bitsandbytes(kind: str) -> None:
    """Raises `UserError` if `model.quantize` is set and bitsandbytes is missing."""
    if kind != "none" and find_spec("bitsandbytes") is None:
        found = Said(f"{kind} without bitsandbytes")
        raise UserError("model.quantize", found, "none, or pip install cqwen-dist[quant]")


def quantized_loading(kind: str, device: torch.device) -> dict[str, Any]:
    """Keywords for `from_pretrained` of a frozen base in 8 or 4 bits (`model.quantised`). Empty for "none".

    Token table, output head (the source of W_cls), norms and biases are not quantised. Raises `UserError`.
    """
    if kind == "none":
        return {}
    find_bitsandbytes(kind)
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": True}
    how = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    return {"quantization_config": how, "device_map": {"": device}}


def base_tokenizer(name_or_path: str) -> Any:
    """The transformers tokenizer of a model folder or hub name; None if there is none."""
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


@torch.no_grad()
def add_rows(base: PreTrainedModel, rows: int) -> None:
    """Append rows to the vocabulary of a causal model, in place, up to `rows`. Each is the mean of the base's rows.

    In the output head the logit of an added word is the mean of all logits, so it gets at most 1/V of the softmax
    (Jensen). Zero rows would give logit 0, perhaps the largest, and scale 0. The config records the number of added
    rows.
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
    """Mean row of a matrix [rows,H] (a tensor or a lazy file slice), in float64, after rounding to `dtype`."""
    parts = (matrix[first : min(first + 8192, rows)] for first in range(0, rows, 8192))
    total: Tensor = sum((part.to(dtype or part.dtype).double().sum(0) for part in parts), torch.tensor(0.0))
    return total / rows


def record_added_rows(config: Any, rows: int) -> None:
    """Write the new number of rows and the number of added rows into a base config."""
    config.added_rows = rows - config.vocab_size
    config.vocab_size = rows


def build_base(settings: dict[str, Any], seed: int) -> PreTrainedModel:
    """A randomly initialised fp32 base from `model.architecture`, a transformers config. Raises `UserError`."""
    kind = architecture(settings.get("model_type"), "model.architecture.model_type").model_type
    usual = AutoConfig.for_model(kind)
    known = {*usual.to_dict(), *usual.attribute_map, "head_dim"}  # which all read, but not all declare
    if unknown := sorted(set(settings) - known):
        raise UserError(f"model.architecture.{unknown[0]}", "no such key", f"a key of transformers' {kind} config")
    try:
        config = AutoConfig.for_model(**settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise UserError("model.architecture", settings, f"a config that builds ({reason_of(error)})") from None


def base_folder_of(name_or_path: str) -> Path:
    """The folder with the files of a base model; downloads them if needed. Raises `UserError`."""
    if (folder := _local_folder(name_or_path)) is not None:
        return folder
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise base_refusal(name_or_path, error) from None


def _local_folder(name_or_path: str) -> Path | None:
    """The local folder of this name; None for a hub name. Raises `UserError`."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir() and not name_or_path.startswith((".", "/", "~")):
        return None
    if not (folder / "config.json").is_file():
        allowed = "a folder with a config.json, or a hub name; paths count from the current folder"
        raise UserError("model.name_or_path", name_or_path, allowed)
    return folder


def base_refusal(name_or_path: str, error: Exception) -> UserError:
    """A one-line error for a base model that does not load."""
    allowed = f"a folder, as seen from the current one, or a hub name, that loads ({reason_of(error)})"
    return UserError("model.name_or_path", name_or_path, allowed)
