"""A table's columns: their number formats and kinds of cells."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from cqwen_dist.config.data import DataConfig, as_list, source_files
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.blocks import blocks
from cqwen_dist.data.cells import TableCells, as_number, as_text, is_index, is_missing, is_number
from cqwen_dist.data.number_forms import Form, Unsettled, forms_of
from cqwen_dist.data.numbers import is_held
from cqwen_dist.data.records import Block, named_fields
from cqwen_dist.data.text_files import delimiter_in

SAMPLE = 10  # blocks read to detect the columns: up to 10,000 rows
MOST_VALUES = 50  # of a text column whose values are categories; and at most half as many as cells
_DAY = re.compile(r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d)?)?", re.ASCII)
_SHAPE = re.compile(r"[\d/.: -]*\d[\d/.: -]*", re.ASCII)


def placed_sample(source: str, key: str = "--data", most: int | None = SAMPLE) -> list[tuple[str, Any]]:
    """Records (or `Text`s) of a source's first blocks, each with its place `file:line`; most None: all. Raises
    `UserError` for a bad line."""
    return [*_placed(_first_blocks(source, key, most), strict=True)]


def sample(source: str, key: str = "--data") -> list[Any]:
    """`placed_sample` without the places."""
    return [record for _, record in placed_sample(source, key)]


def _first_blocks(source: str, key: str, most: int | None) -> Iterator[Block]:
    most = 1 if most is not None and source.startswith("hf:") else most
    return islice(blocks(source, DataConfig(train=source, text_template="{*}"), key), most)


def _placed(read: Iterable[Block], strict: bool) -> Iterator[tuple[str, Any]]:
    """Records with their places. strict: a bad line raises `UserError`, else it is left out."""
    for where, record in chain.from_iterable(read):
        if isinstance(record, BadLine):
            if strict:
                raise UserError(record.kind, record.found, record.allowed, where)
            continue
        yield where, {n: c for n, c in record.items() if n} if isinstance(record, Mapping) else record


def columns_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """All field names, in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record))


def forms_in(
    records: Sequence[Mapping[str, Any]],
    source: str,
    target: str | None = None,
    decimal_comma: bool | None = None,
    only: Iterable[str] | None = None,
) -> dict[str, Form]:
    """The number format of each numeric column. only: restrict to these columns.

    Raises: UserError for data.number_columns, if a column has two readings.
    """
    texts, typed, odd = _cells_by_column(records, {*(columns_of(records) if only is None else only)})
    # Numbers of a JSON or Parquet file have a decimal point and no unit ("0" stands for them); texts in the same column
    # have to agree.
    columns = {name: texts.get(name, []) for name in columns_of(records) if name in {*texts, *typed} - odd}
    beside = {name: [*cells, "0"] for name, cells in columns.items() if name in typed and cells}
    rest = {name: cells for name, cells in columns.items() if name not in beside}
    plain: dict[str, Any] = {"target": target, "delimiter": delimiter_in(source)}
    try:
        found = forms_of(rest, typed=typed, decimal_comma=decimal_comma, **plain)
        found |= forms_of(beside, decimal_comma=False, **plain)
    except Unsettled as error:
        column, cells, point, comma = error.args
        allowed = f"1234.5: [...] (the number is {point}) or 1234,5: [...] (it is {comma})"
        said, options = Said(f"{cells} in the column {column}"), "--no-decimal-comma or --decimal-comma"
        raise UserError("data.number_columns", said, f"{allowed}; {options}", source) from None
    # A target that Python reads as numbers, such as 1_000, is a column of numbers too
    if target in columns and all(as_number(cell) is not None for cell in columns[target]):
        found.setdefault(str(target), Form())
    return {name: found[name] for name in columns if name in found}


def _cells_by_column(
    records: Sequence[Mapping[str, Any]], wanted: set[str]
) -> tuple[dict[str, list[str]], set[str], set[str]]:
    """Per column its texts; the columns with typed numbers; the columns with other values."""
    texts: dict[str, list[str]] = {}
    typed, odd = set[str](), set[str]()
    for name, value in ((name, value) for record in records for name, value in record.items()):
        if name not in wanted or is_missing(value):
            continue
        text = str(as_text(value)) if is_number(value) else value
        if isinstance(text, str) and not (is_number(value) and is_held(text)):  # ids are texts in every file
            texts.setdefault(name, []).append(text)
        else:
            (typed if is_number(value) else odd).add(name)
    return texts, typed, odd


