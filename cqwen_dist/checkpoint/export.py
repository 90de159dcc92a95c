"""Exports a checkpoint to a folder that transformers can load anywhere.

OUT/config.json, model*.safetensors      the complete model with its base; adapters in place (or merged)
OUT/tokenizer.json, ..., number_policy.json
OUT/*_causal_qwen.py                     the code, for machines without this package (`checkpoint.portable`)
OUT/adapter/                             the same adapters in PEFT's format, unless merged
OUT/README.md, training.json             the model card, and its facts about training
OUT/calibration.json                     interval factors, if the run measured them
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from cqwen_dist.checkpoint.adapter import WEIGHTS, to_peft, write_config
from cqwen_dist.checkpoint.as_base import HELD, plain_model, plain_tokenizer
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.model_card import model_card, public_name
from cqwen_dist.checkpoint.portable import write_code
from cqwen_dist.checkpoint.resume import TrainState, base_digest, load_checkpoint, refuse_exchanged
from cqwen_dist.checkpoint.tensors import refuse_strange
from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.custom import TRUST
from cqwen_dist.config.errors import Said, UserError, reason_of
from cqwen_dist.config.reading import load_config
from cqwen_dist.config.schema import Config
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.tokenizer import POLICY_FILE, NumericalAwareTokenizer
from cqwen_dist.generate.continuation import end_ids
from cqwen_dist.heads.intervals import FILE as CALIBRATION
from cqwen_dist.heads.intervals import read_intervals
from cqwen_dist.model import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.backbone import base_folder_of, load_base
from cqwen_dist.model.causal_qwen import classes_of
from cqwen_dist.model.lora import is_lora
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.run.files import CONFIG, DIGESTS, STATE, appearing, read_object

ABOUT = "training.json"
EMBEDDING = ("embedding.w_num", "embedding.num_row")  # the embedding's trained parameters
ROUNDING = 1e-5  # allowed relative difference when fp32 sums change their order
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_exported(path: Path) -> bool:
    """Whether a folder contains a CausalQwen saved by `export` or `save_pretrained`."""
    return read_object(path / "config.json").get("model_type") == CausalQwenConfig.model_type


def load_trained(
    path: str | Path, device: str = "cpu", max_memory: dict[int | str, str] | None = None
) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """Load model (eval mode) and tokenizer from a run folder, a checkpoint folder or an exported folder.

    device: "cpu", "cuda", "cuda:1", ... or "auto": a GPU if there is one. "auto" spreads an exported folder over all
    GPUs, and over the CPU if they are too small (accelerate's device_map). max_memory: limit per device for "auto",
    such as {0: "20GB", "cpu": "60GB"}. Raises `UserError` for other folders and damaged ones.
    """
    path = Path(path)
    if is_exported(path):
        place = _place(device)
        spread = device == "auto" and (place != "cpu" or max_memory is not None)
        device_map = ("auto" if spread else place) if spread or place != "cpu" else None
        model = _load_exported(path, device_map=device_map, max_memory=max_memory)
        model.config.calibration = _intervals(path) or model.config.calibration
        tokenizer = NumericalAwareTokenizer.from_pretrained(path, vocab_size=model.config.vocab_size)
        if tokenizer.num_token_id != (row := model.config.num_token_id):
            raise UserError(f"{POLICY_FILE}: num_token_id", tokenizer.num_token_id, f"{row}, as in config.json")
        return model.eval(), tokenizer
    config, folder = run_of(path)
    state = load_checkpoint(folder, (0, 2**62), [])
    saved = state.state["model"]
    base = base_digest(base_folder_of(config.base_folder), Path(config.run.dir) / DIGESTS)
    tokenizer = NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, saved["num_token_id"], saved["vocab_size"], config.data.numbers
    )
    known = {"tokenizer": tokenizer.digest(), "base": base}
    refuse_exchanged(state.state.get("inputs", {}), known, config.run.accept, folder)
    model = assemble(state, config, folder)
    model.config.calibration = (state.state.get("figures") or {}).get("calibration") or _intervals(folder)
    if config.data.messages_field is not None:
        _let_turns_end(model, tokenizer)
    return model.to(_place(device)).eval(), tokenizer  # type: ignore[arg-type]  # transformers wraps `to`


def _let_turns_end(model: CausalQwenForCausalLM, tokenizer: NumericalAwareTokenizer) -> None:
    """Stop generation at the assistant's end-of-turn token too: chats do not teach a base's `<|endoftext|>`."""
    rows = {str(token): row for row, token in tokenizer.tokenizer.added_tokens_decoder.items()}
    row, known = rows.get(Chat(tokenizer.tokenizer).turn_end), end_ids(model, tokenizer)
    if row is not None and row not in known:
        model.generation_config.eos_token_id = [*known, row]


def _load_exported(folder: Path, **options: Any) -> CausalQwenForCausalLM:
    """Load an exported model and check that its files contain every tensor. Raises `UserError`."""
    whole = "every tensor of the model that its config.json describes, as `cqwen export` writes them"
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    if (kind := tensors.get_slice(name).get_dtype()) not in ("F32", "BF16", "F16"):
                        raise UserError("CHECKPOINT", Said(f"{name} of {kind}"), "F32, BF16 or F16", str(file))
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = CausalQwenForCausalLM.from_pretrained(folder, **options)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many kinds of error for damaged files
        raise UserError("CHECKPOINT", Said(f"{type(error).__name__}: {error}"), whole, str(folder)) from None
    model: CausalQwenForCausalLM = loaded[0]
    faults = {"missing_keys": "no {}", "mismatched_keys": "another shape of {}", "unexpected_keys": "{}"}
    for kind, fault in faults.items():
        if odd := sorted(map(str, loaded[1][kind])):
            raise UserError("CHECKPOINT", Said(fault.format(odd[0])), whole, str(folder))
    return model


def _place(device: str) -> str:
    """Device name for torch. Raises `UserError` if this machine lacks the device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()  # item() fails on the meta device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(" device type at start")[0]
        allowed = "auto, cpu, or a CUDA device that is there" + (f" ({reason})" if len(reason) <= 80 else "")
        raise UserError("--device", device, allowed) from None
    return device


def _intervals(folder: Path) -> dict[str, Any] | None:
    """Content of the folder's `calibration.json`, or None. Raises `UserError` for a broken file."""
    try:
        found = read_intervals(folder)
    except ValueError as error:
        raise UserError(CALIBRATION, Said(str(error)), "levels and n as evaluations write them", str(folder)) from None
    return found.to_dict() if found.factors else None


def run_of(path: str | Path) -> tuple[Config, Path]:
    """Returns (config, checkpoint folder) for a run folder or a checkpoint folder. Raises `UserError`.

    run.dir is set to the run's current folder. A run may come from a stranger, so its config alone cannot enable remote
    code: CQWEN_TRUST_REMOTE_CODE=1 must be set.
    """
    run, folder = resolve_checkpoint(path)
    config = load_config(run / CONFIG, [f"run.dir={json.dumps(str(run))}"], saved=True)
    if config.model.trust_remote_code and os.environ.get(TRUST) != "1":
        raise UserError("model.trust_remote_code", True, f"false, or {TRUST}=1 in the environment", str(run / CONFIG))
    return config, folder


def assemble(state: TrainState, config: Config, source: object = "") -> CausalQwenForCausalLM:
    """Build the model of an unsharded checkpoint: the run's base model with all trained tensors. source: for errors.

    Raises `UserError` unless tensor names, shapes and dtypes match the parameters.
    """
    saved = {k: v for k, v in state.state["model"].items() if k not in ("model_type", "transformers_version")}
    dtype, trust = dtype_of(config.train.precision), config.model.trust_remote_code
    shape = CausalQwenConfig(**saved)
    base = load_base(config.base_folder, dtype, trust, rows_for=lambda _: int(shape.vocab_size))
    model = CausalQwenModel(shape, base=base, classes=classes_of(shape, config.run.dir))
    parameters = {n: p for n, p in model.features.named_parameters() if n in EMBEDDING or is_lora(n)}
    parameters |= torch.nn.ModuleDict(model.heads).named_parameters()  # the base provides all others
    found = {**state.features, **state.heads, **state.rows}
    refuse_strange(found, {name: parameter.shape for name, parameter in parameters.items()}, source)
    with torch.no_grad():
        for name, value in found.items():
            parameters[name].copy_(value)
    causal = CausalQwenForCausalLM(shape, model)
    if base.generation_config is not None:
        causal.generation_config = base.generation_config
    return causal


def export(
    path: str | Path,
    out: str | Path,
    merge: bool = False,
    *,
    dtype: str | None = None,
    as_base: bool = False,
    drop_bias: bool = False,
    shard_size: str = "5GB",
) -> Path:
    """Write a checkpoint's model for Hugging Face users; returns the folder.

    merge: fold adapters into the backbone. dtype: "fp32" or "bf16" for backbone and adapters (default: unchanged);
    heads stay fp32. as_base: write a plain model of the base's class (`checkpoint.as_base`), all in one dtype;
    drop_bias: omit the bias that it cannot represent. shard_size: maximum size of a safetensors file.

    `out` appears only after reloading the model and comparing outputs. Raises `UserError` if `out` exists and is not
    empty, and for unknown or impossible options.
    """
    out = Path(out)
    _check_options(out, dtype, shard_size)
    model, tokenizer = load_trained(path)
    about = _about(Path(path)) | _merged_and_cast(model, merge or as_base, dtype)
    plain, bias = plain_model(model, drop_bias) if as_base else (None, None)
    if bias is not None:
        about["bias"] = size if (size := float(bias.abs().max())) > HELD else None
    try:
        with appearing(out, "OUT") as folder:
            if plain is None or bias is None:
                model.save_pretrained(folder, max_shard_size=shard_size)
                _write_all_but_weights(model, tokenizer, folder, about["base"])
                _compare(model, folder)
            else:
                plain.save_pretrained(folder, max_shard_size=shard_size)
                plain_tokenizer(tokenizer.tokenizer, model.config).save_pretrained(str(folder))
                _compare_plain(model, bias, folder)
            card = model_card(out.name, model.config, about, None if plain is None else type(plain).__name__)
            (folder / "README.md").write_text(card, encoding="utf-8")
            _write_json(folder / ABOUT, {k: about.get(k) for k in ("base", "step", "stages", "figures", "adapter")})
    except Exception as error:
        if not isinstance(error, OSError) and "(os error" not in str(error):  # safetensors' and tokenizers' wording
            raise
        raise UserError("OUT", str(out), f"a folder on a disk that takes the model ({reason_of(error)})") from None
    return out


def _check_options(out: Path, dtype: str | None, shard_size: str) -> None:
    if out.name in ("", "..") or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError("OUT", str(out), "a folder that does not exist yet, or is empty")
    if dtype not in (None, *DTYPES):
        raise UserError("--dtype", dtype, ", ".join(DTYPES))
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|KiB|MiB|GiB)", shard_size) is None:
        raise UserError("--shard-size", shard_size, "a size such as 500MB or 5GB")


