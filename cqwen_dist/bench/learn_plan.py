"""What `cqwen bench learn` runs: bases, arms, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cqwen_dist.bench.learn_lanes import Task
from cqwen_dist.bench.learn_words import ROWS
from cqwen_dist.config import UserError

# Starts of the comparison: the presets, and variants of them.
STARTS: dict[str, dict[str, Any]] = {
    "calibrated": {"start": "calibrated"},
    "calibrated, w_num 0": {"start": "calibrated", "model": {"w_num_scale": 0.0}},
    "calibrated, w_num 1": {"start": "calibrated", "model": {"w_num_scale": 1.0}},
    "seed": {"start": "seed"},
    "seed, standardised": {
        "start": "seed",
        "model": {"number_dims": 8},
        "loss": {"target_transform": "standardise"},
    },
    "seed-100": {"start": "seed-100"},
}


@dataclass(frozen=True)
class RealScale:
    """Sizes of the experiment on a real base."""

    heads_steps: int
    lora_steps: int
    batch: int
    length: int
    held_out: int  # problems
    pieces: int  # of prose, and of code
    told: int  # numbers of the answers that are told, at most, evenly over the problems


@dataclass(frozen=True)
class Scale:
    """Sizes of one kind of run."""

    vocab: int  # of the tokenizer that is trained on the texts
    hidden: int
    layers: int
    length: int  # of words and code; rows of tables are never cut
    batch: int
    pretrain_steps: int
    pretrain_batch: int
    heads_steps: int
    lora_steps: int
    table_steps: int
    start_steps: int
    texts: int
    held_out: int
    rates: tuple[tuple[float, float], ...]  # (lr, lr of the scales) that every start may choose from
    lrs: tuple[float, ...]  # of LoRA, that every arm of the numbers may choose from
    seeds: int
    real: RealScale


SCALES = {
    "small": Scale(
        vocab=2048,
        hidden=64,
        layers=2,
        length=192,
        batch=12,
        pretrain_steps=600,
        pretrain_batch=16,
        heads_steps=100,
        lora_steps=120,
        table_steps=250,
        start_steps=120,
        texts=1500,
        held_out=60,
        rates=((1e-3, 1e-2), (1e-3, 1e-1), (3e-3, 3e-1)),
        lrs=(2e-3,),
        seeds=1,
        real=RealScale(heads_steps=12, lora_steps=16, batch=8, length=320, held_out=32, pieces=16, told=48),
    ),
    "full": Scale(
        vocab=8192,
        hidden=256,
        layers=4,
        length=256,
        batch=8,
        pretrain_steps=900,
        pretrain_batch=32,
        heads_steps=100,
        lora_steps=200,
        table_steps=600,
        start_steps=250,
        texts=8000,
        held_out=200,
        rates=((3e-4, 1e-2), (1e-3, 1e-2), (1e-3, 1e-1), (3e-3, 1e-1)),
        lrs=(1e-3, 3e-3),
        seeds=3,
        real=RealScale(heads_steps=150, lora_steps=450, batch=16, length=320, held_out=200, pieces=100, told=600),
    ),
}
TABLE_LENGTH = 512
# Ways to learn numbers: the target's unit, and what else may matter.
WAYS: dict[str, dict[str, Any]] = {
    "standardise": {"loss": {"target_transform": "standardise"}},
    "standardise_log": {"loss": {"target_transform": "standardise_log"}},
    "standardise_log, lambda 4": {"loss": {"target_transform": "standardise_log", "reg_weight": 4.0}},
    "standardise_log, lambda 4, w_num 1": {
        "loss": {"target_transform": "standardise_log", "reg_weight": 4.0},
        "model": {"w_num_scale": 1.0},
    },
}
REAL_VOCAB = 151_936


def architecture(scale: Scale, vocab: int) -> dict[str, Any]:
    """A Qwen2 of the scale."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": scale.hidden,
        "intermediate_size": 3 * scale.hidden,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": max(2, scale.hidden // 64),
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }


