"""A table in, predictions out: each row becomes a prompt, and the number that comes next goes into new columns."""

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cqwen_dist.config.data import filled, unescaped
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.cells import MISSING, cell_text, is_empty
from cqwen_dist.data.columns import columns_of, forms_in
from cqwen_dist.data.encoder import SURROGATE
from cqwen_dist.data.from_memory import as_rows
from cqwen_dist.data.number_forms import Form
from cqwen_dist.data.recipes import placed_records
from cqwen_dist.generate.continuation import Prompt, encoded, generate_batch
from cqwen_dist.generate.decisions import choose
from cqwen_dist.generate.numbers import Digits, check_digits
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.prediction.learnt_table import LEAST_DIGITS, OUTSIDE, LearntRange, rounded_ends

Unread = dict[int, UserError]  # why a row, counted from 0, has no prediction

NUMBER_COLUMNS = ("predicted", *(f"{end}_{level * 100:g}" for level in LEVELS for end in ("low", "high")), "p_num")
CHOICE = "chosen"
DOUBTFUL = "doubtful"  # key of a row whose value is left out
SORTED = 8  # batches


@contextmanager
def placed_table(rows: Any, say: Callable[[str], None]) -> Iterator[tuple[list[dict[str, Any]], Unread]]:
    """The rows of a table (a file, a DataFrame, or records), and a dict for why a row has no prediction; at the end
    `say` gets their number.

    A field that a record lacks is None. An error inside has the row's place, such as `file:line`, or the table's name,
    instead of FILE. Raises `UserError`.
    """
    is_file = isinstance(rows, (str, Path))
    if is_file:
        placed: list[tuple[str, Any]] = placed_records(str(rows))
    else:
        placed = [(f"row {number}", row) for number, row in enumerate(as_rows(rows, "rows"), 1)]
    for where, row in placed:
        if not isinstance(row, Mapping):
            raise UserError("rows", row, "a dict, cell by column", where)
    columns = columns_of([row for _, row in placed])
    placed = [(where, {name: row.get(name) for name in columns}) for where, row in placed]
    table = [row for _, row in placed]
    unread: Unread = {}

    def with_place(error: UserError) -> UserError:
        if error.key != "FILE":
            return error
        name = str(rows) if is_file else "rows"
        row = next((row for row, one in unread.items() if one is error), None)
        return UserError(name if row is None else placed[row][0], error.found, error.allowed)

    try:
        yield table, unread
    except UserError as error:
        raise with_place(error) from None
    if unread:
        say(f"{len(unread):,} of {len(table):,} rows have no prediction, such as {with_place(unread[min(unread)])}")


def cells_given(
    table: Sequence[Mapping[str, Any]], source: str, template: str, comma: bool | None
) -> Iterator[dict[str, Any]]:
    """The cells for the user's template: they stay as they are, but in CSV 3,5 would be two numbers."""
    named = [name for name in (table[0] if source.endswith((".csv", ".tsv")) else ()) if f"{{{name}}}" in template]
    forms = {name: form for name, form in forms_in(table, source, None, comma, named).items() if form == Form(",")}

    return ({n: (n in forms and cell and forms[n].read(cell)) or cell for n, cell in row.items()} for row in table)


def prompts_of(
    template: str,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    empty: str | None = None,
    unread: Unread | None = None,
) -> list[str]:
    """The template, such as "age {age}, bmi {bmi}: score", filled with the cells of each row; None is an empty cell.

    empty: the text for an empty cell or a word for it (`MISSING`), as data.empty_cell in training. unread: gets the
    error of each row that has no prompt; without it, the first is raised. Raises `UserError` for a name that is no
    column, a template without columns, and an empty cell without `empty`.
    """
    template = unescaped(template)
    _check_template(template, columns)
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            prompt = filled(template, partial(_cell, row, number, empty))
            if (wrong := SURROGATE.search(prompt)) is not None:
                raise UserError("FILE", wrong[0], "Unicode text without lone surrogates", f"record {number}")
        except UserError as error:
            if unread is None:
                raise
            unread[number - 1], prompt = error, ""
        prompts.append(prompt)
    return prompts


