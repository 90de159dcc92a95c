"""Short trainings of a seed, each measured once and kept: of the heads on cached features, and with LoRA by the
package's own trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cqwen_dist.config.trainable import dense_rate, group_rates
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.parallel.runtime import Runtime, distributed
from cqwen_dist.run.files import write_atomically
from experiments.claims.scores import scored
from experiments.claims.subject import Ask, Training, calibrated, read, train_heads
from experiments.claims.texts import items_of, texts_of
from experiments.learn.arms import hidden_size
from experiments.learn.corpora import HELD_OUT
from experiments.learn.ours import our_arm
from experiments.learn.words import causal_scorer, measured_words

LORA_LR = 3e-4
NUMBERS = 200  # held-out numbers that are predicted, at most
START = "LoRA's start"
OTHERS = ("prose", "code")  # texts outside the training data
Measures = dict[str, dict[str, float]]  # by kind of text


class LoraArm(NamedTuple):
    """A training with LoRA: the heads before it or from the first step on, its rate, the limit of the KL."""

    heads_first: bool = True
    rate: float = LORA_LR
    kl: float | None = None


def heads_arms(ask: Ask, arms: Mapping[str, list[tuple[Training, int]]]) -> dict[str, Measures]:
    """The measures of each arm, "held out" and each of `OTHERS`, and of the start as "start". An arm's phases
    (training, steps) follow each other, each at the same number of positions a step. Raises `UserError`."""
    names = ("start", *arms)
    missing = [name for name in names if not _path(ask, name).is_file()]
    if missing:
        texts = texts_of(ask.out / "data", ask.data, ask.size, ask.seed, ask.seeds)
        ask.say(f"seed {ask.seed}: the start and its features")
        model, tokenizer = calibrated(ask.base, texts["train"], ask.seed, ask.size.calibration)
        inner = model.model
        seen = {kind: read(inner, texts[kind], tokenizer) for kind in ("train", "held out", *OTHERS)}
        fresh = {name: value.clone() for name, value in inner.named_parameters() if not name.startswith("features.")}
        for name in missing:
            ask.say(f"seed {ask.seed}: {name}")
            _restore(inner, fresh)
            for training, steps in arms.get(name, []):
                train_heads(inner, seen["train"], steps, ask.size.step_tokens, ask.seed, training)
            _keep(_path(ask, name), {kind: of_scores(scored(inner, seen[kind])) for kind in ("held out", *OTHERS)})
    return {name: _kept(_path(ask, name)) for name in names}


def _restore(model: CausalQwenModel, values: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    for name, value in values.items():
        own[name].data.copy_(value)


def of_scores(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Of words: the share that is right by argmax P, and the surprise of softmax(loc_S) in nats. Of numbers, where
    there are any: CRPS and median error in the target's unit, and the mean P of <NUM> at them."""
    number = scores["is_number"] == 1
    found = {
        "words right": float((scores["best"] == scores["label"])[~number].mean()),
        "surprise": float(-np.log(np.maximum(scores["soft_label"][~number], 1e-30)).mean()),
    }
    if number.any():
        found |= {
            "CRPS": float(scores["crps"][number].mean()),
            "median error": float(np.median(np.abs(scores["goal"] - scores["y_loc"])[number])),
            "P of <NUM>": float(scores["p_label"][number].mean()),
        }
    return found


def lora_arms(ask: Ask, arms: Mapping[str, LoraArm]) -> dict[str, Measures]:
    """The measures of each arm, "held out" and each of `OTHERS`, and of the start as "LoRA's start" (words only). CRPS
    is in the numbers' own unit. Raises `UserError`."""
    names = (START, *arms)
    missing = [name for name in names if not _path(ask, name).is_file()]
    if missing:
        with distributed() as runtime:
            for name in missing:
                ask.say(f"seed {ask.seed}: {name}")
                arm = arms.get(name)
                _keep(_path(ask, name), _start(ask) if arm is None else _trained(ask, arm, runtime))
    return {name: _kept(_path(ask, name)) for name in names}