LORA = {"r": 16, "alpha": 32, "dropout": 0.05}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def is_real(base: str) -> bool:
    """Whether a base's task has the real vocabulary."""
    return base.startswith(f"base-{REAL_VOCAB}-")


class Planner:
    """Tasks of the experiments in one output folder."""

    def __init__(
        self, out: Path, scale: Scale, tokenizer: str | None, medians: dict[str, float], real_base: str | None = None
    ) -> None:
        self.out, self.scale, self.tokenizer, self.medians = out, scale, tokenizer, medians
        self.real_base = real_base
        self.tasks: dict[str, Task] = {}

    def file(self, name: str, part: str) -> str:
        return str(self.out / "data" / f"{name}-{part}.jsonl")

    def base(self, real: bool, seed: int) -> str:
        """A base pretrained on words and code, every text with its numbers as <NUM> and as digits; its task's name."""
        scale, vocab = self.scale, REAL_VOCAB if real else self.scale.vocab
        name = f"base-{vocab}-{seed}"
        config = {
            "model": {
                "architecture": architecture(scale, vocab),
                "tokenizer": self.tokenizer if real else "train",
                "pretrain": {
                    "steps": scale.pretrain_steps,
                    "batch_size": scale.pretrain_batch,
                    "lr": 2e-3,
                    "data": self.file("code", "train"),
                    "numerals": "both",
                    "rows": "occurring" if real else "all",
                },
            },
            "data": {"train": self.file("words", "train"), "sequence_length": scale.length, "pack": True},
            "train": {"seed": seed},
            "run": {"dir": str(self.out / name)},
        }
        self.tasks.setdefault(name, Task(name, "base", {"config": config}))
        return name

    def folders(self, base: str) -> tuple[str, str]:
        """(model, tokenizer) of a base."""
        folder = str(self.out / base / "base")
        return folder, str(self.tokenizer) if is_real(base) else folder

    def batch(self, base: str, table: bool) -> int:
        """Sequences a step: more of a table's, which are short; fewer where each token costs the real vocabulary."""
        whole = self.scale.batch * (2 if table else 1)
        return max(whole // 2, 1) if is_real(base) else whole

    def causal(
        self,
        name: str,
        base: str,
        corpus: str,
        stages: list[dict[str, Any]],
        seed: int,
        changes: dict[str, Any],
        *,
        table: bool = False,
        watched: bool = False,
    ) -> None:
        """A run of the product. changes: sections of the config that differ. watched: look at what it does to code."""
        model, tokenizer = self.folders(base)
        batch = self.batch(base, table)
        config: dict[str, Any] = {
            "model": {"name_or_path": model, "tokenizer": tokenizer, "lora": LORA},
            "data": {
                "train": self.file(corpus, "train"),
                "eval": self.file(corpus, "test"),
                "sequence_length": TABLE_LENGTH if table else self.scale.length,
                "pack": not table,
                "numeric_targets": "last" if table else "all",
            },
            "stages": stages,
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "seed": seed,
                "eval_every": 100_000,
                "checkpoint_every": 100_000,
            },
            "run": {"dir": str(self.out / "runs" / name)},
        }
        if watched:
            config["data"]["watch"] = {"code": {"source": self.file("code", "test")}}
        for section, value in changes.items():
            config[section] = {**config.get(section, {}), **value} if isinstance(value, dict) else value
        options = {"config": config, "numbers": self.file(corpus, "test"), "median": self.medians[corpus]}
        self.tasks[name] = Task(name, "causal", options, (base,))

    def plain(
        self,
        name: str,
        base: str,
        corpus: str,
        steps: int,
        lr: float,
        seed: int,
        *,
        digits: bool,
        last_only: bool = False,
        head: bool = False,
        table: bool = False,
    ) -> None:
        """The ordinary way on the same base and texts."""
        model, tokenizer = self.folders(base)
        options = {
            "base": model,
            "tokenizer": tokenizer,
            "data": {
                "train": self.file(corpus, "train"),
                "sequence_length": TABLE_LENGTH if table else self.scale.length,
                "pack": not table,
            },
            "steps": steps,
            "batch": self.batch(base, table),
            "lr": lr,
            "seed": seed,
            "lora": {
                "r": LORA["r"],
                "lora_alpha": LORA["alpha"],
                "lora_dropout": LORA["dropout"],
                "target_modules": TARGETS,
            },
            "digits": digits,
            "last_only": last_only,
            "head": head,
            "words": self.file(corpus, "test"),
            "other": self.file("code", "test"),
            "numbers": self.file(corpus, "test"),
            "median": self.medians[corpus],
        }
        self.tasks[name] = Task(name, "plain", options, (base,))


