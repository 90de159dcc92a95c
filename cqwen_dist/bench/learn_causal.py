"""One run of the product inside `cqwen bench learn`: trained by its trainer, looked at before and after every stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cqwen_dist.bench.learn_data import read_items
from cqwen_dist.bench.learn_measure import errors, intervals, numbers_to_tell, pieces, right_words, tell, to_tell
from cqwen_dist.checkpoint.export import load_trained
from cqwen_dist.checkpoint.manifest import list_checkpoints, read_manifest
from cqwen_dist.config import Config
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.backbone import load_base
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import set_scales
from cqwen_dist.parallel.groups import build_groups
from cqwen_dist.parallel.runtime import Runtime, seed_everything
from cqwen_dist.train.base import build_run_base
from cqwen_dist.train.trainer import train_on


def build_base(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: the base model that the arms share. options: config (a tree)."""
    said: list[str] = []
    config = Config.model_validate(options["config"])
    build_run_base(config, said.append, runtime.device)
    return {"said": said}


def causal_arm(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: train and measure.

    options: config (a tree; its own held-out file is what the run's evaluation is of); other: a file of another kind
    that is not trained on; numbers: a file whose numbers behind the prompts are told, `median` the training texts'.
    Returns `stages`: figures at the start and after each stage; `numbers`: figures of the told numbers; `start`: what
    the run said of it.
    """
    config = Config.model_validate(options["config"])
    run = Path(config.run.dir)
    shutil.rmtree(run, ignore_errors=True)
    train_on(config, runtime)
    start = json.loads((run / "start.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations = {record["step"]: record for record in records if "eval/accuracy" in record}
    groups = build_groups(1)
    result: dict[str, Any] = {"start": start, "unit": config.target_transform, "stages": []}
    result["losses"] = [record["train/total_loss"] for record in records]

    def look(name: str, model: CausalQwenModel, tokenizer: NumericalAwareTokenizer, figures: dict[str, Any]) -> None:
        kept = {key: value for key, value in figures.items() if key.startswith(("eval/", "dist/", "train/kl"))}
        if other:
            kept["other/accuracy"] = right_words(model, other, groups, "ovr")
        result["stages"].append({"stage": name, **kept})

    model, tokenizer = _as_it_began(config, start, runtime)
    other = pieces(Path(options["other"]), tokenizer, config.data) if options.get("other") else []
    if other:
        result["other_base"] = right_words(model, other, groups, "loc", unseen=True)
    look("start", model, tokenizer, start["eval"])
    for folder in list_checkpoints(run):
        manifest = read_manifest(folder)
        assert manifest is not None
        if manifest["step"] in evaluations:
            trained, tokenizer = load_trained(folder)
            model = trained.model.to(runtime.device)
            drift = [record for record in records if "train/kl" in record and record["step"] <= manifest["step"]]
            last = {key: value for key, value in (drift[-1] if drift else {}).items() if key.startswith("train/kl")}
            look(manifest["stage"], model, tokenizer, {**evaluations[manifest["step"]], **last})
    if options.get("numbers"):
        items = read_items(Path(options["numbers"]))
        told = tell(model, to_tell(items, tokenizer))
        repeated = np.array([again for *_, again in numbers_to_tell(items, tokenizer.policy)])
        result["numbers"] = {**errors(told.truth, told.told, options["median"], repeated), **intervals(told)}
        result["told"] = {"truth": told.truth.tolist(), "told": told.told.tolist()}
    if not options.get("keep"):
        shutil.rmtree(run, ignore_errors=True)
    return result


def _as_it_began(
    config: Config, start: dict[str, Any], runtime: Runtime
) -> tuple[CausalQwenModel, NumericalAwareTokenizer]:
    """The model before its first step, on the runtime's device."""
    base = load_base(config.base_folder, torch.float32)
    tokenizer = NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, None, base.config.vocab_size)
    seed_everything(config.train.seed)
    model = CausalQwenModel.from_base_model(
        base,
        start=config.start,
        num_token_id=tokenizer.num_token_id,
        used_rows=max(tokenizer.text_size, tokenizer.num_token_id + 1),
        number_dims=config.number_dims,
        w_num_scale=config.w_num_scale,
        b_noise_init=config.model.b_noise_init,
    )
    if "calibration" in start:
        set_scales(model, start["calibration"]["gamma"], config.model.b_noise_init)
        with torch.no_grad():
            model.action.threshold.fill_(start["calibration"]["threshold"])
    return model.to(runtime.device).eval(), tokenizer