def _start(ask: Ask) -> Measures:
    files = _files(ask)
    texts = texts_of(ask.out / "data", ask.data, ask.size, ask.seed, ask.seeds)
    model, tokenizer = calibrated(ask.base, texts["train"], ask.seed, ask.size.calibration)
    held_out = {kind: files[kind] for kind in HELD_OUT}
    return of_arm({"words": measured_words(causal_scorer(model.model), held_out, tokenizer, ask.base)})


def _trained(ask: Ask, arm: LoraArm, runtime: Runtime) -> Measures:
    files = _files(ask)
    options = {
        "config": _config(ask, arm, files),
        "base": ask.base,
        "held_out": {kind: files[kind] for kind in HELD_OUT},
        "numbers": NUMBERS,
        "median": 0.0,  # the error of always predicting it is not used here
    }
    log = ask.out / "trainings" / "log.txt"  # the trainer's output
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file):
        return of_arm(our_arm(options, runtime))


def of_arm(result: Mapping[str, Any]) -> Measures:
    """`our_arm`'s result as measures by kind of text."""
    found = {
        "held out" if kind == "words" else kind: {
            "words right": float(words["top1"]),
            "surprise": math.log(words["perplexity"]),
        }
        for kind, words in result["words"].items()
    }
    if "numbers" in result:
        numbers = result["numbers"]
        found["held out"] |= {"CRPS": float(numbers["crps"]), "median error": float(numbers["mdae"])}
    return found


def _files(ask: Ask) -> dict[str, str]:
    """The seed's texts as the trainer's files."""
    folder = ask.out / "trainings" / f"texts-{ask.seed}-of-{ask.seeds}"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind, items in items_of(ask.out / "data", ask.data, ask.size, ask.seed, ask.seeds).items():
        found[kind] = str(folder / f"{kind}.jsonl")
        write_atomically(Path(found[kind]), "".join(json.dumps(item._asdict()) + "\n" for item in items))
    return found


def _config(ask: Ask, arm: LoraArm, files: Mapping[str, str]) -> dict[str, Any]:
    """The config of an arm's run. Both orders read the same texts in as many steps; only what trains differs."""
    hidden = hidden_size(ask.base)
    groups = group_rates(hidden)
    shared = {"lr": dense_rate(hidden), "schedule": "cosine"}
    first, then = ask.size.lora_heads, ask.size.lora_steps
    heads = {**shared, "name": "heads", "train": ["heads", "embedding"], "lr_groups": groups, "steps": first}
    lora = {
        **shared,
        "name": "lora",
        "train": ["heads", "embedding", "lora"],
        "lr_groups": {**groups, "lora": arm.rate},
        "steps": then if arm.heads_first else first + then,
    }
    limit = {"mode": "monitor"} if arm.kl is None else {"mode": "dual", "eps": arm.kl}
    return {
        "model": {"name_or_path": ask.base, "lora": {"r": 16, "alpha": 32}},
        "data": {"train": files["train"], "eval": files["words"], "sequence_length": 320},
        "start": "calibrated",
        "stages": [heads, lora] if arm.heads_first else [lora],
        "train": {
            "global_batch_size": ask.size.lora_texts,
            "micro_batch_size": min(4, ask.size.lora_texts),
            "seed": ask.seed,
            "eval_every": 100_000,
            "checkpoint_every": 100_000,
        },
        "run": {"dir": str(ask.out / "trainings" / "run")},
        "loss": {"constraint": limit},
    }


def _path(ask: Ask, name: str) -> Path:
    return ask.out / "trainings" / f"seed-{ask.seed}-of-{ask.seeds}-{name}.json"


def _keep(path: Path, measures: Measures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(measures))


def _kept(path: Path) -> Measures:
    return dict(json.loads(path.read_text(encoding="utf-8")))
