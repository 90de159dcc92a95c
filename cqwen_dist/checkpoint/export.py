"""From a checkpoint to a folder that `CausalQwenForCausalLM.from_pretrained` loads, anywhere.

OUT/config.json, model*.safetensors      the whole model, base included, adapters in place (or merged)
OUT/tokenizer.json, ..., number_policy.json
OUT/adapter/                             the same adapters in PEFT's own format, unless merged
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.config import Config, LoraConfig, UserError, load_config
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.backbone import load_base
from cqwen_dist.model.causal_qwen import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.lora import is_lora, peft_config


def is_exported(path: Path) -> bool:
    """Whether a folder is a saved CausalQwen (as `export` and `save_pretrained` write it)."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == CausalQwenConfig.model_type


def load_trained(path: str | Path) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """Model (eval mode, CPU) and tokenizer of a run folder, a checkpoint folder or an exported folder.

    Raises `UserError` where it is none of these, or is damaged.
    """
    path = Path(path)
    if is_exported(path):
        model = CausalQwenForCausalLM.from_pretrained(path)
        tokenizer = NumericalAwareTokenizer.from_pretrained(path, vocab_size=model.config.vocab_size)
        return model.eval(), tokenizer
    config, folder = run_of(path)
    state = load_checkpoint(folder, (0, 2**62), moments=False)
    model = assemble(state, config)
    tokenizer = NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, model.config.num_token_id, model.config.vocab_size, config.data.numbers
    )
    return model.eval(), tokenizer


def run_of(path: str | Path) -> tuple[Config, Path]:
    """(config, checkpoint folder) of a run folder or a checkpoint folder. Raises `UserError`.

    The run may have been moved: what it built for itself is looked for where the run lies now.
    """
    run, folder = resolve_checkpoint(path)
    return load_config(run / "config.yaml", [f"run.dir={json.dumps(str(run))}"]), folder


def assemble(state: TrainState, config: Config) -> CausalQwenForCausalLM:
    """The model of a whole checkpoint: the run's base model with everything trained put in."""
    saved = {k: v for k, v in state.state["model"].items() if k not in ("model_type", "transformers_version")}
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    shape = CausalQwenConfig(**saved)
    base = load_base(config.base_folder, dtype, config.model.trust_remote_code)
    model = CausalQwenModel(shape, base=base)
    _put(model.features, state.features, only_these=True)
    heads = torch.nn.ModuleDict({"abduction": model.abduction, "action": model.action})
    _put(heads, {**state.heads, **state.rows}, only_these=False)
    return CausalQwenForCausalLM(shape, model)


@torch.no_grad()
def _put(module: torch.nn.Module, tensors: dict[str, torch.Tensor], only_these: bool) -> None:
    """Copy by name; every tensor must find its place, and unless only_these every parameter its tensor."""
    parameters = dict(module.named_parameters())
    odd = set(tensors) - set(parameters) if only_these else set(tensors) ^ set(parameters)
    if odd:
        raise UserError("checkpoint", f"parameter {min(odd)}", "the parameters of the model that its config describes")
    for name, value in tensors.items():
        if parameters[name].shape != value.shape:
            raise UserError("checkpoint", f"{name} of shape {tuple(value.shape)}", f"{tuple(parameters[name].shape)}")
        parameters[name].copy_(value)


def export(path: str | Path, out: str | Path, merge: bool = False) -> Path:
    """Write a checkpoint's model for Hugging Face users; returns the folder.

    merge: fold the adapters into the backbone. The folder appears whole, after it was loaded again and gave the same
    U. Raises `UserError` where `out` exists and is not empty.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("OUT", str(out), "a folder that does not exist yet, or is empty")
    model, tokenizer = load_trained(path)
    if merge:
        model.merge_adapters()
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise UserError("OUT", str(out), f"a folder that can be made ({error.strerror})") from None
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    if model.config.lora is not None:
        _save_adapter(
            model, beside / "adapter", None if is_exported(Path(path)) else run_of(path)[0].model.name_or_path
        )
    _verify(model, beside)
    if out.exists():
        out.rmdir()
    beside.rename(out)
    return out


def _save_adapter(model: CausalQwenForCausalLM, folder: Path, base: str | None) -> None:
    """PEFT's own format, for `PeftModel.from_pretrained` on the base model; base: its name in the run's config."""
    folder.mkdir()
    tensors = {
        "base_model.model.model." + name.replace(".default.", "."): p.detach().contiguous()
        for name, p in model.model.transformer.named_parameters()
        if is_lora(name)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    assert model.config.lora is not None
    config = peft_config(LoraConfig(**model.config.lora))
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.base_model_name_or_path = base
    config.save_pretrained(str(folder))


@torch.no_grad()
def _verify(model: CausalQwenForCausalLM, folder: Path) -> None:
    """Load the folder again; U and Y of a few tokens must be equal to the bit."""
    again = CausalQwenForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(16).remainder(model.config.vocab_size).unsqueeze(0)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    ids[0, 8], values[0, 8] = model.config.num_token_id, 99.9
    before, after = model(ids, values), again(ids, values)
    for name in ("loc_U", "scale_U", "loc_Y", "scale_Y"):
        a, b = before[name], after[name]
        if not torch.equal(a, b):
            raise RuntimeError(f"the exported model differs in {name} by {float((a - b).abs().max())}: not exported")