def columns_for(config: DataConfig, with_eval: bool = False) -> dict[str, dict[str, Any]]:
    """`described` for a sample of data.train, with data.number_columns or the formats found in the sample.

    with_eval: include data.eval, if the start learns from it. Without data.target_field a text keeps its numbers as
    they are. Then only the columns of CSV with decimal commas are returned: in a text, 3,5 is two numbers.
    """
    sources = as_list(config.train)
    is_table = config.target_field is not None
    if config.messages_field is not None or not (is_table or any(".csv" in one or ".tsv" in one for one in sources)):
        return {}
    records, whole = sampled(sources)
    named = named_fields(config)
    only = columns_of(records) if "*" in named else named
    forms = given_forms(config)
    if forms is None:
        forms = forms_in(records, sources[0], config.target_field, only=only)
    if not is_table:
        forms = {name: form for name, form in forms.items() if form == Form(",")}
        only = [*forms]
    if with_eval:  # it has training's columns and forms
        more, all_of_it = sampled(as_list(config.eval or []))
        records, whole = records + more, whole and all_of_it
    return described(records, TableCells(forms, config.target_field), only, whole)


def given_forms(config: DataConfig) -> dict[str, Form] | None:
    """data.number_columns as format by column; None if not set. Raises `UserError`."""
    if config.number_columns is None:
        return None
    try:
        return {name: Form.of(form) for form, names in config.number_columns.items() for name in names}
    except ValueError as error:
        raise UserError("data.number_columns", Said(str(error)), "1234.5, 1234,5 €, $1234.5 or the like") from None


def sampled(sources: Sequence[str]) -> tuple[list[Mapping[str, Any]], bool]:
    """A sample of rows, and whether it is all. A missing source gives none; reading it later raises the error."""
    found: list[Any] = []
    whole = True
    for source in sources:
        with suppress(UserError):
            source_files(source, "data.train")
            read = [*_first_blocks(source, "data.train", SAMPLE)]
            found += [record for _, record in _placed(read, strict=False)]
            whole = whole and len(read) < SAMPLE and not source.startswith("hf:")
    return [record for record in found if isinstance(record, Mapping)], whole


# ------------------------------------------------------------------------------------------------ kinds of cells


def described(
    records: Sequence[Mapping[str, Any]], cells: TableCells, only: Sequence[str] | None = None, whole: bool = True
) -> dict[str, dict[str, Any]]:
    """Per column: kind, number format, share of empty cells, range; the values of a text column with few different.

    only: restrict to these columns. whole: these are all records, so a value that is not among them was never learnt.
    """
    found = {}
    for name in columns_of(records):
        if is_index(name) or (only is not None and name not in only):
            continue
        found[name] = _described(name, [cell_in(cells, name, record.get(name)) for record in records], cells, whole)
    return found


def _described(name: str, texts: Sequence[str], cells: TableCells, whole: bool) -> dict[str, Any]:
    filled = [text for text in texts if text]
    numbers = [number for text in filled if (number := cells.number(name, text)) is not None]
    kind = "number" if name in cells.forms and (numbers or not filled) else kind_in(filled)
    found = {"kind": kind, "empty": 1 - len(filled) / len(texts), "zones": zones_in(filled)}
    if kind == "number":
        found |= {"form": str(cells.forms[name])}
        found |= {"low": min(numbers), "high": max(numbers)} if numbers else {}
    elif whole and (values := _categories(kind, filled)):
        found |= {"values": values}
    return found


def _categories(kind: str, filled: Sequence[str]) -> list[str]:
    """The values of a text column whose values are categories; of any other none."""
    values = {*map(category, filled)} if kind in ("text", "truth") or not kind.strip("0") else ()
    return sorted(values) if len(values) <= min(MOST_VALUES, len(filled) / 2) else []


def category(text: str) -> str:
    """A cell's text as the tokenizer gets it: in NFC."""
    return unicodedata.normalize("NFC", text)


def zones_in(texts: Iterable[str]) -> list[str]:
    """Time zones in times such as 2024-01-31 10:20:00+01:00; "none" for times without one."""
    return sorted({found[3] or "none" for found in map(_DAY.fullmatch, texts) if found and found[1]})


def forms_by(config: DataConfig, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Form]:
    """Number formats from data.number_columns, or as recorded by `described`."""
    recorded = {name: Form.of(column["form"]) for name, column in columns.items() if "form" in column}
    return recorded if (given := given_forms(config)) is None else given


def cell_in(cells: TableCells, name: str, value: object, key: str = "") -> str:
    """A cell's text. If its format differs: UserError for key, or without a key the cell unchanged."""
    try:
        return cells.text(name, value)
    except BadLine as bad:
        if key:
            raise UserError(key, bad.found, bad.allowed) from None
        return str(value)


def kind_in(texts: Sequence[str]) -> str:
    """The common kind of a column's texts: empty, truth, date, a digit pattern such as 0/0/0, or text.

    Codes of one length, some with leading zeros, are 00000.
    """
    kinds = {*map(kind_of, texts)} or {"empty"}
    if kinds == {"0"} and len({*map(len, texts)}) == 1 and any(text.startswith("0") for text in texts):
        return "0" * len(texts[0])
    return kinds.pop() if len(kinds) == 1 else "text"


def kind_of(text: str) -> str:
    if text in ("true", "false"):
        return "truth"
    if _DAY.fullmatch(text):
        return "date"
    return re.sub(r"\d+", "0", text, flags=re.ASCII) if _SHAPE.fullmatch(text) else "text"
