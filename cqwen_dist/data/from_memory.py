"""Records and texts from a Python program, written to a JSONL file that is read like any other."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from cqwen_dist.batch import Batch
from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.blocks import short_floats
from cqwen_dist.data.cells import as_text, is_empty, shortened
from cqwen_dist.data.loader import EvalLoader
from cqwen_dist.data.number_forms import numeral
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import Text
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.run.files import file_record, written_whole

_TIMES = (np.datetime64, np.timedelta64)
# float32 or less in pandas
_SHORT = {"float16": np.float16, "halffloat[pyarrow]": np.float16, "float32": np.float32, "float[pyarrow]": np.float32}
ROWS = "records or texts: a list, a generator, a datasets.Dataset (one split), a DataFrame"


def records(rows: Any, key: str, text_field: str = "text") -> Iterator[dict[str, Any]]:
    """Yield each row as a JSON object; a text goes under `text_field`. rows: see `ROWS`.

    Floats without a fraction become integers, NaN becomes null, and a date its text, as in tables read from files.
    Raises `UserError` with the row's number.
    """
    for number, row in enumerate(as_rows(rows, key), 1):
        try:
            yield {text_field: row} if isinstance(row, str) else {str(name): _plain(row[name]) for name in row}
        except (TypeError, ValueError) as error:
            allowed = "text, numbers, true, false, none, lists of them"
            raise UserError(key, Said(str(error)), allowed, f"row {number}") from None


def as_rows(rows: Any, key: str) -> Iterator[Any]:
    """Yield the rows, each a text or a mapping, with numpy's times as Python's. Raises `UserError`."""
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):  # iterating a pandas DataFrame yields columns
        rows = _rows_of_frame(rows, key)
    elif hasattr(rows, "features"):  # a datasets.Dataset
        rows = short_floats(rows, rows.features and rows.features.arrow_schema)
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise UserError(key, Said(f"a {type(rows).__name__}"), ROWS)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, (str, Mapping)):
            raise UserError(key, row, "a text, or a record by column", f"row {number}")
        yield row if isinstance(row, str) else {name: _of_python(row[name]) for name in row}


def _of_python(value: Any) -> Any:
    """numpy's times as Python's, NaT as None: `tolist` makes nanoseconds an integer."""
    return value.astype(f"{value.dtype.kind}8[us]").item() if isinstance(value, _TIMES) else value


def _rows_of_frame(frame: Any, key: str) -> list[Any]:
    """The rows of a DataFrame; an index with a name is a column, as in the files that pandas writes."""
    index = [name for name in frame.index.names if name is not None]
    names = [str(name) for name in (*index, *frame.columns)]
    if len({*names}) < len(names):
        raise UserError(key, names, "a DataFrame with another name for every column")
    frame = (frame.reset_index(index) if index else frame).set_axis(names, axis=1)
    kinds = {name: _SHORT[kind] for name in frame.columns if (kind := str(frame.dtypes[name]).lower()) in _SHORT}
    rows = frame.to_dict("records")
    return [{**row, **{name: shortened(row[name], kind) for name, kind in kinds.items()}} for row in rows]


def write_records(rows: Any, path: Path, key: str, text_field: str = "text", keep: bool = False) -> None:
    """Write rows atomically. keep: an existing file must have the same content. Raises `UserError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with written_whole(path) as partial:
        with partial.open("x", encoding="utf-8") as file:
            for count, record in enumerate(records(rows, key, text_field), 1):  # noqa: B007
                file.write(json.dumps(record) + "\n")
        if not count:
            raise UserError(key, "no row", "one or more")
        if keep and path.is_file() and file_record(path) != file_record(partial):
            allowed = "the same, or run.accept: [data, eval] to continue with these, or a new run.dir"
            raise UserError(key, Said(f"other rows than the run began with ({path})"), allowed)


def text_batches(
    texts: Iterable[str], tokenizer: NumericalAwareTokenizer, context: int, tokens: int
) -> tuple[list[Batch], dict[str, Any]]:
    """Collate the first texts like training does. Returns batches and the unit of their numbers.

    context: the model's context length in tokens; tokens: approximate number to take. The unit is a target transform as
    a dict. Raises `UserError`.
    """
    size, taken = 0, []
    for number, record in enumerate(records(texts, "texts"), 1):
        taken.append(Text(str(record.get("text")), f"texts:{number}"))
        size += len(taken[-1].text)
        if size > 8 * tokens:  # characters: about four per token in English, one or two in Chinese
            break
    dataset = tokenise(taken, tokenizer, DataConfig(train="texts", sequence_length=min(512, context)))
    if not len(dataset):
        raise UserError("texts", "no text", "one or more")
    unit = dataset.statistics().transform("standardise")
    batches, size = [], 0
    for batch in EvalLoader(dataset, rank=0, world=1, micro_batch_size=8):
        batches.append(batch)
        size += int(batch.attention_mask.sum())
        if size >= tokens:
            break
    return batches, asdict(unit)


def _plain(value: Any) -> Any:
    """Convert a value to plain JSON types. Raises TypeError or ValueError."""
    if isinstance(value, (str, bool, int)):
        return value
    if is_empty(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name]) for name in value}
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", None):  # or an array, which keeps its items' types
        return [_plain(_of_python(item)) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, np.floating):  # numpy's and torch's scalars
        return _plain(value.tolist())
    text = as_text(value)
    if text is None:
        if isinstance(value, (float, np.floating)):  # an infinity: an empty cell of a table, no text elsewhere
            return float(value)
        raise TypeError(f"a {type(value).__name__}")
    # A decimal that float64 cannot represent stays text.
    exact = isinstance(value, (float, np.floating)) or (
        isinstance(value, Decimal) and Decimal(repr(float(value))) == value
    )
    return json.loads(numeral(text)) if exact else text
