"""Exports a checkpoint to a folder that transformers can load anywhere.

OUT/config.json, model*.safetensors      the complete model with its base; adapters in place (or merged)
OUT/tokenizer.json, ..., number_policy.json
OUT/*_causal_qwen.py                     the code, for machines without this package (`tools.export.portable`)
OUT/adapter/                             the same adapters in PEFT's format, unless merged
OUT/README.md, training.json             the model card, and its facts about training
OUT/calibration.json                     interval factors, if the run measured them
OUT/table.json                           how rows were read, and the ranges of a table's columns
"""

import json
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Template
from safetensors.torch import save_file
from torch import Tensor

from cqwen_dist.checkpoint.adapter import WEIGHTS, to_peft, write_config
from cqwen_dist.checkpoint.trained import is_exported, load_exported, load_trained, run_of
from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.errors import UserError, reason_of
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.modes import MODES
from cqwen_dist.heads.intervals import FILE as CALIBRATION
from cqwen_dist.heads.intervals import LEVELS, Intervals
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.prediction.learnt_table import FILE as TABLE
from cqwen_dist.prediction.learnt_table import learnt_table
from cqwen_dist.run.files import STATE, appearing, read_object

ABOUT = "training.json"
ROUNDING = 1e-5  # allowed relative difference when fp32 sums change their order
SHOWN = {
    "eval/accuracy": "next-word accuracy",
    "eval/base_accuracy": "the base model's own",
    "eval/num_f1": "`<NUM>` F1",
    "eval/reg_mdae": "median absolute error of numbers",
    "eval/baseline_mdae": "always the training median",
    "eval/reg_mae": "mean absolute error of numbers",
    "eval/coverage_90": "raw 90 % interval holds",
    "eval/coverage_90_conformal": "recalibrated 90 % interval holds",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(
    path: str | Path,
    out: str | Path,
    merge: bool = False,
    *,
    dtype: str | None = None,
    shard_size: str = "5GB",
) -> Path:
    """Write a checkpoint's model for Hugging Face users; returns the folder.

    A run on a rounded base (`model.quantize`) is exported on the full base, also merged; the card tells the difference.
    merge: fold adapters into the backbone. dtype: "fp32" or "bf16" for backbone and adapters (default: unchanged);
    heads stay fp32. shard_size: maximum size of a safetensors file.

    `out` appears only after reloading the model and comparing outputs. Raises `UserError` if `out` exists and is not
    empty, and for unknown or impossible options.
    """
    out = Path(out)
    _check_options(out, dtype, shard_size)
    model, tokenizer = load_trained(path, full_base=True)
    about = _about(Path(path)) | _rounded_base(Path(path), model) | _merged_and_cast(model, merge, dtype)
    table = learnt_table(Path(path))
    try:
        with appearing(out, "OUT") as folder:
            model.save_pretrained(folder, max_shard_size=shard_size)
            _write_all_but_weights(model, tokenizer, folder, about["base"])
            if table is not None:
                _write_json(folder / TABLE, table.to_dict())
            _compare(model, folder)
            (folder / "README.md").write_text(model_card(out.name, model.config, about), encoding="utf-8")
            facts = {key: about.get(key) for key in ("base", "step", "stages", "figures", "adapter")}
            facts |= {key: about[key] for key in ("quantize", "rounded") if key in about}
            _write_json(folder / ABOUT, facts)
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
    """Write tokenizer, calibration, and the adapters for `PeftModel.from_pretrained`. base: its public name."""
    config = model.config
    CausalQwenTokenizer.of(tokenizer).save_pretrained(folder)
    if config.calibration is not None:
        _write_json(folder / CALIBRATION, config.calibration)
    if config.lora is not None:
        (adapter := folder / "adapter").mkdir()
        features = {name: p.detach().contiguous() for name, p in model.model.features.named_parameters()}
        save_file(to_peft(features), adapter / WEIGHTS)
        write_config(adapter, config.lora, base)


def _compare(model: CausalQwenForCausalLM, folder: Path) -> None:
    """Reload an exported folder. Raises RuntimeError unless its weights and outputs match."""
    again = load_exported(folder).eval()
    written, found = model.state_dict(), again.state_dict()
    odd = next((part for part in written if part not in found or not torch.equal(written[part], found[part])), None)
    if odd is not None:
        raise RuntimeError(f"the exported model differs in {odd}: not exported")
    # Weights match bit by bit. Outputs may differ in the last bit, because products depend on memory alignment.
    for part, size in changes(probe(model), probe(again)).items():
        if size > ROUNDING:
            raise RuntimeError(f"the exported model differs in {part} by {size:.1e}: not exported")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _about(path: Path) -> dict[str, Any]:
    if is_exported(path):
        return {"base": None, "adapter": None, **read_object(path / ABOUT)}
    config, folder = run_of(path)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    # Between evaluations a checkpoint keeps the figures of the one before, which are a different model's
    measured, built = (state["evaluated"] and state["figures"]) or {}, config.model.architecture
    return {
        "base": public_name(config.model.name_or_path) or (f"a {built['model_type']} from scratch" if built else None),
        "step": state["step"],
        "stages": ", ".join(stage.name for stage in config.stages),
        "figures": {k: v for k, v in measured.items() if isinstance(v, (int, float)) and math.isfinite(v)},
        "adapter": None,
    }


def _rounded_base(path: Path, model: CausalQwenForCausalLM) -> dict[str, Any]:
    """How the model on the full base differs from the model that a run with `model.quantize` trained; for the model
    card."""
    if is_exported(path) or (kind := run_of(path)[0].model.quantize) == "none":
        return {}
    here = find_spec("bitsandbytes") is not None
    return {"quantize": kind, "rounded": changes(probe(load_trained(path)[0]), probe(model)) if here else None}


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


@torch.no_grad()
def probe(model: CausalQwenForCausalLM) -> dict[str, Tensor]:
    """The model's outputs for sixteen tokens, one of them the number 99.9, on the CPU: U, Y, and loc_S at the last
    four."""
    ids = torch.arange(16).remainder(model.config.vocab_size).unsqueeze(0)
    values = torch.zeros(ids.shape, dtype=torch.float64)
    ids[0, 8], values[0, 8] = model.config.num_token_id, 99.9
    out = model(ids, values, logits_to_keep=4)
    return {name: out[name] for name in ("loc_U", "scale_U", "loc_Y", "scale_Y", "logits")}


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference per tensor, relative to its largest entry before."""
    return {k: float((a - after[k]).abs().max() / a.abs().max().clamp(min=1e-30)) for k, a in before.items()}


def public_name(name: str | None) -> str | None:
    """A hub name unchanged; for a local path, only the last part."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return path.name if name.startswith((".", "/", "~")) or path.is_dir() else name


def model_card(name: str, config: Any, about: Mapping[str, Any]) -> str:
    """Render Markdown. config: a `CausalQwenConfig`.

    about: base, step, stages, figures (evaluation metrics, or None), dtype, adapter (its place, or None), rounding
    (name -> largest relative change from the dtype), quantize and rounded (`model.quantize` of the run, and the changes
    by the full base).
    """
    facts = {
        "base": about.get("base"),
        "trained": f"{about['step']} steps, stages {about.get('stages')}" if about.get("step") is not None else None,
        "backbone's precision": about.get("dtype"),
        "adapters": about.get("adapter"),
        "vocabulary, width of U": f"{config.vocab_size}, {config.causal_hidden_size}",
        "unit of the numbers' head": config.target,
    }
    text = files("cqwen_dist.tools.export").joinpath("model_card.md.j2").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    intervals, modes = Intervals.from_dict(config.calibration), ", ".join(MODES)
    known = {"name": name, "config": config, "about": about, "facts": facts, "intervals": intervals}
    return template.render(known, shown=SHOWN, modes=modes, levels=LEVELS, transformers=transformers.__version__)