def _write_all_but_weights(
    model: CausalQwenForCausalLM, tokenizer: NumericalAwareTokenizer, folder: Path, base: str | None
) -> None:
    """Write tokenizer, code, calibration, and the adapters for `PeftModel.from_pretrained`. base: its public name."""
    config = model.config
    CausalQwenTokenizer.of(tokenizer).save_pretrained(folder)
    write_code(folder, adapters=config.lora is not None, beside=model.model.beside)
    if config.calibration is not None:
        _write_json(folder / CALIBRATION, config.calibration)
    if config.lora is not None:
        (adapter := folder / "adapter").mkdir()
        features = {name: p.detach().contiguous() for name, p in model.model.features.named_parameters()}
        save_file(to_peft(features), adapter / WEIGHTS)
        write_config(adapter, config.lora, base)


def _compare(model: CausalQwenForCausalLM, folder: Path) -> None:
    """Reload an exported folder. Raises RuntimeError unless its weights and outputs match."""
    again = _load_exported(folder).eval()
    written, found = model.state_dict(), again.state_dict()
    odd = next((part for part in written if part not in found or not torch.equal(written[part], found[part])), None)
    if odd is not None:
        raise RuntimeError(f"the exported model differs in {odd}: not exported")
    # Weights match bit by bit. Outputs may differ in the last bit, because products depend on memory alignment.
    for part, size in changes(probe(model), probe(again)).items():
        if size > ROUNDING:
            raise RuntimeError(f"the exported model differs in {part} by {size:.1e}: not exported")


