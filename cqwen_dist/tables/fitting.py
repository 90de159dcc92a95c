"""`cqwen fit`: trains a model that predicts one table column, and evaluates it on held-out rows.

FOLDER/request.json                  the arguments; the same command continues in the same folder
FOLDER/table/{train,valid,test}.csv  the rows, as text; of a further fold table-1/, ...
FOLDER/fit.yaml, run/                an ordinary config and its run; of a further seed or fold fit-1.yaml, run-1/, ...
FOLDER/predicted.csv                 the test rows with predictions and intervals
FOLDER/fit.json, report.html         the comparison with baselines, and a page of it and the run
FOLDER/best                          the checkpoint for predictions, so the folder works as a model
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from cqwen_dist.checkpoint.manifest import Retention, checkpoint_folder, evaluated
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import Config, UserError, load_config
from cqwen_dist.config.data import column_lines
from cqwen_dist.config.errors import Said
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.columns import given_forms
from cqwen_dist.data.number_forms import by_form
from cqwen_dist.data.records import Extractor
from cqwen_dist.data.text_files import write_table
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.prediction.learnt_table import learnt_table, shared_digits
from cqwen_dist.prediction.table import predict_rows, prompts_of
from cqwen_dist.run.files import BEST, FIT, START, appearing, file_record, not_followed, write_atomically, written_whole
from cqwen_dist.tables.baselines import Rival, baselines, over_folds
from cqwen_dist.tables.choices import LEAST_READ, LONGEST, config_text, context_of, fit_files, in_time, measure_pace
from cqwen_dist.tables.fit_request import FitRequest
from cqwen_dist.tables.judging import OURS, cells_of, conditional, errors, intervals, over_runs, shown_rows, verdict
from cqwen_dist.tables.rows import WHY, Parts, Table, by_length, drawn_parts, read_parts, read_table, repeats
from cqwen_dist.training.callbacks import Callback, Moment

EMPTY = "unknown"  # replaces an empty cell
TOLD = 256  # rows between two progress lines
LONG = 3.0  # minutes in which all rows are surely read
DIGITS = 7  # digits of a prediction after those common to all targets: the precision of fp32
REQUEST = "request.json"
OF_FILE = "file"  # key in request.json for the size and SHA-256 of the table


@dataclass(frozen=True)
class TimeLimit(Callback):
    """The clock of one command, for all its phases. minutes: from `began`, in the unit of time.monotonic()."""

    minutes: float
    began: float

    def left(self) -> float:
        """Minutes that are left."""
        return self.minutes - (time.monotonic() - self.began) / 60

    def on_step(self, at: Moment, metrics: Mapping[str, Any]) -> None:
        """Stop the training in time for the predictions."""
        if self.left() < 0.05 * self.minutes + min(1.0, 0.3 * self.minutes):
            at.stop(f"training stops at step {at.step} of {at.total_steps} to keep to --minutes {self.minutes:g}")


class Prepared(NamedTuple):
    """A table in the folder, the parts, the prompt for every row as training reads it, the config, and the run."""

    table: Table
    parts: Parts
    prompts: list[str]
    config: Config
    run: Path

    @property
    def by_log(self) -> bool:
        """Whether logarithms of the target are learnt."""
        return self.config.loss.target_transform == "standardise_log"


@contextmanager
def only_fit(folder: Path) -> Iterator[None]:
    """Holds the name of a fit's folder, which need not exist yet. Raises `UserError` if another process has it."""
    whole = folder.resolve()  # "." has no name
    whole.parent.mkdir(parents=True, exist_ok=True)
    path = whole.parent / f".{whole.name}.lock"
    with open(path, "w", encoding="utf-8", opener=not_followed) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = Said(f"another cqwen fit at work on {folder}")
            raise UserError("--out", found, "its end, or another folder") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def prepare(
    request: FitRequest, folder: Path, say: Callable[[str], None], clock: TimeLimit | None = None
) -> list[Prepared]:
    """Read and split the table and write fit.yaml, unless the folder already has them; one of each seed or fold. Raises
    `UserError`."""
    asked, file = folder / REQUEST, Path(request.table).expanduser()
    now = file_record(file) if file.is_file() else None
    if not asked.is_file():
        if folder.exists():
            raise UserError("--out", str(folder), "a folder that does not exist yet")
        with appearing(folder, "--out") as draft:
            _begin(request, draft, folder, say, clock or TimeLimit(request.minutes, time.monotonic()))
            held = {**asdict(request), OF_FILE: now}
            (draft / REQUEST).write_text(json.dumps(held, indent=1, ensure_ascii=False), encoding="utf-8")
    else:
        earlier, before = request_of(folder)
        if earlier != request:
            allowed = "a folder that does not exist yet, or one of the same command, which then continues"
            raise UserError("--out", str(folder), allowed)
        if None not in (before, now) and before != now:
            found = Said(f"a fit of {file.name} as it was before")
            raise UserError("--out", found, f"the same table, or a folder that does not exist yet, not {folder}")
    made = []
    for files in fit_files(folder, request):
        config = load_config(files.config)
        table, parts = read_parts(files.table, given_forms(config.data) or {})
        extract = Extractor(config.data, Chat(), table.forms)
        prompts = ["".join(extract.before(row)) for row in table.written]
        made.append(Prepared(table, parts, prompts, config, files.run))
    return made