def _check_template(template: str, columns: Sequence[str]) -> None:
    """Raises `UserError` if it is no text with columns in braces."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError("--template", template, f"text with columns in braces ({error})") from None
    names = [name for _, name, _, _ in parts if name is not None]
    odd = next((name for name in names if name not in columns), None)
    if odd is not None or not names or any(how or kind for _, _, how, kind in parts):
        allowed = f"only columns in braces there, out of {', '.join(columns)}"
        raise UserError("--template", odd or template, allowed)


def _cell(row: Mapping[str, Any], number: int, empty: str | None, name: str) -> str:
    cell = row[name]
    text = "" if is_empty(cell) else cell if isinstance(cell, str) else cell_text(cell)
    if text is None:
        raise UserError("FILE", cell, "text, numbers, true or false, dates", f"record {number}")
    if empty is not None and text.strip() in MISSING:
        return empty
    if not text:
        found = Said(f"an empty cell in the column {name}")
        raise UserError("FILE", found, "something there, or --empty TEXT to put in its place", f"record {number}")
    return text


def predict_numbers(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 16,
    digits: Digits = "auto",
    within: int = 8,
    abstain: float | None = None,
) -> Iterator[dict[str, float | str | None]]:
    """The first number that the model writes after each prompt (mode standard), as `number_columns`.

    The columns are loc_Y, its intervals (recalibrated if the model has the factors) and P(<NUM>) at its position. The
    number has to come in the first `within` tokens, since a model may write a blank or words first. Without a number
    all are None, except p_num: the largest P(<NUM>) of these tokens. within 0: it is the Y of the prompt's end,
    whatever words are likelier there. abstain: the share of held-out numbers of which a number has to be one of the
    surest (`Settings.abstain`); for a less sure one there is the key `DOUBTFUL` too. model: a `CausalQwenForCausalLM`.
    digits: of the predicted value ("auto": what
    its 50 % interval leaves), and of the ends if these are more than `LEAST_DIGITS`. Some `SORTED` batches at a time
    are sorted by length, as padding costs as much as text. Raises `UserError`.
    """
    check_digits(digits)
    for name, value, least in (("--batch-size", batch_size, 1), ("--within", within, 0)):
        if value < least:
            raise UserError(name, value, f"{least} or more")
    of_ends = LEAST_DIGITS if digits == "auto" else max(digits, LEAST_DIGITS)
    options: dict[str, Any] = {"mode": "standard", "watch": [lambda ids, numbers: numbers.generated[:, -1]]}
    options |= {"max_new_tokens": max(within, 1), "number_first": not within, "abstain": abstain}
    for first in range(0, len(prompts), SORTED * batch_size):
        some = prompts[first : first + SORTED * batch_size]
        order = sorted(range(len(some)), key=lambda row: len("".join(some[row])))
        found: dict[int, dict[str, float | str | None]] = {}
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            _, numbers, width = generate_batch(model, tokenizer, [some[row] for row in rows], **options)
            for place, row in enumerate(rows):
                at = int(numbers.generated[place].int().argmax())
                record = numbers.record(place, at, digits)
                if record is None:
                    seen = float(numbers.p_num[place, width:].nan_to_num(0.0).max())
                    found[row] = {**dict.fromkeys(NUMBER_COLUMNS), "p_num": float(f"{seen:.6g}")}
                    continue
                ends = (record.intervals[f"{level:g}"] for level in LEVELS)
                cells = record.written, *rounded_ends(ends, of_ends), float(f"{record.p_num:.6g}")
                found[row] = dict(zip(NUMBER_COLUMNS, cells, strict=True))
                found[row] |= {DOUBTFUL: 1.0} if bool(numbers.abstained[place, at]) else {}
        yield from (found[row] for row in range(len(some)))


def predict_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    *,
    options: Sequence[str] = (),
    reject_below: float = 0.0,
    unread: Unread | None = None,
    known: LearntRange | None = None,
    cells: Sequence[Mapping[str, str]] = (),
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """The rows with their new columns. prompts, unread: of `prompts_of`; an unread row's new cells are None.

    known: training ranges; numbers are limited to them and marked (`LearntRange.held`). cells: the rows' cells as
    training reads them; given together with `known`.

    options: choose one of these texts for each row instead (columns `p OPTION` and `chosen`, which is None if no option
    reaches reject_below). settings: of `predict_numbers`; a doubtful row has intervals and no value. Raises
    `UserError`, also if the table already has one of the new columns.
    """
    marked = [] if known is None else [OUTSIDE]
    added = [CHOICE, *(f"p {option}" for option in options)] if options else [*NUMBER_COLUMNS, *marked]
    check_new(rows, added)
    without = without_prediction(model, tokenizer, prompts, options, unread)
    kept = sorted({*range(len(rows))} - {*without})
    prompts = [prompts[row] for row in kept]
    found: Iterator[dict[str, Any]]
    if options:
        chosen = choose(model, tokenizer, prompts, options, reject_below)
        found = ({CHOICE: c.option, **{f"p {o}": float(f"{p:.6g}") for o, p in c.p.items()}} for c in chosen)
    else:
        found = predict_numbers(model, tokenizer, prompts, **settings)
        if known is not None:
            hold = partial(known.held, unit=model.model.action.number_head.target)
            found = map(hold, (cells[row] for row in kept), found)
        # A doubtful row has no value
        found = ({**row, "predicted": None} if row.pop(DOUBTFUL, None) else row for row in found)
    none = dict.fromkeys(added)
    return ({**row, **(none if number in without else next(found))} for number, row in enumerate(rows))


def check_new(rows: Sequence[Mapping[str, Any]], added: Sequence[str]) -> None:
    """Raises `UserError` if the table has one of the new columns."""
    if taken := next(filter(rows[0].__contains__, added), "") if rows else "":
        raise UserError("FILE", f"a column {taken}", "other names than the new columns'")


def without_prediction(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: Sequence[str], unread: Unread | None
) -> Unread:
    """`unread` with the rows that the model cannot read. Raises `UserError`: the first, without `unread` or with no row
    left."""
    words, found = reader(tokenizer), {} if unread is None else unread
    after = max((len(words.encode(option, begin=False)[0]) for option in options), default=1)
    room = model.config.base_config.max_position_embeddings - after
    for row, prompt in enumerate(prompts):
        if row in found:
            continue
        where = f"record {row + 1}"
        try:
            if not 0 < (length := len(encoded(words, prompt)[0])) <= room:
                allowed = f"1 to {room}: what comes next has a place in the model's context too"
                found[row] = UserError("FILE", f"{length} tokens", allowed, where)
        except UserError as error:
            found[row] = UserError("FILE", error.found, error.allowed, where)
        if unread is None and row in found:
            raise found[row]
    if found and len(found) == len(prompts):
        raise next(iter(found.values()))
    return found
