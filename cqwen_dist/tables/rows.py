"""The table in `cqwen fit`: cells as text, the numeric columns, and the split into three parts."""

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
    """A table with cells as text, "" if empty. columns: all except the target, in file order. numeric: with numbers."""

    columns: list[str]
    numeric: list[str]
    rows: list[Row]
    target: str
    notes: list[str]  # messages about skipped data
    lost: int = 0  # skipped rows without a target

    def values(self) -> np.ndarray:
        """The target values [n], float64."""
        return np.array([float(row[self.target]) for row in self.rows])


def read_table(source: str, target: str, wanted: Sequence[str] = ()) -> Table:
    """Reads the columns `wanted` (default: all that a template can name) and a target from CSV, Parquet or JSONL.

    Rows without a target are skipped, and a note counts them. Raises `UserError` for a missing column, a target that is
    not numeric or constant, or fewer than `LEAST_ROWS` rows.
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
    """Raises `UserError` for targets that are not numbers, too few, or all equal."""
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
    """Writes a CSV file with a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        write_csv(columns, rows, file)


class Parts(NamedTuple):
    """Row indices in the three parts."""

    train: np.ndarray
    valid: np.ndarray  # for evaluation during training and for recalibrating intervals
    test: np.ndarray

    def write(self, folder: Path, table: Table) -> None:
        """Writes a CSV file per part, with a header and the target as the last column."""
        folder.mkdir(parents=True)
        for name, chosen in zip(self._fields, self, strict=True):
            write_rows(folder / f"{name}.csv", [*table.columns, table.target], (table.rows[row] for row in chosen))


def read_parts(folder: Path) -> tuple[Table, Parts]:
    """Reads the files from `Parts.write`: the rows in train, valid and test in this order. Raises `UserError`."""
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
    """Draws the parts by seed. test: 0-based indices of the test rows, instead of a fraction.

    most: the maximum number of test rows, also drawn; the remaining test rows belong to no part.
    """
    order = np.random.default_rng(seed).permutation(rows)
    if test is None:
        cut = min(max(round(rows * test_fraction), 2), rows // 2)
        held, rest = order[:cut], order[cut:]
    else:
        chosen = np.isin(order, test)
        held, rest = order[chosen], order[~chosen]
    # A third is for validation. Small tables use a larger share, so that the intervals are reliable. No data is lost:
    # the wide part is fitted to these rows too.
    valid = min(max(round(len(rest) / 3), min(ENOUGH_VALID, round(2 * len(rest) / 3))), MOST_VALID)
    return Parts(np.sort(rest[valid:]), np.sort(rest[:valid]), np.sort(held[:most]))


def by_length(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sorts rows [m] by length, longest first, within blocks of `BLOCK` rows. lengths [n]: tokens per row.

    Batches then need little padding, and the first rows are still a random sample.
    """
    blocks = np.split(rows, range(BLOCK, len(rows), BLOCK))
    return np.concatenate([block[np.argsort(-lengths[block], kind="stable")] for block in blocks])


def some_of(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` of the rows [m], drawn by seed, in their order."""
    return rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:count])]


def held_out_rows(given: str, rows: int) -> list[int]:
    """The 0-based test row indices in FILE.json, or in FILE.json#N if it has a list of splits. Raises `UserError`."""
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
    """The columns that contain only numbers and empty cells, and at least one number."""
    cells = {name: [row[name] for row in rows if row[name]] for name in columns}
    return [name for name, filled in cells.items() if filled and all(as_number(cell) is not None for cell in filled)]


def _as_text(cell: Any) -> str:
    """The cell as a template writes it, "" if empty."""
    return "" if is_missing(cell) else any_text(cell).strip()


def _as_read(number: str) -> str:
    """A numeral that training parses as this number: "13812345678.0", as 13812345678 looks like a telephone number."""
    value = float(number)
    return number if [span.value for span in find_numbers(number)] == [value] else repr(value)


def _known(key: str, wanted: Sequence[str], names: list[str]) -> None:
    odd = next((name for name in wanted if name not in names), None)
    if odd is not None:
        raise UserError(key, odd, f"out of {', '.join(names)}")
