"""The functions of `from cqwen_dist import train, evaluate, predict, counterfactual, load`; `cqwen` calls them too.

A mistake that the user can correct is a one-line `UserError`. Only `train` imports modules for training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.reading import given_config
from cqwen_dist.config.schema import Config
from cqwen_dist.config.training import Stage
from cqwen_dist.parallel.collectives import Stopped
from cqwen_dist.training.callbacks import Callback, CallbackError, Moment, TrainResult

if TYPE_CHECKING:
    from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
    from cqwen_dist.generate.facts import NumberFact, WordFact
    from cqwen_dist.generate.numbers import Digits
    from cqwen_dist.generate.streaming import Tokenizer
    from cqwen_dist.model import CausalQwenForCausalLM
    from cqwen_dist.prediction.learnt_table import LearntTable
    from cqwen_dist.prediction.table import Prompt

__all__ = ["Callback", "CallbackError", "Config", "Moment", "Stage", "Stopped", "TrainResult", "UserError"]
__all__ += ["counterfactual", "counterfactual_rows", "evaluate", "load", "predict", "train"]

DATA = "data"  # subfolder of the run folder for rows from memory


@overload
def train(
    config: Config | Mapping[str, Any] | str | Path,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    callbacks: Sequence[Callback] = (),
    overrides: Mapping[str, Any] | None = None,
) -> TrainResult: ...


@overload
def train(
    config: list[Any], *, callbacks: Sequence[Callback] = (), overrides: Mapping[str, Any] | None = None
) -> list[TrainResult]: ...


def train(
    config: Any,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    callbacks: Sequence[Callback] = (),
    overrides: Mapping[str, Any] | None = None,
) -> TrainResult | list[TrainResult]:
    """Train or resume a run, like `cqwen train`: in this process, or as one of a launcher's ranks.

    config: a YAML file's path, a dict, or a `Config`; a dict may contain `Stage` and other sections from
    `cqwen_dist.config`. A list of these: runs that train in turns on one base; a result for each, also for one that
    failed (status "fatal"), without rows in memory. overrides: values by dotted key, such as {"train.seed": 1}.
    train_dataset, eval_dataset: replace data.train and data.eval with a source (a path, hf:NAME) or with rows in
    memory: a `datasets.Dataset`, a DataFrame, any iterable of records or texts. Rank 0 writes its rows to
    DIR/data/*.jsonl (other ranks' rows are ignored), so that `cqwen train DIR/config.yaml` can resume with them too.
    callbacks: called only on rank 0, of a list of runs by each (`Moment.folder`).

    Raises `UserError` for wrong input, `CallbackError` if a callback fails, and `Stopped` (not an `Exception`) if a
    signal such as Ctrl-C stopped the run. A stopped run is saved, and the same call resumes it.
    """
    from cqwen_dist.console import quiet_libraries

    given = {"data.train": train_dataset, "data.eval": eval_dataset}
    _refuse_odd(config, given, callbacks, overrides)
    quiet_libraries()
    if isinstance(config, list):
        from cqwen_dist.training.together import train_together

        configs = [given_config(each, overrides or {}) for each in config]
        with _leaving_pages(*(Path(each.run.dir) for each in configs)):
            return train_together(configs, callbacks=callbacks)
    named = {key: str(rows) for key, rows in given.items() if isinstance(rows, (str, Path))}
    held = {key: rows for key, rows in given.items() if rows is not None and key not in named}
    overrides = {**(overrides or {}), **named}
    if held:  # resolve the run folder first, with placeholders for the rows
        anywhere = given_config(config, {**overrides, **dict.fromkeys(held, "memory.jsonl")})
        folder = Path(anywhere.run.dir) / DATA
        overrides |= {key: str(folder / f"{key.removeprefix('data.')}.jsonl") for key in held}
    checked = given_config(config, overrides)

    def write_inputs() -> None:
        from cqwen_dist.checkpoint.resume import KEYS
        from cqwen_dist.data.from_memory import write_records
        from cqwen_dist.run.folder import has_begun

        accepted = {KEYS[name] for name in checked.run.accept}
        for key, rows in held.items():
            # A resumed run must train on the same rows, unless run.accept names them.
            keep = has_begun(Path(checked.run.dir)) and key not in accepted
            write_records(rows, Path(overrides[key]), key, checked.data.text_field, keep)

    from cqwen_dist.training.train import train as run

    with _leaving_pages(Path(checked.run.dir)):
        return run(checked, callbacks, write_inputs)


def _refuse_odd(config: Any, given: Mapping[str, Any], callbacks: Any, overrides: Any) -> None:
    if not isinstance(callbacks, Sequence):  # an iterator would be at its end after this check
        raise UserError("callbacks", callbacks, "a list")
    if not isinstance(overrides, (Mapping, type(None))):
        raise UserError("overrides", overrides, 'a dict by key, such as {"train.seed": 1}')
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks.{i}", callback, "an object of a class that extends cqwen_dist.Callback")
    for key, rows in given.items():
        if isinstance(config, list) and rows is not None:
            raise UserError(key, Said(f"with {len(config)} runs in one job"), "one run")


@contextmanager
def _leaving_pages(*folders: Path) -> Iterator[None]:
    """Write each run's HTML page at the end, if its wing is installed. After wrong input nothing was trained."""
    from cqwen_dist.wings import from_wing

    try:
        yield
    except UserError:
        folders = ()
        raise
    finally:
        with suppress(UserError):
            for folder in folders:
                from_wing("a run's page")(folder)


def load(model: TrainResult | str | Path, device: str = "auto") -> tuple[CausalQwenForCausalLM, CausalQwenTokenizer]:
    """Load model and tokenizer from a run, a checkpoint or an exported folder, with Hugging Face's interfaces.

    device: "cpu", "cuda", "cuda:1", ... or "auto". Raises `UserError`.
    """
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer

    found, tokenizer = load_trained(_folder(model), device)
    return found, CausalQwenTokenizer.of(tokenizer)


def evaluate(
    model: TrainResult | str | Path,
    data: Any = None,
    *,
    base: str | None = None,
    label_set: float | None = None,
    micro_batch_size: int = 8,
) -> dict[str, float]:
    """Held-out metrics of a run, a checkpoint or an exported folder and its base, like `cqwen eval`.

    Runs in this process; with multiple ranks, call it on one. data: a source, or rows as for `train`; None: the run's
    held-out texts. base: a model to compare with. label_set: also measure the sets of all
    words with a larger P. Raises `UserError`.
    """
    from cqwen_dist.training.evaluation.evaluate_checkpoint import evaluate_checkpoint

    if label_set is not None and not 0 < label_set < 1:
        raise UserError("--label-set", label_set, "a probability between 0 and 1")
    folder = _folder(model)
    with TemporaryDirectory() as folder_of_rows:
        if not isinstance(data, (str, Path, type(None))):
            from cqwen_dist.data.from_memory import write_records
            from cqwen_dist.prediction.learnt_table import learnt_table

            read, path = learnt_table(folder), Path(folder_of_rows) / "rows.jsonl"
            write_records(data, path, "data", "text" if read is None else read.data.text_field)
            data = path
        source = None if data is None else str(data)
        return evaluate_checkpoint(folder, source, micro_batch_size, base=base, label_set=label_set)


def predict(
    model: TrainResult | str | Path | tuple[CausalQwenForCausalLM, Tokenizer],
    rows: Any,
    template: str | None = None,
    *,
    options: Sequence[str] = (),
    reject_below: float = 0.0,
    digits: Digits = "auto",
    within: int | None = None,
    abstain: float | None = None,
    empty: str | None = None,
    decimal_comma: bool | None = None,
    batch_size: int = 16,
    device: str = "auto",
    say: Callable[[str], None] = warnings.warn,
) -> list[dict[str, Any]]:
    """Predict the next number for each row of a table, like `cqwen predict`.

    Returns the rows with new columns `predicted`, `low_50` to `high_95` and `p_num`
    (`prediction.table.NUMBER_COLUMNS`); None if the model writes no number. With the run's prompt there is also
    `outside`, the columns that are far outside of what was learnt (`LearntRange.held`). model: a folder, or
    the result of `load`. rows: a CSV, Parquet or JSONL file, a DataFrame, or a list of dicts. template: prompt for a
    row, with columns in braces; None: the run's prompt, with its data.empty_cell and its forms of numbers; `say` then
    gets how the columns differ from training. options: choose one of these texts instead (columns `chosen`,
    `p OPTION`). A row that cannot be read (an empty cell, more text than the context) has None in all new columns;
    `say` gets their count. For the other arguments see `cqwen predict --help`. Raises `UserError`; for a wrong
    template, or columns that cannot be read as in training, before the model is loaded.
    """
    named: dict[str, Any] = {"options": options, "reject_below": reject_below, "batch_size": batch_size}
    named |= {"digits": digits, "within": within, "abstain": abstain}
    return list(predicted_rows(model, rows, template, empty, decimal_comma, device, say, **named))


def predicted_rows(
    model: TrainResult | str | Path | tuple[CausalQwenForCausalLM, Tokenizer],
    rows: Any,
    template: str | None,
    empty: str | None,
    decimal_comma: bool | None,
    device: str,
    say: Callable[[str], None],
    *,
    within: int | None,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """`predict`, batch by batch as the rows are taken. The same arguments; settings: of `predict_rows`."""
    from cqwen_dist.prediction.table import cells_given, placed_table, predict_rows, prompts_of

    if within is None:
        within = 0 if template is None else 8
    known, cells = None, list[Any]()
    prompts: Sequence[Prompt]
    with placed_table(rows, say) as (table, unread):
        if not table:
            return iter(())
        if template is None:
            learnt = _learnt_table(model)
            known = learnt.known()
            prompts, cells = learnt.prompts(table, learnt.extractor(empty, decimal_comma), unread, say)
        else:
            source = str(rows) if isinstance(rows, (str, Path)) else "rows"
            given = cells_given(table, source, template, decimal_comma)
            prompts = prompts_of(template, list(table[0]), given, empty, unread)
        found, tokenizer = _pair(model, device)
        settings |= {"unread": unread, "known": known, "cells": cells, "within": within}
        return predict_rows(found, tokenizer, table, prompts, **settings)


def counterfactual(
    model: TrainResult | str | Path | tuple[CausalQwenForCausalLM, Tokenizer],
    fact: str,
    observed: float | str,
    what_if: str,
    *,
    seed: int = 0,
    device: str = "auto",
) -> NumberFact | WordFact:
    """`generate.facts.counterfactual`, like `cqwen counterfactual`. model: as for `predict`. Raises `UserError`."""
    from cqwen_dist.generate.facts import counterfactual as ask

    return ask(*_pair(model, device), fact, observed, what_if, seed)


def counterfactual_rows(
    model: TrainResult | str | Path | tuple[CausalQwenForCausalLM, Tokenizer],
    rows: Any,
    change: Mapping[str, Any],
    *,
    device: str = "auto",
    say: Callable[[str], None] = warnings.warn,
) -> list[dict[str, Any]]:
    """The rows under a change (cells by column), given the outcome in the run's target column, like `cqwen
    counterfactual --set`: with the new cells, and `prediction.changed_table.FACT_COLUMNS`.

    model, rows, say: as for `predict` with the run's own prompt. A row that cannot be read, or in which nothing was
    observed, has None in all new columns. Raises `UserError`.
    """
    from cqwen_dist.prediction.changed_table import changed_rows
    from cqwen_dist.prediction.table import placed_table

    with placed_table(rows, say) as (table, unread):
        learnt = _learnt_table(model)
        return list(changed_rows(*_pair(model, device), table, learnt, change, say, unread))


def _pair(model: Any, device: str) -> tuple[CausalQwenForCausalLM, Tokenizer]:
    from cqwen_dist.checkpoint.trained import load_trained

    return model if isinstance(model, tuple) else load_trained(_folder(model), device)


def _learnt_table(model: Any) -> LearntTable:
    """How the run read a row. Raises `UserError`."""
    from cqwen_dist.prediction.learnt_table import learnt_table

    found = None if isinstance(model, tuple) else learnt_table(_folder(model))
    if found is None or found.data.target_field is None:
        allowed = "the prompt of a row; only a run with data.target_field, or its export, knows its own"
        raise UserError("--template", "none", allowed)
    return found


def _folder(model: TrainResult | str | Path) -> Path:
    if isinstance(model, tuple):
        raise UserError("model", Said("a loaded model"), "a TrainResult, or a folder")
    return model.folder if isinstance(model, TrainResult) else Path(model)
