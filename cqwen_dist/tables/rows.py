"""The table in `cqwen fit`: cells as text, the numeric columns, and the split into three parts."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cqwen_dist.config import UserError
from cqwen_dist.config.data import can_be_named, column_lines
from cqwen_dist.config.errors import BadLine, Said
from cqwen_dist.data.cells import Literal, TableCells, cell_text, is_missing, number_in
from cqwen_dist.data.columns import columns_of, forms_in, sample
from cqwen_dist.data.number_forms import Form
from cqwen_dist.data.recipes import records_in, table_columns
from cqwen_dist.data.text_files import write_table
from cqwen_dist.prediction.learnt_table import OUTSIDE
from cqwen_dist.prediction.table import NUMBER_COLUMNS
from cqwen_dist.tables.fit_request import FitRequest

WHY = ("to learn from", "to watch the training and set the intervals' width", "to judge by")  # `Parts`
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
    written: Sequence[Row] = ()  # the rows as the file writes them: numbers in their column's form
    forms: Mapping[str, Form] = {}

    def values(self) -> np.ndarray:
        """The target values [n], float64."""
        return np.array([float(row[self.target]) for row in self.rows])

    def equal(self) -> list[Any]:
        """The key of equal rows."""
        return [tuple(row.values()) for row in self.rows]


def read_table(
    source: str, target: str, wanted: Sequence[str] = (), decimal_comma: bool | None = None, template: str = ""
) -> Table:
    """Reads the columns `wanted` (default: those of `table_columns`) and a target from CSV, Parquet or JSONL.

    template: the user's; its columns stay. Rows without a target are skipped, and a note counts them. Raises
    `UserError` for a missing column, a target that is not numeric or constant, fewer than `LEAST_ROWS` rows, and
    numbers with two readings.
    """
    records = records_in(source)
    names = [*filter(can_be_named, columns_of(records))]
    if odd := [name for name in wanted if name not in names]:
        raise UserError("--text-columns", odd[0], f"out of {', '.join(names)}")
    only = [*wanted, target] if wanted else None
    forms = forms_in(sample(source, "FILE"), source, target, decimal_comma, only)
    usable, cells, notes = table_columns(records, target, source, forms, "FILE", f"{column_lines(wanted)}{template}")
    columns = [*dict.fromkeys(name for name in wanted or usable if name != target)]
    if taken := {*NUMBER_COLUMNS, OUTSIDE} & {*columns, target}:
        raise UserError("FILE", f"a column {min(taken)}", "other names than predicted.csv's new columns", source)
    read = _read(records, (*columns, target), cells, source)
    kept = [number for number, row in enumerate(read) if row[target]]
    rows = [read[number] for number in kept]
    often = _of_targets(rows, target, source)
    lost = len(read) - len(rows)
    written = [_written(records[number], (*columns, target)) for number in kept]
    notes = [f"{lost:,} rows without a {target} are left out"] * (lost > 0) + notes + often
    used = {name: cells.forms[name] for name in (*columns, target) if name in cells.forms}
    return Table(columns, _of_numbers(columns, rows, used), rows, target, notes, lost, written, used)


def _read(records: Sequence[Mapping[str, Any]], names: Sequence[str], cells: TableCells, source: str) -> list[Row]:
    """The cells as training reads them. Raises `UserError`."""
    rows = []
    for number, record in enumerate(records, 1):
        try:
            rows.append({name: cells.text(name, record.get(name)) for name in names})
        except BadLine as bad:
            raise UserError("FILE", bad.found, bad.allowed, f"{source}, record {number}") from None
    return rows


def _written(record: Mapping[str, Any], names: Sequence[str]) -> Row:
    """The row for a CSV file that has the same texts: texts as they are, other values as `cell_text`."""
    row = {}
    for name in names:
        value = record.get(name)
        text = isinstance(value, str) and not isinstance(value, Literal)
        row[name] = "" if is_missing(value) else str(value).strip() if text else cell_text(value) or ""
    return row


def _of_targets(rows: Sequence[Row], target: str, source: str) -> list[str]:
    """A note if most targets are equal. Raises `UserError` for too few targets, or if all are equal."""
    if len(rows) < LEAST_ROWS:
        raise UserError("FILE", Said(f"{len(rows)} rows with a {target}"), f"{LEAST_ROWS} or more", source)
    ((value, count),) = Counter(float(row[target]) for row in rows).most_common(1)
    if count == len(rows):
        said = Said(f"{value:g} in every row")
        raise UserError("--target", said, f"a column {target} with different numbers", source)
    often = f"{target} is {value:g} in {count:,} of {len(rows):,} rows: to say this of every row is hard to beat by MAE"
    return [often] * (2 * count > len(rows))


class Parts(NamedTuple):
    """Row indices in the three parts."""

    train: np.ndarray
    valid: np.ndarray  # for evaluation during training and for recalibrating intervals
    test: np.ndarray  # in random order: if time is short, only the first are judged

    @property
    def learnt(self) -> np.ndarray:
        """Both of the first: all that models without validation rows learn from."""
        return np.sort(np.concatenate([self.train, self.valid]))

    def write(self, folder: Path, table: Table) -> None:
        """Writes a CSV file per part, with a header and the target as the last column."""
        folder.mkdir(parents=True)
        for name, chosen in zip(self._fields, self, strict=True):
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                write_table((table.written[row] for row in chosen), file)


def read_parts(folder: Path, forms: Mapping[str, Form]) -> tuple[Table, Parts]:
    """Reads the files from `Parts.write`: the rows in train, valid and test in this order. Raises `UserError`."""
    written: list[Row] = []
    ends = [0]
    for name in Parts._fields:
        written += map(dict, records_in(str(folder / f"{name}.csv")))
        ends.append(len(written))
    *names, target = written[0]
    rows = _read(written, (*names, target), TableCells(forms, target), str(folder))
    parts = Parts(*(np.arange(start, stop) for start, stop in pairwise(ends)))
    return Table(names, _of_numbers(names, rows, forms), rows, target, [], 0, written, forms), parts


def split(
    rows: int,
    seed: int,
    test: Sequence[int] | None = None,
    most: int | None = None,
    equal: Sequence[Any] | None = None,
) -> Parts:
    """Draws the parts by seed. test: 0-based indices of the test rows, instead of a fifth.

    most: the maximum number of test rows, also drawn; the remaining test rows belong to no part. equal: rows with the
    same entry stay in one part. Raises `UserError` if too few differ.
    """
    same = [*range(rows)] if equal is None else equal
    order = _in_random_order(rows, seed, same)
    if test is None:
        cut = _between(order, min(max(round(rows / 5), 2), rows // 2), same)
        held, rest = order[:cut], order[cut:]
    else:
        chosen = np.isin(order, test)
        held, rest = order[chosen], order[~chosen]
    # A third is for validation. Small tables use a larger share, so that the intervals are reliable. No data is lost:
    # the wide part is fitted to these rows too.
    valid = min(max(round(len(rest) / 3), min(ENOUGH_VALID, round(2 * len(rest) / 3))), MOST_VALID)
    valid = _between(rest, valid, same)
    return Parts(np.sort(rest[valid:]), np.sort(rest[:valid]), held[:most])


def drawn_parts(request: FitRequest, table: Table) -> list[Parts]:
    """The split, or one of each fold. Raises `UserError`."""
    if request.split is not None and table.lost:
        found = Said(f"{table.lost:,} rows without a {table.target}, which would shift the others' numbers")
        raise UserError("--split", found, "a target in every row", request.table)
    rows, equal = len(table.rows), table.equal()
    tests: list[Sequence[int] | None] = [None if request.split is None else held_out_rows(request.split, rows)]
    if request.folds > 1:
        tests = [*drawn_folds(rows, request.seed, request.folds, equal)]
    return [split(rows, request.seed, test, request.test_rows, equal) for test in tests]


def _in_random_order(rows: int, seed: int, same: Sequence[Any]) -> np.ndarray:
    """All rows, equal ones one after the other."""
    order = np.random.default_rng(seed).permutation(rows)
    first: dict[Any, int] = {}
    for place, row in enumerate(order):
        first.setdefault(same[row], place)
    return order[np.argsort([first[same[row]] for row in order], kind="stable")]


def drawn_folds(rows: int, seed: int, count: int, equal: Sequence[Any]) -> list[Sequence[int]]:
    """The rows in `count` parts of about equal size, each the test rows of a `split`; rows with the same entry of
    `equal` are in one part. Raises `UserError` if too few differ."""
    order = _in_random_order(rows, seed, equal)
    cuts = [_between(order, round(rows * i / count), equal) for i in range(1, count)]
    parts: list[Sequence[int]] = [part.tolist() for part in np.split(order, cuts)]
    if min(map(len, parts)) < 2:
        raise UserError("--folds", count, "fewer, as so few rows differ")
    return parts


def repeats(equal: Sequence[Any], parts: Parts) -> list[str]:
    """A note on the repeated rows. equal: rows with the same entry are equal."""
    repeated = len(equal) - len({*equal})
    learnt = {equal[row] for part in parts[:2] for row in part}
    across = sum(equal[row] in learnt for row in parts.test)
    where = f"{across:,} test rows are learnt from too, by --split" if across else "all equal ones are in one part"
    return [f"{repeated:,} rows repeat another row; {where}"] if repeated else []


def _between(order: np.ndarray, cut: int, same: Sequence[Any]) -> int:
    """The place nearest to `cut` where rows that are not equal meet. Raises `UserError` if all are equal."""
    ends = [place for place in range(1, len(order)) if same[order[place - 1]] != same[order[place]]]
    if not ends:
        raise UserError("FILE", Said("rows that are all equal"), "rows that differ, in each part of the table")
    return min(ends, key=lambda place: (abs(place - cut), place))


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


def _of_numbers(columns: Sequence[str], rows: Sequence[Row], forms: Mapping[str, Form]) -> list[str]:
    return [n for n in columns if n in forms and all(number_in(row[n]) is not None for row in rows if row[n])]
