"""Chooses settings for `cqwen fit` from the table, the base model and the machine, and writes the config."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import reason_of
from cqwen_dist.config.templates import template
from cqwen_dist.config.trainable import DENSE, dense_rate
from cqwen_dist.heads.targets import signed_log
from cqwen_dist.tables.fit_request import FitRequest
from cqwen_dist.tables.rows import WHY, Parts, some_of
from cqwen_dist.tables.wide.wide_start import SEARCHED

RANDOM_FEATURES = 6144  # with 2,048, the error on concrete is 5 % larger and varies by 9 % over four draws
DEPTHS = 4
WIDE, WIDE_FOR_MANY = 2**18, 2**20  # 8,000 wines have 100,000 n-grams: collisions in 2^18 cost R2 0.853, not 0.858
MANY = 4096  # rows
LONGEST = 1024  # tokens; training skips longer rows
ROWS_TIMED = 8
CLEARLY = 0.05  # nats per number
LEAST_READ = 40  # rows of each part that are read however little time there is
LEAST_STEPS = 25  # of the heads
ASIDE = 0.1  # share of the time that is not planned
EVALUATIONS = 4  # during training
MOST_EPOCHS = 3.0  # of adapters (docs/measurements.md, Free text)


class Pace(NamedTuple):
    """Seconds per row for forward, and for forward plus backward, in the faster precision; the base's hidden size."""

    forward: float
    both: float
    precision: str
    hidden: int