@torch.no_grad()
def _compare_plain(model: CausalQwenForCausalLM, bias: Tensor, folder: Path) -> None:
    """Reload a plain model. Raises RuntimeError unless its logits + bias equal loc_S."""
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = sixteen_tokens(model)[0].clamp(max=len(bias) - 1)
    found = again(input_ids=ids).logits.float() + bias
    unread = torch.zeros(ids.shape, dtype=torch.float64)  # the plain model reads <NUM> without a value
    wanted = model(ids, unread, logits_to_keep=ids.shape[1]).logits[..., : len(bias)]
    error = changes({"logits": wanted}, {"logits": found})["logits"]
    if error > (ROUNDING if again.dtype == torch.float32 else 0.05):
        raise RuntimeError(f"the plain model's logits differ by {error:.1e} of their size: not exported")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _about(path: Path) -> dict[str, Any]:
    """Facts about a run, or an earlier export, for the model card."""
    if is_exported(path):
        return {"base": None, "adapter": None, **read_object(path / ABOUT)}
    config, folder = run_of(path)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    measured, built = state.get("figures") or {}, config.model.architecture
    return {
        "base": public_name(config.model.name_or_path) or (f"a {built['model_type']} from scratch" if built else None),
        "step": state.get("step"),
        "stages": ", ".join(stage.name for stage in config.stages),
        "figures": {k: v for k, v in measured.items() if isinstance(v, (int, float)) and math.isfinite(v)},
        "adapter": None,
    }


