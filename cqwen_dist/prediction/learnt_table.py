"""What a run learnt of its table: stored with it, compared with another table; and the ranges of its numbers."""

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from cqwen_dist.checkpoint.trained import is_exported, run_of
from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.cells import TableCells, number_in
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.columns import category, cell_in, columns_for, forms_by, kind_in, kind_of, sampled, zones_in
from cqwen_dist.data.number_forms import Form, forms_of
from cqwen_dist.data.records import Extractor, named_fields
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.run.files import START, read_object

OUTSIDE = "outside"  # the added column: names of columns with a number outside, or with a category never seen
MARGIN = 0.25  # in ranges beyond either end: still inside; predictions are limited here
REACH = 1.0  # in ranges beyond either end: intervals are limited here
DIGITS = 10  # of a prediction outside
LEAST_DIGITS = 6  # of an interval's ends
OF_WIDTH = 4  # digits of an interval's width, at least, if its ends begin alike: 1,700,000,123 to 1,700,000,456


@dataclass(frozen=True)
class LearntRange:
    """Minimum and maximum of every training column, including the target; the values of columns of categories."""

    target: str
    ends: Mapping[str, tuple[float, float]]
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Mapping[str, Mapping[str, Any]], target: str) -> "LearntRange | None":
        """From a run's columns (`data.columns.described`); None if the target's range is unknown."""
        ends = {name: (column["low"], column["high"]) for name, column in columns.items() if "low" in column}
        values = {name: frozenset(column["values"]) for name, column in columns.items() if "values" in column}
        return cls(target, ends, values) if target in ends else None

    def held(self, cells: Mapping[str, str], found: Mapping[str, Any], unit: TargetTransform) -> dict[str, Any]:
        """Adds OUTSIDE to `found`, a row's new columns: the names of the columns in which the row is outside.

        A category that training did not have is one range outside. The prediction is limited to the target's range plus
        MARGIN. If anything is outside, the intervals move with the prediction and grow by the distance to the range, in
        units of that range, but not beyond the range plus REACH, both of the numbers and in the target's unit. Nothing
        goes below 0 if no target did. cells: the row as training reads it. unit: of the target's range.
        """
        if found["predicted"] is None:
            return {**found, OUTSIDE: None}
        low, high = (_forward(unit, end) for end in self.ends[self.target])
        value = _forward(unit, found["predicted"])
        numbers = {name: number_in(cells.get(name, "")) for name in self.ends}
        far = {name: beyond(numbers[name], *ends) for name, ends in self.ends.items()}
        far |= {name: 1.0 for name, values in self.values.items() if is_unseen(cells.get(name, ""), values)}
        far[self.target] = beyond(value, low, high)
        outside = [name for name, distance in far.items() if distance > MARGIN]
        if not outside:
            return {**found, OUTSIDE: ""}
        width = high - low
        at = min(max(value, low - MARGIN * width), high + MARGIN * width)
        growth = 1 + max(far[name] for name in outside)
        new = {"predicted": at}
        for level in LEVELS:
            for name, side in ((f"low_{level * 100:g}", -1), (f"high_{level * 100:g}", 1)):
                reach = max(growth * abs(_forward(unit, found[name]) - value), abs(value - at))
                new[name] = min(max(at + side * reach, low - REACH * width), high + REACH * width)
        raw = unit.inverse(torch.tensor([*new.values()], dtype=torch.float64)).tolist()
        raw[0] = found["predicted"] if at == value else raw[0]
        return {**found, **dict(zip(new, self._limited(*raw), strict=True)), OUTSIDE: ", ".join(outside)}

    def _limited(self, predicted: float, *ends: float) -> list[float]:
        """The numbers, rounded. Logarithms reach far, so the ends stay within a range of the targets' own numbers."""
        low, high = self.ends[self.target]
        reach, least = REACH * (high - low), 0.0 if low >= 0 else -math.inf
        digits = max(LEAST_DIGITS, shared_digits(max(abs(low), abs(high)), high - low) + OF_WIDTH)
        middle = max(float(f"{predicted:.{max(digits, DIGITS)}g}"), least)
        pairs = zip(ends[::2], ends[1::2], strict=True)
        held = rounded_ends(((max(a, low - reach, least), min(b, high + reach)) for a, b in pairs), digits)
        return [middle, *(max(end, middle) if place % 2 else min(end, middle) for place, end in enumerate(held))]


def rounded_ends(intervals: Iterable[tuple[float, float]], digits: int = LEAST_DIGITS) -> list[float]:
    """The ends of intervals, low and high in turn, with these digits and `OF_WIDTH` of those in which they differ."""
    found = []
    for low, high in intervals:
        alike = shared_digits(max(abs(low), abs(high)), high - low)
        found += [float(f"{end:.{max(digits, alike + OF_WIDTH)}g}") for end in (low, high)]
    return found


def shared_digits(size: float, spread: float) -> int:
    """The first digits that numbers of a size share when they differ by `spread` only, at most 13; 0 for no spread."""
    known = size > 0 and 0 < spread < math.inf
    return min(max(math.floor(math.log10(size / spread)), 0), 13) if known else 0


