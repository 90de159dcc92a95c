"""The trainings of the comparison: every arm on the same texts, at three learning rates of LoRA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cqwen_dist.config import UserError
from cqwen_dist.config.architectures.base_architecture import USUAL_TARGETS
from cqwen_dist.config.errors import Said
from cqwen_dist.config.trainable import dense_rate, group_rates
from cqwen_dist.config.training import Stage
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
        8000, 200, problems=200, pieces=100, numbers=600, heads_steps=100, lora_steps=350, batch=16, length=320
    ),
}
BASE = "base, untrained"
LORA_LRS = (1e-4, 3e-4, 1e-3)
LORA = {"r": 16, "alpha": 32, "dropout": 0.05}
OURS: dict[str, dict[str, Any]] = {
    "ours": {"loss": {"constraint": {"mode": "monitor"}}},
    "ours, KL held": {"loss": {"constraint": {"mode": "dual", "eps": 0.1}}},
}
PLAIN = {"LoRA + softmax, digits": True, "LoRA + softmax, <NUM>": False}


def require_base(base: str) -> None:
    """Raises `UserError` where there is no base in this folder."""
    if not (Path(base) / "config.json").is_file():
        raise UserError("--base", Said(f"no model in {base}"), "the folder of a real base: `make base` makes one")


def hidden_size(base: str) -> int:
    """H of the base in this folder. Raises `UserError`."""
    require_base(base)
    return int(json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))["hidden_size"])


def tasks(
    out: Path, size: Scale, base: str, hidden: int, median: float, bf16: bool = False, seed: int = 0
) -> list[Task]:
    """All trainings, named by arm and rate. hidden: the base's hidden size. median: of the numbers after the training
    prompts. bf16: products in bf16, in every arm.

    Adapters train for as many steps in every arm; ours train their heads before. The heads keep their rates in both
    stages; LoRA's is chosen per arm.
    """
    files = {name: str(out / "data" / f"{name}.jsonl") for name in HELD_OUT}
    train = str(out / "data" / "train.jsonl")
    shared = {"base": base, "held_out": files, "numbers": size.numbers, "median": median}
    plain = {
        **shared,
        "data": {"train": train, "sequence_length": size.length},
        "batch": size.batch,
        "seed": seed,
        "bf16": bf16,
        "lora": {
            "r": LORA["r"],
            "lora_alpha": LORA["alpha"],
            "lora_dropout": LORA["dropout"],
            "target_modules": list(USUAL_TARGETS),
        },
    }
    found = [Task(BASE, "plain", {**plain, "stage": None, "digits": True})]
    for lr in LORA_LRS:
        for arm, changes in OURS.items():
            folder = str(out / "runs" / f"{arm} {lr:g}")
            config = _config(size, base, hidden, train, files["words"], folder, lr, bf16, seed)
            found.append(Task(f"{arm} {lr:g}", "ours", {**shared, "config": {**config, **changes}}))
        for arm, digits in PLAIN.items():
            stage = _stage("lora", size.lora_steps, lr, {})
            found.append(Task(f"{arm} {lr:g}", "plain", {**plain, "stage": stage, "digits": digits}))
    return found


def _stage(name: str, steps: int, lr: float, group_lrs: dict[str, float]) -> dict[str, Any]:
    """A stage as every arm trains it: a quarter of its steps warm up, then cosine to a tenth.

    Without the warm-up Adam moves each B of LoRA by the whole rate in its first steps, which can undo the base.
    """
    trained = {"heads": ["heads", "embedding"], "lora": ["heads", "embedding", "lora"]}[name]
    stage = Stage(name=name, train=trained, steps=steps, lr=lr, lr_groups=group_lrs, warmup_steps=steps // 4)
    return stage.model_dump(exclude_unset=True)


def _config(
    size: Scale, base: str, hidden: int, train: str, held_out: str, folder: str, lora_lr: float, bf16: bool, seed: int
) -> dict[str, Any]:
    """Config of a CausalQwen run: heads first, then heads and LoRA."""
    lr, groups = dense_rate(hidden), group_rates(hidden)
    return {
        "model": {"name_or_path": base, "lora": LORA},
        "data": {"train": train, "eval": held_out, "sequence_length": size.length},
        "start": "calibrated",
        "stages": [
            _stage("heads", size.heads_steps, lr, groups),
            _stage("lora", size.lora_steps, lr, {**groups, "lora": lora_lr}),
        ],
        "train": {
            "global_batch_size": size.batch,
            "micro_batch_size": min(ROWS, size.batch),
            "precision": "bf16" if bf16 else "fp32",
            "seed": seed,
            "eval_every": 100_000,
            "checkpoint_every": 100_000,
        },
        "run": {"dir": folder},
    }
