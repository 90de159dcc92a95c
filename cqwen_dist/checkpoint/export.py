"""From a checkpoint to a folder that transformers loads, anywhere.

OUT/config.json, model*.safetensors      the whole model, base included, adapters in place (or merged)
OUT/tokenizer.json, ..., number_policy.json
OUT/*_causal_qwen.py                     the code, for where this package is not (`checkpoint.portable`)
OUT/adapter/                             the same adapters in PEFT's own format, unless merged
OUT/README.md, training.json             the model card, and what it was made from
OUT/calibration.json                     the intervals' factors, where the run has measured them
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from cqwen_dist.checkpoint.adapter import WEIGHTS, to_peft, write_config
from cqwen_dist.checkpoint.as_base import HELD, plain_model, plain_tokenizer
from cqwen_dist.checkpoint.identity import base_digest, refuse_exchanged
from cqwen_dist.checkpoint.manifest import resolve_checkpoint
from cqwen_dist.checkpoint.model_card import model_card, public_name
from cqwen_dist.checkpoint.portable import write_code
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint, refuse_strange
from cqwen_dist.checkpoint.rounding import cast, change, probe, sixteen_tokens
from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.config.custom import TRUST
from cqwen_dist.config.errors import Said
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.intervals import FILE as CALIBRATION
from cqwen_dist.intervals import read_intervals
from cqwen_dist.model import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.abduction import loaded_abduction
from cqwen_dist.model.backbone import base_folder_of, load_base
from cqwen_dist.model.lora import is_lora
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.run.files import CONFIG, DIGESTS, STATE, appearing

ABOUT = "training.json"
EMBEDDING = ("embedding.w_num", "embedding.num_row")  # what trains of it
ROUNDING = 1e-5  # relative, of fp32 sums taken in another order
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_exported(path: Path) -> bool:
    """Whether a folder is a saved CausalQwen (as `export` and `save_pretrained` write it)."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == CausalQwenConfig.model_type


def load_trained(
    path: str | Path, device: str = "cpu", max_memory: dict[int | str, str] | None = None
) -> tuple[CausalQwenForCausalLM, NumericalAwareTokenizer]:
    """Model (eval mode) and tokenizer of a run folder, a checkpoint folder or an exported folder.

    device: "cpu", "cuda", "cuda:1", ... or "auto": the GPU if there is one; an exported folder is then spread over all
    that there are, and the CPU where they are too small (accelerate's device_map). max_memory: what "auto" may take of
    each device, such as {0: "20GB", "cpu": "60GB"}. Raises `UserError` where it is none of these, or is damaged.
    """
    path = Path(path)
    if is_exported(path):
        place = _place(device)
        spread = device == "auto" and (place != "cpu" or max_memory is not None)
        device_map = ("auto" if spread else place) if spread or place != "cpu" else None
        model = _load_exported(path, device_map=device_map, max_memory=max_memory)
        model.config.calibration = _intervals(path) or model.config.calibration
        tokenizer = NumericalAwareTokenizer.from_pretrained(path, vocab_size=model.config.vocab_size)
        return model.eval(), tokenizer
    config, folder = run_of(path)
    state = load_checkpoint(folder, (0, 2**62), moments=False)
    saved = state.state["model"]
    base = base_digest(base_folder_of(config.base_folder), Path(config.run.dir) / DIGESTS)
    tokenizer = NumericalAwareTokenizer.from_pretrained(
        config.tokenizer_source, saved["num_token_id"], saved["vocab_size"], config.data.numbers
    )
    known = {"tokenizer": tokenizer.digest(), "base": base}
    refuse_exchanged(state.state.get("inputs", {}), known, config.run.accept, folder)
    model = assemble(state, config, folder)
    model.config.calibration = (state.state.get("figures") or {}).get("calibration") or _intervals(folder)
    return model.to(_place(device)).eval(), tokenizer  # type: ignore[arg-type]  # as transformers wraps it


def _load_exported(folder: Path, **options: Any) -> CausalQwenForCausalLM:
    """The model of an exported folder, every tensor from its files. Raises `UserError`."""
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
    except Exception as error:  # whatever transformers says of files that are damaged
        raise UserError("CHECKPOINT", Said(f"{type(error).__name__}: {error}"), whole, str(folder)) from None
    model: CausalQwenForCausalLM = loaded[0]
    wrong = {"missing_keys": "no {}", "mismatched_keys": "another shape of {}", "unexpected_keys": "{}"}
    for kind, said in wrong.items():
        if odd := sorted(map(str, loaded[1][kind])):
            raise UserError("CHECKPOINT", Said(said.format(odd[0])), whole, str(folder))
    return model


