"""A table as `cqwen fit` sees it: cells as text, which columns hold numbers, and three parts of its rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cqwen_dist.config import UserError
from cqwen_dist.config.data import can_be_named
from cqwen_dist.config.errors import Said
from cqwen_dist.data.cells import any_text, as_number, is_missing
from cqwen_dist.data.numbers import find_numbers
from cqwen_dist.data.recipes import columns_of, records_in
from cqwen_dist.delimited import write_rows as write_csv
from cqwen_dist.generate.table import NUMBER_COLUMNS

LEAST_ROWS = 20
ENOUGH_VALID, MOST_VALID = 200, 400
BLOCK = 256  # rows
Row = dict[str, str]


class Table(NamedTuple):
    """Cells as text, "" where empty; columns: all but the target, in the file's order; numeric: those of numbers."""

    columns: list[str]
    numeric: list[str]
    rows: list[Row]
    target: str
    notes: list[str]  # what was left out, for people
    lost: int = 0  # rows without a target, left out

    def values(self) -> np.ndarray:
        """The target's numbers [n], float64."""
        return np.array([float(row[self.target]) for row in self.rows])


def read_table(source: str, target: str, wanted: Sequence[str] = ()) -> Table:
    """A CSV, Parquet or JSONL table with the columns `wanted` (default: all that a template can name) and a target.

    Rows without a target are left out; a note counts them. Raises `UserError`: no such column, a target that is no
    number or always the same, fewer than `LEAST_ROWS` rows.
    """
    records = records_in(source)
    names = columns_of(records)
    _known("--target", [target], names)
    _known("--text-columns", wanted, names)
    unnamed = [name for name in names if not can_be_named(name)]
    columns = [name for name in dict.fromkeys(wanted or names) if name not in (target, *unnamed)]
    if not columns or target in unnamed:
        allowed = f"{target} and a further column, without {{}}:! in their names"
        raise UserError("FILE", ", ".join(names), allowed, source)
    if taken := {*NUMBER_COLUMNS} & {*columns, target}:
        raise UserError("FILE", f"a column {min(taken)}", "other names than predicted.csv's new columns", source)
    whole = [{name: _as_text(record.get(name)) for name in (*columns, target)} for record in records]
    _refuse_targets(whole, target, source)
    rows = [{**row, target: _as_read(row[target])} for row in whole if row[target]]
    lost = len(whole) - len(rows)
    return Table(columns, _of_numbers(columns, rows), rows, target, _notes(lost, target, unnamed), lost)


def _notes(lost: int, target: str, unnamed: Sequence[str]) -> list[str]:
    rows = [f"{lost:,} rows without a {target} are left out"] if lost else []
    return rows + ([f"columns left out, as a template cannot name them: {', '.join(unnamed)}"] if unnamed else [])


def _refuse_targets(rows: Sequence[Row], target: str, source: str) -> None:
    """Raises `UserError` for targets that are no numbers, too few, or all the same."""
    for number, row in enumerate(rows, 1):
        if row[target] and as_number(row[target]) is None:
            allowed = f"numbers in the column {target}, such as 1234.5"
            raise UserError("--target", row[target], allowed, f"{source}, record {number}")
    found = [as_number(row[target]) for row in rows if row[target]]
    if len(found) < LEAST_ROWS:
        raise UserError("FILE", Said(f"{len(found)} rows with a {target}"), f"{LEAST_ROWS} or more", source)
    if len({*found}) == 1:
        raise UserError(
            "--target", Said(f"{found[0]:g} in every row"), f"a column {target} with different numbers", source
        )


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A CSV file with a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        write_csv(columns, rows, file)


class Parts(NamedTuple):
    """Row numbers of the three parts."""

    train: np.ndarray
    valid: np.ndarray  # watch training and recalibrate intervals
    test: np.ndarray

    def write(self, folder: Path, table: Table) -> None:
        """A CSV of each part, its header first, the target last."""
        folder.mkdir(parents=True)
        for name, chosen in zip(self._fields, self, strict=True):
            write_rows(folder / f"{name}.csv", [*table.columns, table.target], (table.rows[row] for row in chosen))


def read_parts(folder: Path) -> tuple[Table, Parts]:
    """What `Parts.write` wrote: the rows of train, valid and test in this order. Raises `UserError`."""
    rows: list[Row] = []
    ends = [0]
    for name in Parts._fields:
        rows += map(dict, records_in(str(folder / f"{name}.csv")))
        ends.append(len(rows))
    *names, target = rows[0]
    parts = Parts(*(np.arange(start, stop) for start, stop in pairwise(ends)))
    return Table(names, _of_numbers(names, rows), rows, target, []), parts


def split(
    rows: int, seed: int, test_fraction: float, test: Sequence[int] | None = None, most: int | None = None
) -> Parts:
    """Rows drawn by seed. test: the numbers of the test rows, counted from 0, instead of a share of all.

    most: judge by so many test rows at most, also drawn; the other ones belong to no part.
    """
    order = np.random.default_rng(seed).permutation(rows)
    if test is None:
        cut = min(max(round(rows * test_fraction), 2), rows // 2)
        held, rest = order[:cut], order[cut:]
    else:
        chosen = np.isin(order, test)
        held, rest = order[chosen], order[~chosen]
    # A third; of few rows more, for intervals to be worth something: the wide part is fitted to these rows as well
    valid = min(max(round(len(rest) / 3), min(ENOUGH_VALID, round(2 * len(rest) / 3))), MOST_VALID)
    return Parts(np.sort(rest[valid:]), np.sort(rest[:valid]), np.sort(held[:most]))


def by_length(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """rows [m], of each `BLOCK` the longest first: batches in the table's order hold little padding then, and the first
    rows are any rows. lengths [n]: tokens of every row."""
    blocks = np.split(rows, range(BLOCK, len(rows), BLOCK))
    return np.concatenate([block[np.argsort(-lengths[block], kind="stable")] for block in blocks])


def held_out_rows(given: str, rows: int) -> list[int]:
    """The numbers of the test rows, counted from 0, of FILE.json, or of FILE.json#N where it lists several splits.

    Raises `UserError`.
    """
    name, _, number = given.partition("#")
    allowed = f"a JSON list of row numbers from 0 to {rows - 1}, of some and not nearly all; or FILE#N of several lists"
    try:
        found = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
        found = found[int(number)] if number else found
    except (OSError, ValueError, IndexError, TypeError, KeyError) as error:
        raise UserError("--split", Said(f"{given}: {error}"), allowed) from None
    if isinstance(found, dict):
        found = found.get("test")
    right = isinstance(found, list) and all(type(row) is int and 0 <= row < rows for row in found)
    if not right or not 2 <= len(set(found)) <= rows - LEAST_ROWS // 2:
        raise UserError("--split", given, allowed)
    return found


def _of_numbers(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The columns whose cells are numbers or empty, and not all empty."""
    cells = {name: [row[name] for row in rows if row[name]] for name in columns}
    return [name for name, filled in cells.items() if filled and all(as_number(cell) is not None for cell in filled)]


def _as_text(cell: Any) -> str:
    """As a template writes it; nothing where it is empty."""
    return "" if is_missing(cell) else any_text(cell).strip()


def _as_read(number: str) -> str:
    """A numeral that training reads as the same number: 13812345678, as a telephone number, is 13812345678.0."""
    value = float(number)
    return number if [span.value for span in find_numbers(number)] == [value] else repr(value)


def _known(key: str, wanted: Sequence[str], names: list[str]) -> None:
    odd = next((name for name in wanted if name not in names), None)
    if odd is not None:
        raise UserError(key, odd, f"out of {', '.join(names)}")
