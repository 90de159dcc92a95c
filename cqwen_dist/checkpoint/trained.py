"""Loads a trained model: from a run, a checkpoint, or a folder that `cqwen export` or `save_pretrained` wrote."""

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import TrainState, base_digest, load_checkpoint, refuse_exchanged, refuse_strange
from cqwen_dist.config import Config, Said, UserError, load_config
from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.config.custom import TRUST
from cqwen_dist.config.trainable import is_lora, is_trainable
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.continuation import end_ids
from cqwen_dist.heads.intervals import FILE as CALIBRATION
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.model import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.base_loading import base_folder_of, load_base, shared_base
from cqwen_dist.model.causal_qwen import classes_of
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.run.files import CONFIG, DIGESTS, read_object

_LOG = logging.getLogger(__name__)


def is_exported(path: Path) -> bool:
    """Whether a folder contains a CausalQwen saved by `export` or `save_pretrained`."""
    return read_object(path / "config.json").get("model_type") == CausalQwenConfig.model_type


def load_trained(
    path: str | Path, device: str = "cpu", full_base: bool = False, bases: dict[Any, Any] | None = None
) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """Load model (eval mode) and tokenizer from a run folder, a checkpoint folder or an exported folder.

    device: "cpu", "cuda", "cuda:1", ... or "auto": a GPU if there is one. "auto" spreads an exported folder over all
    GPUs, and over the CPU if they are too small (accelerate's device_map). full_base: do not round the base as the run
    did (`model.quantize`). bases: models of runs share the weights of the bases in it, and add their own base. Raises
    `UserError` for other folders and damaged ones.
    """
    path = Path(path)
    if bases is None and is_exported(path):
        place = place_of(device)
        device_map = None if place == "cpu" else "auto" if device == "auto" else place
        model = load_exported(path, device_map=device_map)
        return model.eval(), exported_tokenizer(path, model.config)
    config, folder = run_of(path)
    state = load_checkpoint(folder, (0, 2**62), [])
    saved = state.state["model"]
    # A checkpoint contains neither base nor tokenizer. Those on disk must be the ones of its training
    base = base_digest(base_folder_of(config.base_folder), Path(config.run.dir) / DIGESTS)
    tokenizer = NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, saved["num_token_id"], saved["vocab_size"], config.policy
    )
    known = {"tokenizer": tokenizer.digest(), "base": base}
    refuse_exchanged(state.state["inputs"], known, config.run.accept, folder)
    where = torch.device(place_of(device))
    quantize = "none" if full_base else config.model.quantize
    as_loaded = (base, config.train.precision, quantize, saved["vocab_size"])
    load = load_base if bases is None else partial(shared_base, bases, as_loaded)
    model = assemble(state, config, folder, quantize, where, load)
    found = (state.state.get("figures") or {}).get("calibration") or intervals_of(folder)
    model.config.calibration = found or model.config.calibration  # without an evaluation: of the start
    if found is not None and not state.state["evaluated"]:
        _LOG.warning("the intervals are as wide as an earlier step needed: %s was not evaluated", folder.name)
    _let_texts_end(model, tokenizer, config.data.messages_field is not None)
    return model.to(where).eval(), tokenizer  # type: ignore[arg-type]  # transformers wraps `to`


def _let_texts_end(model: CausalQwenForCausalLM, tokenizer: NumericalAwareTokenizer, chats: bool) -> None:
    """Stop generation where the training texts end, and the assistant's turns: chats do not teach `<|endoftext|>`. An
    export has these ends, for those who generate without `end_ids`."""
    ends = end_ids(model, tokenizer)
    if chats:
        rows = {str(token): row for row, token in tokenizer.tokenizer.added_tokens_decoder.items()}
        row = rows.get(Chat(tokenizer.tokenizer).turn_end)
        ends += [row] if row is not None and row not in ends else []
    model.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)


