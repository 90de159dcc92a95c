"""How a run read its rows, stored for predictions and evaluations with the run or its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cqwen_dist.checkpoint.trained import is_exported, run_of
from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.data.chat import Chat
from cqwen_dist.data.columns import columns_for, forms_by
from cqwen_dist.data.records import Extractor, named_fields
from cqwen_dist.prediction.learnt_range import LearntRange
from cqwen_dist.run.files import START, read_object

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