def _place(device: str) -> str:
    """A device as torch names it. Raises `UserError` for one that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(" device type at start")[0]
        allowed = "auto, cpu, or a CUDA device that is there" + (f" ({reason})" if len(reason) <= 80 else "")
        raise UserError("--device", device, allowed) from None
    return device


def _intervals(folder: Path) -> dict[str, Any] | None:
    """What a folder's `calibration.json` says, or None. Raises `UserError` where that is broken."""
    try:
        found = read_intervals(folder)
    except ValueError as error:
        raise UserError(
            CALIBRATION, Said(str(error)), "levels and n as an evaluation wrote them", str(folder)
        ) from None
    return found.to_dict() if found.factors else None


def run_of(path: str | Path) -> tuple[Config, Path]:
    """(config, checkpoint folder) of a run folder or a checkpoint folder. Raises `UserError`.

    The run may have been moved: what it built for itself is looked for where the run lies now. It may also be a
    stranger's, so its config alone does not let a model run its code here: TRUST in the environment has to agree.
    """
    run, folder = resolve_checkpoint(path)
    config = load_config(run / CONFIG, [f"run.dir={json.dumps(str(run))}"])
    if config.model.trust_remote_code and os.environ.get(TRUST) != "1":
        raise UserError("model.trust_remote_code", True, f"false, or {TRUST}=1 beside it", str(run / CONFIG))
    return config, folder


def assemble(state: TrainState, config: Config, source: object = "") -> CausalQwenForCausalLM:
    """The model of a whole checkpoint: the run's base model with everything trained put in. source: for errors."""
    saved = {k: v for k, v in state.state["model"].items() if k not in ("model_type", "transformers_version")}
    dtype = dtype_of(config.train.precision)
    shape = CausalQwenConfig(**saved)
    rows = shape.vocab_size
    base = load_base(config.base_folder, dtype, config.model.trust_remote_code, rows_for=lambda _: rows)
    network = loaded_abduction(shape.abduction, config.run.dir)
    model = CausalQwenModel(shape, base=base, abduction=network)
    trained = {n: p for n, p in model.features.named_parameters() if n in EMBEDDING or is_lora(n)}
    _put(trained, state.features, source)  # the rest is the base's
    heads = torch.nn.ModuleDict({"abduction": model.abduction, "action": model.action})
    _put(dict(heads.named_parameters()), {**state.heads, **state.rows}, source)
    causal = CausalQwenForCausalLM(shape, model)
    if base.generation_config is not None:
        causal.generation_config = base.generation_config
    return causal