def load_exported(folder: Path, **options: Any) -> CausalQwenForCausalLM:
    """Load an exported model and check that its files contain every tensor. Raises `UserError`."""
    whole = "every tensor of the model that its config.json describes, as `cqwen export` writes them"
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    if (kind := tensors.get_slice(name).get_dtype()) not in ("F32", "BF16", "F16"):
                        raise UserError("CHECKPOINT", Said(f"{name} of {kind}"), "F32, BF16 or F16", str(file))
        # A tensor of a different shape is reported below in one line; transformers would raise with all of them
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


def exported_tokenizer(folder: Path, config: Any) -> NumericalAwareTokenizer:
    """The tokenizer of an exported folder; its model's config gets the intervals' factors. Raises `UserError`."""
    config.calibration = intervals_of(folder) or config.calibration
    tokenizer = NumericalAwareTokenizer.from_pretrained(folder, vocab_size=config.vocab_size)
    if tokenizer.num_token_id != (row := config.num_token_id):
        raise UserError(f"{POLICY_FILE}: num_token_id", tokenizer.num_token_id, f"{row}, as in config.json")
    return tokenizer


def place_of(device: str) -> str:
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


def intervals_of(folder: Path) -> dict[str, Any] | None:
    """Content of the folder's `calibration.json`, or None. Raises `UserError` for a broken file."""
    try:
        path = folder / CALIBRATION
        found = Intervals.from_dict(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None)
    except ValueError as error:
        raise UserError(CALIBRATION, Said(str(error)), "levels and n as evaluations write them", str(folder)) from None
    return found.to_dict() if found.factors else None


def run_of(path: str | Path) -> tuple[Config, Path]:
    """Returns (config, checkpoint folder) for a run folder or a checkpoint folder. Raises `UserError`.

    run.dir is set to the run's current folder. A run may come from an untrusted source, so its config alone cannot
    enable remote code: CQWEN_TRUST_REMOTE_CODE=1 must be set.
    """
    if (Path(path) / "config.json").is_file():
        raise UserError("checkpoint", str(path), "a run, or a model that writes numbers (this one is plain)")
    run, folder = resolve_checkpoint(path)
    config = load_config(run / CONFIG, [f"run.dir={json.dumps(str(run))}"])
    if config.model.trust_remote_code and os.environ.get(TRUST) != "1":
        raise UserError("model.trust_remote_code", True, f"false, or {TRUST}=1 in the environment", str(run / CONFIG))
    return config, folder


def assemble(
    state: TrainState,
    config: Config,
    source: object = "",
    quantize: str = "none",
    device: torch.device | None = None,
    load: Callable[..., Any] = load_base,
) -> CausalQwenForCausalLM:
    """Build the model of an unsharded checkpoint: the run's base model with all trained tensors. source: for errors.

    quantize, device: of the base, as in `load_base`. load: it, or what shares a base.

    Raises `UserError` unless tensor names, shapes and dtypes match the parameters.
    """
    saved = {k: v for k, v in state.state["model"].items() if k not in ("model_type", "transformers_version")}
    dtype, trust = dtype_of(config.train.precision), config.model.trust_remote_code
    shape = CausalQwenConfig(**saved)
    base = load(config.base_folder, dtype, trust, quantize, device, lambda _: int(shape.vocab_size))
    model = CausalQwenModel(shape, base=base, classes=classes_of(shape, config.run.dir))
    parameters = {n: p for n, p in model.features.named_parameters() if is_trainable(n, config.trained)}
    parameters |= torch.nn.ModuleDict(model.heads).named_parameters()  # the base provides all others
    found = {**state.features, **state.heads, **state.rows}
    refuse_strange(found, {name: parameter.shape for name, parameter in parameters.items()}, source)
    with torch.no_grad():
        for name, value in found.items():
            if is_lora(name):  # on a rounded base PEFT makes them in fp32, but training casts them
                parameters[name].data = parameters[name].data.to(dtype)
            parameters[name].copy_(value)
    causal = CausalQwenForCausalLM(shape, model)
    if base.generation_config is not None:
        causal.generation_config = base.generation_config
    return causal