def _merged_and_cast(model: CausalQwenForCausalLM, merge: bool, dtype: str | None) -> dict[str, Any]:
    """Merge adapters and cast the backbone as requested; returns model card entries, with the changes by rounding."""
    if dtype == "fp32":
        cast(model, torch.float32)  # before merging, which rounds to the weights' dtype
    before, about = probe(model), {}
    if model.config.lora is not None:
        about["adapter"] = "merged" if merge else "in place, and separately in PEFT's format"
        if merge:
            architecture(model.config.base["model_type"]).require("merge", "--merge", True)
            model.merge_adapters()
    if dtype == "bf16":
        cast(model, torch.bfloat16)
    rounding = changes(before, probe(model))
    dtype = next((key for key, its in DTYPES.items() if its == model.dtype), str(model.dtype))
    return {**about, "dtype": dtype, "rounding": rounding if max(rounding.values()) > ROUNDING else None}


@torch.no_grad()
def cast(model: CausalQwenForCausalLM, dtype: torch.dtype) -> None:
    """Cast parameters of backbone, adapters and token table. Buffers stay: rotary frequencies must be exact."""
    kept = {id(model.model.features.embedding.w_num), id(model.model.features.embedding.num_row)}
    for parameter in model.model.features.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def sixteen_tokens(model: CausalQwenForCausalLM) -> tuple[Tensor, Tensor]:
    """Ids and values [1,16]. One token is a number, 99.9."""
    ids = torch.arange(16).remainder(model.config.vocab_size).unsqueeze(0)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    ids[0, 8], values[0, 8] = model.config.num_token_id, 99.9
    return ids, values


@torch.no_grad()
def probe(model: CausalQwenForCausalLM) -> dict[str, Tensor]:
    """The model's outputs for sixteen tokens, on the CPU: U, Y, and loc_S at the last four."""
    out = model(*sixteen_tokens(model), logits_to_keep=4)
    return {name: out[name] for name in ("loc_U", "scale_U", "loc_Y", "scale_Y", "logits")}


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference per tensor, relative to its largest entry before."""
    return {k: float((a - after[k]).abs().max() / a.abs().max().clamp(min=1e-30)) for k, a in before.items()}
