"""`cqwen fit`: from a table to a run that predicts one of its columns, judged on rows it never saw.

FOLDER/request.json                  what was asked for; the same command goes on in the same folder
FOLDER/table/{train,valid,test}.csv  the rows, as text
FOLDER/fit.yaml, run/                an ordinary config and its run
FOLDER/predicted.csv                 the test rows with predictions and intervals
FOLDER/fit.json, fit.svg             the comparison, and a picture of it
FOLDER/best                          the checkpoint that it predicts with: the folder serves as a model
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cqwen_dist.checkpoint.manifest import Retention, checkpoint_folder, evaluated
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.data import column_lines
from cqwen_dist.config.errors import Said
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.plot import scatter_plot
from cqwen_dist.generate.table import predict_rows, prompts_of, template_of, write_table
from cqwen_dist.run.files import BEST, appearing, write_atomically, written_whole
from cqwen_dist.tables.baselines import baselines
from cqwen_dist.tables.choices import LONGEST, choose, config_text, measure_pace
from cqwen_dist.tables.rows import Parts, Table, by_length, held_out_rows, read_parts, read_table, split

EMPTY = "unknown"  # what stands for an empty cell
OURS = "CausalQwen"
TOLD = 256  # rows between two lines of progress
DIGITS = 7  # of a prediction: as many as fp32 has
REQUEST, CONFIG = "request.json", "fit.yaml"


@dataclass(frozen=True)
class FitRequest:
    """What `cqwen fit` is asked for.

    template: the prompt, columns in braces; None: a line a column. test_rows: judge by so many at most; None: by all.
    """

    table: str
    target: str
    base: str
    text_columns: list[str]
    template: str | None
    test_fraction: float
    split: str | None
    seed: int
    minutes: float
    test_rows: int | None = None


class Prepared(NamedTuple):
    """The table as the folder holds it, its parts, and every row's prompt."""

    table: Table
    parts: Parts
    prompts: list[str]


def prepare(request: FitRequest, folder: Path, say: Callable[[str], None]) -> Prepared:
    """Read and split the table and write fit.yaml, unless the folder holds both already. Raises `UserError`."""
    asked = folder / REQUEST
    if not asked.is_file():
        if folder.exists():
            raise UserError("--out", str(folder), "a folder that does not exist yet")
        with appearing(folder, "--out") as draft:
            _begin(request, draft, folder, say)
            (draft / REQUEST).write_text(json.dumps(asdict(request), indent=1, ensure_ascii=False), encoding="utf-8")
    elif FitRequest(**json.loads(asked.read_text(encoding="utf-8"))) != request:
        allowed = "a folder that does not exist yet, or one of the very same command, which then goes on"
        raise UserError("--out", str(folder), allowed)
    table, parts = read_parts(folder / "table")
    template = template_of(load_config(folder / CONFIG).data, table.columns) or ""
    return Prepared(table, parts, prompts_of(template, table.columns, table.rows, EMPTY))