@torch.no_grad()
def _put(parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor], source: object) -> None:
    """Copy by name, where every name, shape and dtype is the parameters'."""
    refuse_strange(tensors, {name: parameter.shape for name, parameter in parameters.items()}, source)
    for name, value in tensors.items():
        parameters[name].copy_(value)


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

    merge: fold the adapters into the backbone. dtype: "fp32" or "bf16", of backbone and adapters (default: as they
    are); the heads stay fp32. as_base: a plain model of the base's kind instead (`checkpoint.as_base`), in one dtype;
    drop_bias: without what that has no place for. shard_size: at most so much in one safetensors file.

    The folder appears whole, after it was loaded again and gave what the model gives. Raises `UserError` where `out`
    exists and is not empty, and for options that are unknown or impossible.
    """
    out = Path(out)
    if out.name in ("", "..") or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError("OUT", str(out), "a folder that does not exist yet, or is empty")
    if dtype not in (None, *DTYPES):
        raise UserError("--dtype", dtype, ", ".join(DTYPES))
    _check_size(shard_size)
    model, tokenizer = load_trained(path)
    about = _about(Path(path))
    if merge and model.config.lora is not None:
        model.merge_adapters()
        about["adapter"] = "merged"
    _round(model, dtype, about)
    plain = plain_model(model, drop_bias) if as_base else None
    if plain is not None and about["adapter"] is not None:
        about["adapter"] = "merged"
    with appearing(out, "OUT") as folder:
        if plain is not None:
            _write_plain(*plain, model, tokenizer, folder, shard_size, about, out.name)
        else:
            _write_whole(model, tokenizer, folder, shard_size, about, out.name)
    return out


def _round(model: CausalQwenForCausalLM, dtype: str | None, about: dict[str, Any]) -> None:
    """Cast the backbone, unless dtype is None; `about` gets its dtype and what the rounding changes."""
    before = probe(model)
    if dtype is not None:
        cast(model, DTYPES[dtype])
    about["dtype"] = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(model.dtype, str(model.dtype))
    rounding = {name: change(a, b) for (name, a), b in zip(before.items(), probe(model).values(), strict=True)}
    about["rounding"] = rounding if any(rounding.values()) else None


def _write_whole(
    model: CausalQwenForCausalLM,
    tokenizer: NumericalAwareTokenizer,
    folder: Path,
    shard_size: str,
    about: dict[str, Any],
    name: str,
) -> None:
    model.save_pretrained(folder, max_shard_size=shard_size)
    CausalQwenTokenizer.of(tokenizer).save_pretrained(folder)
    write_code(folder, adapters=model.config.lora is not None)
    if model.config.calibration is not None:
        _write_json(folder / CALIBRATION, model.config.calibration)
    if model.config.lora is not None:
        _save_adapter(model, folder / "adapter", about["base"])
    _finish(folder, model_card(name, model.config, about), about)
    again = _load_exported(folder).eval()
    written, found = model.state_dict(), again.state_dict()
    odd = next((part for part in written if part not in found or not torch.equal(written[part], found[part])), None)
    if odd is not None:
        raise RuntimeError(f"the exported model differs in {odd}: not exported")
    # Equal weights; what they give may differ in the last bit, as a product does with where its operands lie.
    for (part, wanted), given in zip(probe(model).items(), probe(again).values(), strict=True):
        if change(wanted, given) > ROUNDING:
            raise RuntimeError(f"the exported model differs in {part} by {change(wanted, given):.1e}: not exported")


def _write_plain(
    plain: PreTrainedModel,
    bias: Tensor,
    model: CausalQwenForCausalLM,
    tokenizer: NumericalAwareTokenizer,
    folder: Path,
    shard_size: str,
    about: dict[str, Any],
    name: str,
) -> None:
    about["bias"] = float(bias.abs().max()) if float(bias.abs().max()) > HELD else None
    plain.save_pretrained(folder, max_shard_size=shard_size)
    plain_tokenizer(tokenizer.tokenizer, model.config).save_pretrained(str(folder))
    _finish(folder, model_card(name, model.config, about, type(plain).__name__), about)
    ids = sixteen_tokens(model)[0].clamp(max=plain.config.vocab_size - 1)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = again(input_ids=ids).logits.float() + bias
        wanted = model(ids, logits_to_keep=ids.shape[1]).logits[..., : plain.config.vocab_size]
    error = change(wanted, found)
    if error > (ROUNDING if again.dtype == torch.float32 else 0.05):
        raise RuntimeError(f"the plain model's logits differ by {error:.1e} of their size: not exported")


def _finish(folder: Path, card: str, about: dict[str, Any]) -> None:
    (folder / "README.md").write_text(card, encoding="utf-8")
    _write_json(folder / ABOUT, {k: about.get(k) for k in ("base", "step", "stages", "figures", "adapter")})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _about(path: Path) -> dict[str, Any]:
    """What a run, or an earlier export, knows of the model, for its card."""
    if is_exported(path):
        try:
            return dict(json.loads((path / ABOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {"base": None, "adapter": None}
    config, folder = run_of(path)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    figures = {k: v for k, v in (state.get("figures") or {}).items() if isinstance(v, (int, float))}
    built = config.model.architecture
    return {
        "base": public_name(config.model.name_or_path) or (f"a {built['model_type']} from scratch" if built else None),
        "step": state.get("step"),
        "stages": ", ".join(stage.name for stage in config.stages),
        "figures": {k: v for k, v in figures.items() if math.isfinite(v)},
        "adapter": None if config.model.lora is None else "beside, in place and in PEFT's format",
    }


def _check_size(text: str) -> None:
    if re.fullmatch(r"[1-9]\d*(KB|MB|GB|KiB|MiB|GiB)", text) is None:
        raise UserError("--shard-size", text, "a size such as 500MB or 5GB")


def _save_adapter(model: CausalQwenForCausalLM, folder: Path, base: str | None) -> None:
    """PEFT's own format, for `PeftModel.from_pretrained` on the base model; base: its public name."""
    folder.mkdir()
    tensors = to_peft({name: p.detach().contiguous() for name, p in model.model.features.named_parameters()})
    save_file(tensors, folder / WEIGHTS)
    assert model.config.lora is not None
    write_config(folder, model.config.lora, base)