# Rates of what each word has of its own, W_cls's row and C: they forget the words that training does not have.
KEEPING = {"classifier": 1e-4, "thresholds": 1e-3}


def stage(
    name: str,
    steps: int,
    lr: float,
    scales: float,
    lora: float | None = None,
    heads: tuple[str, ...] = ("heads",),
    rates: dict[str, float] | None = None,
) -> dict[str, Any]:
    """A stage of heads (or some of them) and embedding, and of LoRA at its own rate where one is given.

    rates: of groups that do not go by lr and scales.
    """
    groups, every = [*heads, "embedding"], {"scales": scales, **(rates or {})}
    if lora is not None:
        groups, every = [*groups, "lora"], {**every, "lora": lora}
    return {"name": name, "train": groups, "steps": steps, "lr": lr, "lr_groups": every, "warmup_steps": steps // 20}


def preserve(planner: Planner) -> None:
    """Knowledge kept and forgotten: starts, rates, both stages, with and without KL's bound, beside ordinary LoRA."""
    scale, seed = planner.scale, 0
    base = planner.base(real=planner.tokenizer is not None, seed=seed)

    def arm(
        name: str,
        start: str,
        heads: tuple[str, ...] = ("heads",),
        rates: dict[str, float] | None = KEEPING,
        **more: Any,
    ) -> None:
        stages = [
            stage("heads", scale.heads_steps, 1e-3, 1e-1, heads=heads, rates=rates),
            stage("lora", scale.lora_steps, 1e-3, 1e-1, lora=1e-3, heads=heads, rates=rates),
        ]
        planner.causal(f"preserve {name}", base, "words", stages, seed, {**STARTS[start], **more}, watched=True)

    arm("calibrated", "calibrated")
    arm("seed", "seed", rates=None)  # C and the rows have far to go
    arm("seed-100", "seed-100", rates=None)
    arm("calibrated, KL <= 0.5", "calibrated", loss={"constraint": {"mode": "dual", "eps": 0.5}})
    arm("calibrated, words at the heads' rate", "calibrated", rates=None)
    arm("calibrated, words asleep", "calibrated", ("abduction", "noise", "regression"))
    arm("calibrated, not levelled", "calibrated", model={"level_logits": False})
    steps = scale.heads_steps + scale.lora_steps
    planner.plain("preserve LoRA + softmax", base, "words", steps, 1e-3, seed, digits=False)
    planner.plain("preserve LoRA + softmax, head too", base, "words", steps, 1e-3, seed, digits=False, head=True)
    planner.plain("preserve LoRA + softmax, digits", base, "words", steps, 1e-3, seed, digits=True)


def starts(planner: Planner) -> None:
    """Every start at every rate, over the seeds, each seed with its own base; heads stage only, words and numbers."""
    for seed in range(planner.scale.seeds):
        base = planner.base(real=False, seed=seed)
        for start in STARTS:
            for lr, scales in planner.scale.rates:
                one = [stage("heads", planner.scale.start_steps, lr, scales)]
                planner.causal(f"starts {start} {lr:g} {scales:g} {seed}", base, "words", one, seed, STARTS[start])


def numbers(planner: Planner) -> None:
    """Words' answers and both tables: ours in two units of the target, digits decoded, at equal steps."""
    scale = planner.scale
    for seed in range(scale.seeds):
        base = planner.base(real=False, seed=seed)
        for corpus in ("words", "diabetes", "cancer"):
            table = corpus != "words"
            before, steps = scale.heads_steps, scale.lora_steps
            if table:
                before, steps = before // 2, scale.table_steps
            for lr in scale.lrs:
                for way, changes in WAYS.items():
                    run = [
                        stage("heads", before, 1e-3, 1e-1),
                        stage("lora", steps, 1e-3, 1e-1, lora=lr),
                    ]
                    name = f"numbers {corpus} {way} {lr:g} {seed}"
                    planner.causal(name, base, corpus, run, seed, changes, table=table)
                for last in (False, True) if table else (False,):
                    name = f"numbers {corpus} digits{', answer only' if last else ''} {lr:g} {seed}"
                    planner.plain(
                        name,
                        base,
                        corpus,
                        before + steps,
                        lr,
                        seed,
                        digits=True,
                        last_only=last,
                        head=True,
                        table=table,
                    )


# The real base. The heads have rates of their own in both stages; every arm may choose LoRA's.
REAL_HEADS_LR = 2e-5
REAL_HEADS_RATES = {"classifier": 2e-6, "regression": 1e-3, "thresholds": 1e-3}
REAL_LORA_LRS = (1e-4, 3e-4, 1e-3)
REAL_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, KL held": {"loss": {"constraint": {"mode": "dual", "eps": 0.1}}},
}
REAL_PLAIN = {"LoRA + softmax, digits": True, "LoRA + softmax, <NUM>": False}