def request_of(folder: Path) -> tuple[FitRequest, dict[str, Any] | None]:
    """(the request in a fit folder, the size and digest of the table if recorded)."""
    held = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    of_file = held.pop(OF_FILE, None)
    known = {name: value for name, value in held.items() if name in FitRequest.__dataclass_fields__}  # of today
    return FitRequest(**known), of_file


def _begin(request: FitRequest, draft: Path, folder: Path, say: Callable[[str], None], clock: TimeLimit) -> None:
    """Choose the settings, and write the parts and the config into `draft`, which is later renamed to `folder`."""
    template = request.template or ""
    table = read_table(request.table, request.target, request.text_columns, request.decimal_comma, template)
    splits = drawn_parts(request, table)
    for note in (*table.notes, *repeats(table.equal(), splits[0])):
        say(f"note: {note}")
    counts = ", ".join(f"{len(part):,} {why}" for part, why in zip(splits[0], WHY, strict=True))
    say(f"{len(table.rows):,} rows: {counts}; {len(table.columns)} columns, {len(table.numeric)} of numbers")
    if request.folds > 1:
        say(f"{request.folds} such folds: each row is judged once, by a run that has not learnt from it")
    template = request.template or column_lines(table.columns) + f"{table.target}: "
    prompts = prompts_of(template, table.columns, table.rows, EMPTY)
    tokenizer = NumericalAwareTokenizer.from_pretrained(request.base, key="--base")
    lengths, read = np.zeros(len(prompts), np.int64), np.unique(np.concatenate([row for of in splits for row in of]))
    lengths[read] = [len(ids) for ids, _ in tokenizer.encode_batch([prompts[row] for row in read])]
    templates: dict[str, Any] = {"prompt": template, "text": f"{{{table.target}}}", "target": table.target}
    templates |= {"numbers": by_form(table.forms), "empty": EMPTY}
    context = context_of(request.base)
    longest = min(LONGEST, context)
    say("timing the base on this machine")
    pace = measure_pace(request.base, min(int(np.median(lengths[splits[0].train])), longest), 3 * request.minutes)
    for i, files in enumerate(fit_files(folder, request)):
        if i < len(splits):  # else another seed on the same rows
            tell = say if i == 0 else (lambda line: None)
            parts = _readable(splits[i], lengths, context, longest, request.table, tell)
            parts, choice = in_time(request, parts, table.values(), lengths, longest, pace, tell, clock.left())
            parts.write(draft / files.table.name, table)
        text = config_text(files, request.base, choice, pace, len(parts.train), request.seed + i, **templates)
        (draft / files.config.name).write_text(text, encoding="utf-8")


def _readable(
    parts: Parts, lengths: np.ndarray, context: int, longest: int, source: str, say: Callable[[str], None]
) -> Parts:
    """The parts sorted by length, without test rows that the base cannot read. Raises `UserError`."""
    judged = parts.test[lengths[parts.test] < context]  # `<`: the number needs a position too
    if unread := len(parts.test) - len(judged):
        say(f"note: {unread:,} rows of {context:,} tokens or more, all that the base reads, are not judged")
    parts = Parts(by_length(parts.train, lengths), by_length(parts.valid, lengths), judged)
    tokens = lengths[parts.train]
    say(f"a row is {int(np.median(tokens))} tokens in the median, {tokens.max()} at most")
    if (longer := int((tokens + 2 > longest).sum())) == len(tokens) or not len(judged):
        found = Said(f"only rows of more than {longest:,} tokens{' to judge by' * (longer < len(tokens))}")
        raise UserError("FILE", found, "shorter ones (fewer --text-columns)", source)
    if longer:
        say(f"note: {longer:,} rows of more than {longest:,} tokens are not trained on (fewer --text-columns shorten)")
    return parts


class Judged(NamedTuple):
    """The test rows of one split: predicted by the run, and by each other model with what it was fitted to."""

    own: list[dict[str, Any]]
    others: list[Rival]
    prompts: list[str]
    truth: np.ndarray


