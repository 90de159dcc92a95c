"""The trainings of the comparison: every arm on the same texts, at three learning rates of LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config.architectures.base_architecture import USUAL_TARGETS
from experiments.learn.corpora import HELD_OUT
from experiments.learn.lanes import Task
from experiments.learn.words import ROWS


@dataclass(frozen=True)
class Scale:
    """Size of a comparison."""

    texts: int  # to train on
    held_out: int  # texts that are never trained on
    problems: int  # held-out texts that are measured
    pieces: int  # of prose, and as many of code
    numbers: int  # at most so many numbers of the answers are predicted, evenly over the problems
    heads_steps: int
    lora_steps: int
    batch: int
    length: int


SCALES = {
    "small": Scale(1500, 60, problems=32, pieces=16, numbers=48, heads_steps=12, lora_steps=16, batch=8, length=320),
    "full": Scale(
        8000, 200, problems=200, pieces=100, numbers=600, heads_steps=150, lora_steps=450, batch=16, length=320
    ),
}
BASE = "base, untrained"
SEED = 0
# Learning rates for a real base (docs/training.md). The heads keep theirs in both stages; LoRA's is chosen per arm.
HEADS_LR = 2e-5
HEADS_RATES = {"classifier": 2e-6, "regression": 1e-3, "thresholds": 1e-3}
LORA_LRS = (1e-4, 3e-4, 1e-3)
LORA = {"r": 16, "alpha": 32, "dropout": 0.05}
OURS: dict[str, dict[str, Any]] = {
    "ours": {"loss": {"constraint": {"mode": "monitor"}}},
    "ours, KL held": {"loss": {"constraint": {"mode": "dual", "eps": 0.1}}},
}
PLAIN = {"LoRA + softmax, digits": True, "LoRA + softmax, <NUM>": False}


def tasks(out: Path, size: Scale, base: str, median: float) -> list[Task]:
    """All trainings, named by arm and rate. median: of the numbers after the training prompts."""
    files = {name: str(out / "data" / f"{name}.jsonl") for name in HELD_OUT}
    train = str(out / "data" / "train.jsonl")
    shared = {"base": base, "held_out": files, "numbers": size.numbers, "median": median}
    plain = {
        **shared,
        "data": {"train": train, "sequence_length": size.length},
        "batch": size.batch,
        "seed": SEED,
        "lora": {
            "r": LORA["r"],
            "lora_alpha": LORA["alpha"],
            "lora_dropout": LORA["dropout"],
            "target_modules": list(USUAL_TARGETS),
        },
    }
    found = [Task(BASE, "plain", {**plain, "steps": 0, "lr": 0.0, "digits": True})]
    for lr in LORA_LRS:
        for arm, changes in OURS.items():
            config = _config(size, base, train, files["words"], str(out / "runs" / f"{arm} {lr:g}"), lr)
            found.append(Task(f"{arm} {lr:g}", "ours", {**shared, "config": {**config, **changes}}))
        for arm, digits in PLAIN.items():
            steps = size.heads_steps + size.lora_steps
            found.append(Task(f"{arm} {lr:g}", "plain", {**plain, "steps": steps, "lr": lr, "digits": digits}))
    return found


def _config(size: Scale, base: str, train: str, held_out: str, folder: str, lora_lr: float) -> dict[str, Any]:
    """Config of a CausalQwen run: heads first, then heads and LoRA."""
    both = {"lr": HEADS_LR, "schedule": "cosine"}
    heads = {**both, "name": "heads", "train": ["heads", "embedding"], "steps": size.heads_steps}
    lora = {**both, "name": "lora", "train": ["heads", "embedding", "lora"], "steps": size.lora_steps}
    return {
        "model": {"name_or_path": base, "lora": LORA},
        "data": {"train": train, "eval": held_out, "sequence_length": size.length},
        "start": "calibrated",
        "stages": [{**heads, "lr_groups": HEADS_RATES}, {**lora, "lr_groups": {**HEADS_RATES, "lora": lora_lr}}],
        "train": {
            "global_batch_size": size.batch,
            "micro_batch_size": min(ROWS, size.batch),
            "seed": SEED,
            "eval_every": 100_000,
            "checkpoint_every": 100_000,
        },
        "run": {"dir": folder},
    }