def real(planner: Planner) -> None:
    """A real base that has no <NUM>: ours and the ordinary way at as many texts, each at every rate of LoRA."""
    base = planner.real_base
    if base is None:
        raise UserError("--base", "no value", "the folder of a real base (docs/bases.md)")
    size, seed = planner.scale.real, 0
    data = {"train": planner.file("words", "train"), "sequence_length": size.length}
    words = {name: planner.file(f"real-{name}", "test") for name in ("words", "prose", "code")}
    shared = {
        "tokenizer": base,
        "measured": words,
        "numbers": words["words"],
        "most": size.told,
        "median": planner.medians["words"],
    }
    plain = {
        **shared,
        "base": base,
        "data": data,
        "batch": size.batch,
        "seed": seed,
        "last_only": False,
        "head": False,
        "lora": {
            "r": LORA["r"],
            "lora_alpha": LORA["alpha"],
            "lora_dropout": LORA["dropout"],
            "target_modules": TARGETS,
        },
    }
    planner.tasks["real base"] = Task("real base", "untrained", {**plain, "steps": 0, "lr": 1e-4, "digits": True})
    for lr in REAL_LORA_LRS:
        both = {"lr": REAL_HEADS_LR, "schedule": "cosine"}
        stages = [
            {**both, "name": "heads", "train": ["heads", "embedding"], "steps": size.heads_steps},
            {**both, "name": "lora", "train": ["heads", "embedding", "lora"], "steps": size.lora_steps},
        ]
        for one, rates in zip(stages, ({}, {"lora": lr}), strict=True):
            one["lr_groups"] = {**REAL_HEADS_RATES, **rates}
        for arm, changes in REAL_OURS.items():
            name = f"real {arm} {lr:g}"
            config = {
                "model": {"name_or_path": base, "lora": LORA},
                "data": {**data, "eval": words["words"]},
                "start": "calibrated",
                "stages": stages,
                "train": {
                    "global_batch_size": size.batch,
                    "micro_batch_size": min(ROWS, size.batch),
                    "seed": seed,
                    "eval_every": 100_000,
                    "checkpoint_every": 100_000,
                },
                "run": {"dir": str(planner.out / "runs" / name)},
                **changes,
            }
            planner.tasks[name] = Task(name, "causal", {**shared, "config": config})
        for arm, digits in REAL_PLAIN.items():
            name = f"real {arm} {lr:g}"
            options = {**plain, "steps": size.heads_steps + size.lora_steps, "lr": lr, "digits": digits}
            planner.tasks[name] = Task(name, "plain", options)


EXPERIMENTS = {"preserve": preserve, "starts": starts, "numbers": numbers, "real": real}


def with_seeds(scale: Scale, seeds: int | None) -> Scale:
    """The scale with another number of seeds."""
    return scale if seeds is None else replace(scale, seeds=seeds)