def _forward(unit: TargetTransform, value: float) -> float:
    return float(unit.forward(torch.tensor(value, dtype=torch.float64)))


MUCH_EMPTIER = 0.2  # report a column if its share of empty cells grew by this much
_NAMED = 3  # cells of a text column that none in training had
LEAST_TOLD = 5  # cells of a text column that must all be numbers or dates
_NAMES = {"number": "a number", "truth": "true or false", "date": "a date such as 2024-01-31", "text": "text"}


def differences(source: str, config: DataConfig, trained: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """`compare` for a source in a run's config. trained: the run's columns; {}: unknown."""
    if trained:
        cells = TableCells(forms_by(config, trained), config.target_field)
        yield from compare(trained, sampled([source])[0], cells, "--data")


def compare(
    trained: Mapping[str, Mapping[str, Any]], records: Sequence[Mapping[str, Any]], cells: TableCells, key: str = "FILE"
) -> Iterator[str]:
    """Yield one line per difference between a table's columns and the training columns.

    trained: from `described`. Raises: UserError for a column that cannot be written as in training.
    """
    here = {name for record in records for name in record}
    for name, was in trained.items():
        if name in here and was["kind"] != "empty":
            read = [_compared(name, was, cells, record.get(name), key) for record in records]
            yield from (f"column {name}: {how}" for how in _differences(was, read))


def _compared(
    name: str, was: Mapping[str, Any], cells: TableCells, value: object, key: str
) -> tuple[str, UserError | None]:
    """A cell's text, as written if it has none; and why it is not as in training."""
    try:
        text = cells.text(name, value)
    except BadLine as bad:
        return str(value), UserError(key, bad.found, bad.allowed)
    kind = was["kind"]
    is_code = not kind.strip("0") and len(kind) == len(text)  # 12345 beside 05532
    fits = kind == "text" or kind_of(text) == ("0" if is_code else kind)
    if not text or fits or (kind == "number" and cells.number(name, text) is not None):
        return text, None
    return text, UserError(key, Said(f"{text} in the column {name}"), f"{_kind_said(was)} there, as in training")


def _kind_said(was: Mapping[str, Any]) -> str:
    return f"a number such as {was['form']}" if "form" in was else _NAMES.get(was["kind"], f"written as {was['kind']}")


def _differences(was: Mapping[str, Any], read: list[tuple[str, UserError | None]]) -> Iterator[str]:
    filled = [text for text, _ in read if text]
    odd = [(text, error) for text, error in read if error is not None]
    if odd and len(odd) == len(filled):
        raise odd[0][1]
    if odd:
        said = f"{len(odd):,} of {len(filled):,} cells are not {_kind_said(was)}"
        yield f"{said} (e.g. {odd[0][0]}); in training all were"
    yield from [*_of_texts(was["kind"], filled)] or _unseen(was, filled)
    yield from _of_zones(was, zones_in(filled))
    yield from _outside(was, [text for text, error in read if error is None])
    empty = 1 - len(filled) / len(read)
    if empty > was["empty"] + MUCH_EMPTIER or (empty and not was["empty"]):
        yield f"{empty:.0%} of the cells are empty, {was['empty']:.0%} in training"


def _of_texts(was: str, filled: list[str]) -> Iterator[str]:
    if was not in ("text", "0") or len(filled) < LEAST_TOLD:
        return
    kind = "number" if forms_of({"": filled}, decimal_comma=False) == {"": Form()} else kind_in(filled)
    if kind == "number" or was == "text" != kind:
        yield f"every cell is {_NAMES.get(kind, kind)}, which was text in training"


def _unseen(was: Mapping[str, Any], filled: list[str]) -> Iterator[str]:
    values = frozenset(was.get("values", ()))
    if odd := [text for text in filled if is_unseen(text, values)]:
        some = [*dict.fromkeys(odd)]
        named = ", ".join(some[:_NAMED]) + ", ..." * (len(some) > _NAMED)
        said = f"{len(odd):,} of {len(filled):,} cells are none of the {len(values):,} learnt ({named})"
        scripts = ", ".join(sorted(_scripts(some) - _scripts(values)))
        yield f"{said}, with letters of another script: {scripts}" if scripts else said


def is_unseen(text: str, values: Collection[str]) -> bool:
    """Whether a cell holds none of a column's values. values: of `described`; empty: unknown."""
    return bool(values and text) and category(text) not in values


def _scripts(texts: Iterable[str]) -> set[str]:
    """The scripts of the letters, such as Latin: the first words of their names."""
    letters = {letter for text in texts for letter in text if letter.isalpha()}
    return {unicodedata.name(letter, "unknown").split()[0].capitalize() for letter in letters}


def _of_zones(was: Mapping[str, Any], zones: list[str]) -> Iterator[str]:
    if odd := [zone for zone in zones if zone not in was.get("zones", zones)]:
        yield f"times of the zone {', '.join(odd)}, in training {', '.join(was['zones']) or 'no times'}"


def _outside(was: Mapping[str, Any], texts: list[str]) -> Iterator[str]:
    numbers = [number for number in map(number_in, texts) if number is not None]
    if outside := [number for number in numbers if "low" in was and beyond(number, was["low"], was["high"])]:
        said = f"{len(outside):,} of {len(numbers):,} numbers are outside of {was['low']:.15g} to {was['high']:.15g}"
        yield f"{said}, all that was learnt from: {min(outside):.15g} to {max(outside):.15g}"


def beyond(number: float | None, low: float, high: float) -> float:
    """Distance of a number from a range, in range widths; 0 inside, and for a cell without a number."""
    return 0.0 if number is None else max(low - number, number - high, 0.0) / ((high - low) or abs(high) or 1.0)


FILE = "table.json"  # in an exported folder
# The data keys that decide how a row is read; paths are not stored
READ = {"prompt_template", "text_template", "target_field"}
READ |= {"text_field", "messages_field", "numeric_targets", "empty_cell", "number_columns", "numbers"}
READ |= {"sequence_length", "long_texts", "on_bad_line"}  # and which rows an evaluation counts


class Column(BaseModel):
    """A column, as in `data.columns.described`."""

    kind: str
    empty: float
    zones: list[str] | None = None
    form: str | None = None
    low: float | None = None
    high: float | None = None
    values: list[str] | None = None


class LearntTable(BaseModel):
    """data: the keys in `READ`. columns: in the order of {*}. median: of the training numbers."""

    model_config = ConfigDict(frozen=True)
    data: DataConfig
    columns: dict[str, Column]
    median: float | None = None

    def described(self) -> dict[str, dict[str, Any]]:
        """The columns, as in `data.columns.described`."""
        return {name: column.model_dump(exclude_none=True) for name, column in self.columns.items()}

    def known(self) -> LearntRange | None:
        """Ranges of the training numbers."""
        return LearntRange.of(self.described(), str(self.data.target_field))

    def extractor(self, empty: str | None = None, comma: bool | None = None) -> Extractor:
        """A reader like the run's. empty, comma: override data.empty_cell and the decimal sign. Raises `UserError`."""
        columns = self.described()
        forms = forms_by(self.data, columns)
        if comma is not None:
            forms = {name: form._replace(decimal="," if comma else ".") for name, form in forms.items()}
        data = self.data if empty is None else self.data.model_copy(update={"empty_cell": empty})
        return Extractor(data, Chat(), forms, columns)

    def prompts(
        self, table: list[Any], extract: Extractor, unread: dict[int, UserError], say: Callable[[str], None]
    ) -> tuple[list[Any], list[dict[str, str]]]:
        """The prompts of rows, and their cells, as the run read them. extract: of `extractor`. unread: gets the rows
        without a prompt; say: gets how the columns differ. Raises: UserError for columns that are missing or cannot be
        read as then."""
        if lacks := [name for name in extract.inputs if name not in table[0]]:
            allowed = f"the columns that the run learnt from; found here: {', '.join(table[0])}"
            raise UserError("FILE", f"no column {', '.join(lacks)}", allowed)
        used = {*extract.inputs}
        read = [{name: cell for name, cell in row.items() if name in used} for row in table]
        for difference in compare(self.described(), read, extract.cells):
            say(difference)
        prompts: list[Any] = []
        for number, row in enumerate(read):
            try:
                prompts.append(extract.before(row))
            except BadLine as bad:
                unread[number] = UserError("FILE", bad.found, bad.allowed, f"record {number + 1}")
                prompts.append("")
        return prompts, [{name: cell_in(extract.cells, name, cell) for name, cell in row.items()} for row in read]

    def to_dict(self) -> dict[str, Any]:
        """The contents of `FILE`."""
        return self.model_dump(mode="json", exclude_unset=True)


def learnt_table(folder: Path) -> LearntTable | None:
    """Load from a run, a checkpoint or an export; None if the columns are not stored. Raises `UserError`."""
    if is_exported(folder):
        return _checked(read_object(folder / FILE), folder) if (folder / FILE).is_file() else None
    config, _ = run_of(folder)
    start = read_object(Path(config.run.dir) / START)
    if (columns := start.get("columns")) is None:
        columns = columns_for(config.data)
    if not columns and config.data.target_field is not None and "*" in named_fields(config.data):
        return None
    data = config.data.model_dump(mode="json", include=READ, exclude_defaults=True)
    numbers = start.get("statistics", {"count": 0})
    median = numbers["median"] if numbers["count"] else None
    return _checked({"data": {"train": FILE, **data}, "columns": columns, "median": median}, folder)


def _checked(found: dict[str, Any], folder: Path) -> LearntTable:
    """Raises `UserError` for content that no run writes."""
    try:
        return LearntTable.model_validate(found)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        allowed = "data and columns, as cqwen export writes them"
        raise UserError(FILE, Said(f"{place}: {error.errors()[0]['msg']}"), allowed, str(folder)) from None
