"""An arm of CausalQwen: trained by the package's trainer, measured like every arm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cqwen_dist.checkpoint.manifest import list_checkpoints
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import Config
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.training.train import train_on
from experiments.learn.answers import (
    Predictions,
    answer_batches,
    number_metrics,
    numbers_after_prompts,
    predict,
    spread,
)
from experiments.learn.corpora import read_items
from experiments.learn.words import causal_scorer, measured_words


def our_arm(options: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Task: train and measure.

    options: config (a tree), base (a folder), held_out (files by name), numbers (at most so many), median.
    Returns `words` for every file, `numbers`, and `evaluations`: the run's own at the start and after each stage.
    """
    config = Config.model_validate(options["config"])
    run = Path(config.run.dir)
    shutil.rmtree(run, ignore_errors=True)
    train_on(config, runtime)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained, tokenizer = load_trained(list_checkpoints(run)[-1])
    model = trained.model.to(runtime.device)
    items = read_items(Path(options["held_out"]["words"]))
    every = predict(model, answer_batches(items, tokenizer))
    some = spread(len(every.truth), options["numbers"])
    repeated = np.array([again for *_, again in numbers_after_prompts(items, tokenizer.policy)])[some]
    result = {
        "words": measured_words(causal_scorer(model), options["held_out"], tokenizer, options["base"]),
        "numbers": number_metrics(Predictions(*(column[some] for column in every)), options["median"], repeated),
        "evaluations": [record for record in records if "eval/accuracy" in record],
    }
    shutil.rmtree(run, ignore_errors=True)
    return result