def judge(
    folder: Path, folds: Sequence[Prepared], request: FitRequest, say: Callable[[str], None], clock: TimeLimit
) -> dict[str, Any]:
    """Predict the test rows with the runs and the other models, and write predicted.csv and fit.json.

    The rows of all folds are judged as one table. With several seeds, the first run is judged, and the errors of the
    others are shown beside it.
    """
    first = folds[0]
    checkpoint = best_checkpoint(first.run)
    write_atomically(folder / BEST, f"{checkpoint.relative_to(folder)}\n")
    judged = [_judged(fold, say, clock) for fold in (folds if request.folds > 1 else folds[:1])]
    own = [row for fold in judged for row in fold.own]
    with written_whole(folder / "predicted.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        write_table(own, file)
    truth = np.concatenate([fold.truth for fold in judged])
    predictions = {OURS: numbers_of(own, "predicted")}
    ends = np.stack([numbers_of(own, "low_90"), numbers_of(own, "high_90")], 1)
    results: dict[str, dict[str, Any]] = {OURS: {**errors(predictions[OURS], truth), **intervals(ends, truth)}}
    for name, predicted, fitted_to in over_folds([fold.others for fold in judged]):
        predictions[name] = predicted
        results[name] = {**errors(predicted, truth), "fitted_to": fitted_to}
    document = {"target": first.table.target, "rows": len(truth), "checkpoint": str(checkpoint), "by_log": first.by_log}
    document |= {"results": results, **verdict(predictions, truth)}
    if len(judged) > 1:
        document["folds"] = over_runs([(numbers_of(fold.own, "predicted"), fold.truth) for fold in judged])
    elif len(folds) > 1:
        seeds = [predictions[OURS], *(numbers_of(_predict(seed, say, clock), "predicted") for seed in folds[1:])]
        document["seeds"] = over_runs([(found, truth) for found in seeds])
    law = json.loads((first.run / START).read_text(encoding="utf-8"))["calibration"].get("law")
    document["verdict"] = f"{document['verdict']} Law of the numbers: {law}."
    prompts = [prompt for fold in judged for prompt in fold.prompts]
    cells = cells_of(own, {*first.table.columns} - {*first.table.numeric})
    document |= shown_rows(own, prompts, truth) | conditional(predictions, ends, truth, prompts, cells)
    write_atomically(folder / FIT, to_json(document, indent=1, inf_nan_mode="null").decode())
    return document


def numbers_of(rows: Sequence[Mapping[str, Any]], column: str) -> np.ndarray:
    """A column of the predicted rows [n]."""
    return np.array([row[column] for row in rows])


def _judged(made: Prepared, say: Callable[[str], None], clock: TimeLimit) -> Judged:
    own = _predict(made, say, clock)
    parts = made.parts._replace(test=made.parts.test[: len(own)])
    say("fitting the models to compare with")
    others = [*baselines(made.table, parts.learnt, parts.test, made.prompts, made.by_log)]
    return Judged(own, others, [made.prompts[row] for row in parts.test], made.table.values()[parts.test])


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the lowest eval/crps_target on the validation rows; the latest of equal ones."""
    best = Retention(best=1, metric="eval/crps_target").best_of(evaluated(run))
    return checkpoint_folder(run, best[0]) if best else run


def _predict(made: Prepared, say: Callable[[str], None], clock: TimeLimit) -> list[dict[str, Any]]:
    """The test rows with the columns `prediction.table.NUMBER_COLUMNS`, and `outside`."""
    checkpoint = best_checkpoint(made.run)
    model, tokenizer = load_trained(checkpoint, "auto")
    start = ": the closed form, no step improved it" * (checkpoint.name == checkpoint_folder(checkpoint, 0).name)
    say(f"predicting {len(made.parts.test):,} rows with {checkpoint}, the best on the rows for evaluation{start}")
    table = made.table
    rows, prompts, cells = ([of[row] for row in made.parts.test] for of in (table.written, made.prompts, table.rows))
    learnt = learnt_table(checkpoint)
    known = None if learnt is None else learnt.known()
    settings: dict[str, Any] = {"within": 0, "known": known, "cells": cells}
    low, middle, high = np.quantile(table.values(), [0.25, 0.5, 0.75])
    digits = DIGITS + shared_digits(abs(middle), high - low)
    found, began = [], time.monotonic()
    size = 32 if clock.left() > LONG else 4  # `predict_rows` reads some batches at a time
    for row in predict_rows(model, tokenizer, rows, prompts, batch_size=size, digits=min(digits, 17), **settings):
        found.append(row)
        if len(found) >= LEAST_READ and len(found) < len(rows) and clock.left() < 0.04 * clock.minutes:
            say(f"note: judged by the first {len(found):,} of {len(rows):,} rows, to keep to --minutes")
            break
        if len(found) % TOLD == 0 and (more := len(rows) - len(found)):
            left = (time.monotonic() - began) / len(found) * more
            say(f"  predicted {len(found):,} of {len(rows):,}, {left / 60:.1f} minutes left")
    return found