def context_of(base: str) -> int:
    """The base model's maximum context in tokens. Raises `UserError` if `base` is not a model."""
    try:
        return int(AutoConfig.from_pretrained(base).max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError("--base", base, f"a model's folder or hub name ({reason_of(error)})") from None


def measure_pace(base: str, tokens: int, seconds: float = 30.0) -> Pace:
    """Time the base on a few rows in fp32 and bf16. Raises `UserError` if `base` is not a model.

    tokens: per row. seconds: about the longest for each precision.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[Pace] = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        try:
            model = AutoModel.from_pretrained(base, dtype=dtype).to(device)
        except (OSError, ValueError) as error:
            raise UserError("--base", base, f"a model's folder or hub name ({reason_of(error)})") from None
        x = torch.randn(ROWS_TIMED, tokens, model.config.hidden_size, device=device, dtype=dtype).requires_grad_()
        model.requires_grad_(False)
        forward, both, began = math.inf, math.inf, time.perf_counter()
        for row in x[:2].detach():  # a busy machine, or bf16 on a CPU without it, would take minutes for all of them
            one = time.perf_counter()
            float(model(inputs_embeds=row[None]).last_hidden_state.float().sum())
            one = time.perf_counter() - one
        if found and one > 3 * found[0].forward:
            break
        rows = min(max(int(seconds / (10 * one)), 1), ROWS_TIMED)
        for turn in range(3):  # the first warms up
            if turn > 1 and time.perf_counter() - began > seconds:
                break
            start = time.perf_counter()
            loss = model(inputs_embeds=x[:rows]).last_hidden_state.float().square().mean()
            float(loss.detach())
            forward = min(forward, time.perf_counter() - start)
            loss.backward()
            assert x.grad is not None
            float(x.grad.float().sum())
            both = min(both, time.perf_counter() - start)
        found.append(Pace(forward / rows, both / rows, name, model.config.hidden_size))
    return min(found, key=lambda pace: pace.both)


@dataclass(frozen=True)
class Chosen:
    """The chosen settings. rows: to learn from, to watch, to judge by; fewer than there are if time is short.

    The one stage trains adapters too, or without time for an epoch of that the heads alone. epochs: with adapters;
    heads_steps: without; the other is 0. minutes: of everything, about; stage_minutes: of the stage.
    """

    rows: tuple[int, int, int]
    minutes: float
    transform: str
    length: int
    batch: int
    heads_steps: int
    epochs: float
    stage_minutes: float


def choose(
    values: np.ndarray, tokens: np.ndarray, valid: int, test: int, pace: Pace, minutes: float, longest: int = LONGEST
) -> Chosen:
    """Chooses settings that fit the time.

    values [n]: the training targets. tokens [n]: the row lengths. valid, test: row counts. minutes: that are left for
    the command. longest: maximum tokens per row.
    """
    rows = np.array([len(values), valid, test])
    n = len(values)
    length = 64
    while length < tokens.max() + 8 and length < longest:
        length *= 2
    length = min(length, longest)
    batch = 16 if n >= 400 else 8
    heads = min(max(2 * n // batch, 100), 500)
    a_step = 0.05 + 0.1 * batch * pace.forward  # of the heads only, on stored z
    apart = 15 + 300 * pace.forward  # the model is loaded twice, the closed forms are fitted
    apart += 0.01 * n  # and the models to compare with
    time_s = 60 * minutes * (1 - ASIDE) - apart
    by_row = _reading_seconds(rows, pace)
    if by_row + heads * a_step > time_s:
        heads = max(min(heads, int(0.3 * time_s / a_step)), LEAST_STEPS)
        share = max(time_s - heads * a_step, 0.0) / by_row  # a share of the rows takes at most that share of by_row
        rows = np.maximum((min(share, 1.0) * rows).astype(int), np.minimum(rows, LEAST_READ))
    features = _reading_seconds(rows, pace)
    evaluations = 1.5 * (EVALUATIONS + 1) * rows[1] * pace.forward  # trained adapters invalidate cached z
    epoch = 1.4 * rows[0] * pace.both  # 1.4: including adapters and heads
    epochs = min(math.floor(4 * (time_s - features - evaluations) / epoch) / 4, MOST_EPOCHS)
    if epochs < 1:
        epochs, trained = 0.0, heads * a_step
    else:
        heads, trained = 0, epochs * epoch + evaluations
    in_all = (apart + features + trained) / 60
    kept = (int(rows[0]), int(rows[1]), int(rows[2]))
    return Chosen(kept, in_all, best_transform(values), length, batch, heads, epochs, trained / 60)


def in_time(
    request: FitRequest,
    parts: Parts,
    values: np.ndarray,
    lengths: np.ndarray,
    longest: int,
    pace: Pace,
    say: Callable[[str], None],
    minutes: float,
) -> tuple[Parts, Chosen]:
    """The rows that can be read in the time, and the settings. minutes: that are left."""
    tokens = lengths[parts.train]
    counts = len(parts.valid), len(parts.test)
    # As if the runs of all seeds or folds came one after the other: they share the base and z, so some time is left
    choice = choose(values[parts.train], tokens, *counts, pace, minutes / request.runs, longest)
    if (had := tuple(map(len, parts))) != choice.rows:
        kept = ", ".join(f"{n:,} of {of:,} {why}" for n, of, why in zip(choice.rows, had, WHY, strict=True))
        say(f"note: {request.minutes:g} minutes are too few for all rows here (--minutes gives more). Drawn: {kept}")
        parts = Parts(*(some_of(part, n, request.seed) for part, n in zip(parts, choice.rows, strict=True)))
    if choice.epochs:
        say(f"{choice.epochs:g} epochs of adapters, about {choice.stage_minutes:.0f} minutes; {pace.precision}")
    else:
        say(f"note: no time for adapters in {request.minutes:g} minutes: heads alone (--minutes gives more)")
    in_all = choice.minutes * request.runs
    say(f"the base reads {1 / pace.forward:.1f} rows a second here: about {in_all:.1f} more minutes in all")
    return parts, choice


def _reading_seconds(rows: np.ndarray, pace: Pace) -> float:
    """Estimated seconds to read the rows (to learn from, to watch, to judge by) and to fit the wide part on one core.
    The rows to watch are read twice, also for this fit."""
    fitted = int(rows[0] + rows[1])
    wide = 2.5e-5 * min(fitted, SEARCHED) ** 2 + 2e-10 * fitted**3
    return float((rows.sum() + rows[1]) * pace.forward + wide)


def best_transform(values: np.ndarray) -> str:
    """Returns "standardise", or "standardise_log" if a Cauchy law on the logarithms is clearly more likely.

    The laws are fitted by median and IQR/2 (S1 2).
    """
    plain, by_log = _likelihood(values), _likelihood(signed_log(values)) - np.log1p(np.abs(values)).mean()
    return "standardise_log" if by_log > plain + CLEARLY and (values > 0).all() else "standardise"


def _likelihood(values: np.ndarray) -> float:
    """Mean log density of the sample under a Cauchy law fitted to it."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    scale = max((high - low) / 2, 1e-12 * max(1.0, abs(middle)))
    return float(-np.log(math.pi * scale * (1 + ((values - middle) / scale) ** 2)).mean())


class FitFiles(NamedTuple):
    """Where a run of a fit has its config, its folder and its rows."""

    config: Path
    run: Path
    table: Path


def fit_files(folder: Path, request: FitRequest) -> list[FitFiles]:
    """Of each seed or fold. Seeds have one table."""
    ends = ["", *(f"-{i}" for i in range(1, request.runs))]
    own_table = request.folds > 1
    return [
        FitFiles(folder / f"fit{end}.yaml", folder / f"run{end}", folder / f"table{end * own_table}") for end in ends
    ]


def config_text(files: FitFiles, base: str, choice: Chosen, pace: Pace, rows: int, seed: int, **data: Any) -> str:
    """A run's config as YAML with comments. data: prompt, text and target, for `data.prompt_template` and so on."""
    steps = round(choice.epochs * rows / choice.batch) or choice.heads_steps
    return template("cqwen_dist.tables", "fit.yaml.j2").render(
        config=files.config,
        base=base,
        train=str(files.table / "train.csv"),
        valid=str(files.table / "valid.csv"),
        data=data,
        chosen=choice,
        rows=rows,
        steps=steps,
        wide=[WIDE_FOR_MANY if rows > MANY else WIDE, RANDOM_FEATURES, DEPTHS],
        dense=DENSE,
        hidden=pace.hidden,
        rate=dense_rate(pace.hidden),
        precision=pace.precision,
        seed=seed,
        every=max(25, -(-steps // EVALUATIONS)),
        run=str(files.run),
    )
