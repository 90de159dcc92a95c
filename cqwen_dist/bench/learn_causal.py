"""One run of the product inside `cqwen bench learn`: trained by its trainer, its own figures of every stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cqwen_dist.bench.learn_data import read_items
from cqwen_dist.bench.learn_measure import Told, errors, intervals, numbers_to_tell, spread, tell, to_tell
from cqwen_dist.bench.learn_words import causal_scorer, measured_words
from cqwen_dist.checkpoint.export import load_trained
from cqwen_dist.checkpoint.manifest import list_checkpoints
from cqwen_dist.config import Config
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.train.base import build_run_base
from cqwen_dist.train.trainer import train_on

KEPT = ("eval/", "watch/", "dist/", "train/kl")


def build_base(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: the base model that the arms share. options: config (a tree)."""
    said: list[str] = []
    config = Config.model_validate(options["config"])
    build_run_base(config, said.append, runtime.device)
    return {"said": said}


def causal_arm(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: train and measure.

    options: config (a tree; its own held-out file is what the run's evaluation is of, `watch` what it may forget);
    numbers: a file whose numbers behind the prompts are told, `median` the training texts', `most` so many of them
    (default: all); measured: files by name whose words are told, `tokenizer` the base's.
    Returns `stages`: figures at the start and after each stage; `numbers`: figures of the told numbers; `start`: what
    the run said of it.
    """
    config = Config.model_validate(options["config"])
    run = Path(config.run.dir)
    shutil.rmtree(run, ignore_errors=True)
    train_on(config, runtime)
    start = json.loads((run / "start.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    stages = [{"stage": "start", **start["eval"]}]
    last: dict[str, Any] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if key.startswith(KEPT)}
        if "eval/accuracy" in record:
            stages.append({"stage": record["stage"], **last})
    result: dict[str, Any] = {"start": start, "unit": config.target_transform, "stages": stages}
    result["losses"] = [record["train/total_loss"] for record in records]
    if options.get("numbers") or options.get("measured"):
        trained, tokenizer = load_trained(list_checkpoints(run)[-1])
    if options.get("measured"):
        result["measured"] = measured_words(
            causal_scorer(trained.model.to(runtime.device)), options["measured"], tokenizer, options["tokenizer"]
        )
    if options.get("numbers"):
        items = read_items(Path(options["numbers"]))
        every = tell(trained.model.to(runtime.device), to_tell(items, tokenizer))
        some = spread(len(every.truth), options.get("most"))
        told = Told(*(column[some] for column in every))
        repeated = np.array([again for *_, again in numbers_to_tell(items, tokenizer.policy)])[some]
        result["numbers"] = {**errors(told.truth, told.told, options["median"], repeated), **intervals(told)}
        if np.isfinite(told.crps).all():
            result["numbers"]["crps"] = float(np.mean(told.crps))
        result["told"] = {"truth": told.truth.tolist(), "told": told.told.tolist()}
    shutil.rmtree(run, ignore_errors=True)
    return result