def _begin(request: FitRequest, draft: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Choose by table, base and machine; write the parts and the config into `draft`, which becomes `folder`."""
    table = read_table(request.table, request.target, request.text_columns)
    given = None if request.split is None else held_out_rows(request.split, len(table.rows))
    parts = split(len(table.rows), request.seed, request.test_fraction, given, request.test_rows)
    for note in table.notes:
        say(f"note: {note}")
    say(
        f"{len(table.rows):,} rows: {len(parts.train):,} to learn from, {len(parts.valid):,} to watch and recalibrate, "
        f"{len(parts.test):,} to judge by; {len(table.columns)} columns, {len(table.numeric)} of numbers"
    )
    template = request.template or column_lines(table.columns) + f"{table.target}: "
    prompts = prompts_of(template, table.columns, table.rows, EMPTY)
    tokenizer = NumericalAwareTokenizer.from_pretrained(request.base, key="--base")
    lengths, read = np.zeros(len(prompts), np.int64), np.concatenate([parts.train, parts.valid])
    lengths[read] = [len(ids) for ids, *_ in tokenizer.encode_batch([prompts[row] for row in read], strict=True)]
    parts = parts._replace(train=by_length(parts.train, lengths), valid=by_length(parts.valid, lengths))
    tokens = lengths[parts.train]
    say(f"a row is {int(np.median(tokens))} tokens in the median, {tokens.max()} at most")
    if longer := int((tokens + 2 > LONGEST).sum()):
        if longer == len(tokens):
            found = Said(f"only rows of more than {LONGEST:,} tokens")
            raise UserError("FILE", found, "shorter ones (fewer --text-columns)", request.table)
        say(f"note: {longer:,} rows of more than {LONGEST:,} tokens are not trained on (fewer --text-columns shorten)")
    say("timing the base on this machine")
    pace = measure_pace(request.base, min(int(np.median(tokens)), LONGEST))
    choice = choose(table.values()[parts.train], tokens, len(parts.valid), len(parts.test), pace, request.minutes)
    if choice.epochs:
        say(f"{choice.epochs:g} epochs of adapters, about {choice.lora_minutes:.0f} minutes; {pace.precision}")
    else:
        say(f"note: no time for adapters in {request.minutes:g} minutes: heads alone (--minutes gives more)")
    templates = {"prompt": template, "text": f"{{{table.target}}}", "target": table.target}
    text = config_text(folder, request.base, choice, pace, len(parts.train), request.seed, **templates)
    parts.write(draft / "table", table)
    (draft / CONFIG).write_text(text, encoding="utf-8")


def judge(folder: Path, made: Prepared, say: Callable[[str], None]) -> dict[str, Any]:
    """Predict the test rows with the run and with the baselines; write predicted.csv, fit.json, fit.svg."""
    table, parts = made.table, made.parts
    truth = table.values()[parts.test]
    checkpoint = best_checkpoint(folder / "run")
    write_atomically(folder / BEST, f"{checkpoint.relative_to(folder)}\n")
    own = _predict(folder, checkpoint, made, say)
    found = np.array([row["predicted"] for row in own])
    ends = np.array([[row["low_90"], row["high_90"]] for row in own])
    results = {OURS: {**errors(found, truth), **intervals(ends, truth)}}
    learnt = np.sort(np.concatenate([parts.train, parts.valid]))  # they need no rows to watch
    for name, predicted in baselines(table, learnt, parts.test, made.prompts):
        results[name] = errors(predicted, truth)
    examples = [
        {"prompt": made.prompts[row], **new, "truth": float(value)}
        for row, new, value in zip(parts.test[:5], own, truth, strict=False)
    ]
    document = {"target": table.target, "rows": len(truth), "checkpoint": str(checkpoint)}
    document |= {"results": results, "examples": examples}
    write_atomically(folder / "fit.json", json.dumps(document, indent=1, ensure_ascii=False))
    marks = [*zip(truth, found, *ends.T, strict=True)]
    title = f"{table.target}: {len(truth):,} rows it never saw"
    (folder / "fit.svg").write_text(scatter_plot(title, marks, "true", "predicted, with 90 % interval"), "utf-8")
    return document


def best_checkpoint(run: Path) -> Path:
    """The checkpoint of least eval/crps_target on the rows for evaluation; of equals the latest."""
    best = Retention(best=1, metric="eval/crps_target").best_of(evaluated(run))
    return checkpoint_folder(run, best[0]) if best else run


def errors(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """MAE, RMSE, median absolute error, R2 of predictions [n]."""
    error = predicted - truth
    total = float(np.square(truth - truth.mean()).sum())
    return {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt(np.square(error).mean())),
        "mdae": float(np.median(np.abs(error))),
        "r2": 1 - float(np.square(error).sum()) / total if total else float("nan"),
    }


def intervals(ends: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The share of 90 % intervals [n,2] that hold their truth, and their median width."""
    inside = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
    return {"coverage_90": float(inside.mean()), "width_90": float(np.median(ends[:, 1] - ends[:, 0]))}


def _predict(folder: Path, checkpoint: Path, made: Prepared, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The test rows with their new columns (`generate.table.NUMBER_COLUMNS`), as predicted.csv has them."""
    from cqwen_dist.checkpoint.export import load_trained

    model, tokenizer = load_trained(checkpoint, "auto")
    say(f"predicting {len(made.parts.test):,} rows with {checkpoint}, the best on the rows for evaluation")
    rows, prompts = ([of[row] for row in made.parts.test] for of in (made.table.rows, made.prompts))
    found, began = [], time.monotonic()
    for row in predict_rows(model, tokenizer, rows, prompts, batch_size=32, digits=DIGITS, within=0):
        found.append(row)
        if len(found) % TOLD == 0 and (more := len(rows) - len(found)):
            left = (time.monotonic() - began) / len(found) * more
            say(f"  predicted {len(found):,} of {len(rows):,}, {left / 60:.1f} minutes left")
    with written_whole(folder / "predicted.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        write_table(found, file)
    return found
