"""The `data` section: sources, which parts are learnt, and how texts become samples."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Positive, Section, Share, refused

Sources = str | Annotated[list[str], Field(min_length=1)]

# Defaults set by `data.recipe`. `cqwen init` writes the same keys.
QUESTION_AND_ANSWER = (("question", "answer"), ("prompt", "completion"), ("prompt", "response"), ("input", "output"))
RECIPES: dict[str, dict[str, str]] = {
    "chat": {"messages_field": "messages"},
    "sharegpt": {"messages_field": "conversations"},
    "alpaca": {"prompt_template": "{instruction}\n{input}\n", "text_template": "{output}", "empty_cell": ""},
    "instructions": {"prompt_template": "{instruction}\n", "text_template": "{output}"},
    **{f"{q}-{a}": {"prompt_template": f"{{{q}}}\n", "text_template": f"{{{a}}}"} for q, a in QUESTION_AND_ANSWER},
    "table": {"prompt_template": "{*}", "text_template": "TARGET: {TARGET}\n"},  # TARGET: target_field
}


def unescaped(template: str) -> str:
    r"""Replace the two characters \n or \t, left by a shell or YAML, with a line end or tab."""
    return template.replace("\\n", "\n").replace("\\t", "\t")


# A template with fields in braces. Validating it again does not change it, so resolved configs can be reloaded.
Template = Annotated[str, AfterValidator(unescaped)]


def template_fields(template: str | None) -> list[str]:
    """Field names in a template, in order."""
    return [name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None]


def filled(template: str, cell: Callable[[str], str]) -> str:
    """Fill a template with cells. (`str.format` would interpret {a.b} and {2019} differently.)"""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else cell(name)) for text, name, _, _ in parts)


def can_be_named(column: str) -> bool:
    """Whether a template can refer to a column; there `*` means all other columns."""
    if column.strip() != column or column in ("", "*") or {*column} & {*"{}\\"}:
        return False
    try:
        return list(string.Formatter().parse(f"{{{column}}}")) == [("", column, "", None)]
    except ValueError:
        return False


def column_lines(columns: Iterable[str]) -> str:
    """Template for a table row: a line `column: {column}` per column."""
    return "".join(f"{name}: {{{name}}}\n" for name in columns)


def as_list(sources: str | list[str]) -> list[str]:
    """One or more sources as a list."""
    return [sources] if isinstance(sources, str) else sources


def source_files(source: str, key: str) -> list[str]:
    """The source, or the sorted files matching a pattern such as `shards/*.jsonl`.

    Raises `UserError` for a source that is not bundled, on the hub, a folder, a file, or a pattern that matches files.
    """
    path = Path(source).expanduser()
    folder = Path(source.partition("#")[0]).expanduser()
    if source.startswith(("bundled:", "hf:")) or path.is_file() or folder.is_dir():
        return [source]
    is_pattern = any(sign in source for sign in "*?[")
    found = sorted(file for file in glob(str(path), recursive=True) if Path(file).is_file()) if is_pattern else []
    if not found:
        allowed = "a file or folder that exists, hf:NAME or bundled:NAME"
        raise UserError(key, f"no file {source}", "a pattern that a file fits" if is_pattern else allowed)
    return found


class NumberPolicy(Section):
    """Which numerals become `<NUM>`. docs/numbers.md defines the policy."""

    signs: bool = True
    """Include a leading minus sign in the value; a plus stays text."""
    thousands: bool = True
    """Read 1,234,567 as one number."""
    scientific: bool = True
    """Read 1.5e-3 as one number."""
    accounting: bool = False
    """Read parentheses around a numeral with thousands separators as a minus: (1,234) is -1234."""
    leading_zeros: bool = False
    """Read numerals such as 007 as numbers (otherwise they are identifiers, so text)."""
    dates: bool = False
    """Read parts of dates and times as numbers (otherwise 2024-01-31 and 12:30 stay text)."""
    digits: bool = False
    """Keep the digits in view (`data.keep_digits`)."""
    identifiers: bool = False
    """Read numerals in v1.2.3, A4, IP addresses and phone numbers as numbers (otherwise they stay text)."""


POLICIES = {
    "plain": NumberPolicy(),
    "accounting": NumberPolicy(accounting=True),
    "all": NumberPolicy(accounting=True, leading_zeros=True, dates=True, identifiers=True),
}


class DataConfig(Section):
    """Where texts come from and how they are read."""

    train: Sources
    """Source(s): .jsonl, .json, .csv, .tsv, .txt (also with .gz), .parquet, a file pattern (shards/*.jsonl), a folder
    that `datasets` saved or can load, hf:NAME[/CONFIG][#SPLIT], or bundled:NAME."""
    eval: Sources | None = None
    """Held-out data; default: eval_fraction of train."""
    eval_fraction: Share = 0.0
    """Share of train to hold out if `eval` is not set."""
    watch: dict[Annotated[str, Field(pattern="^[a-z0-9_]+$")], Annotated[str, Field(min_length=1)]] = Field({})
    """Other texts, as name: source, evaluated but not trained on; small, as they are read into memory. Their field is
    text. Each evaluation logs watch/NAME/accuracy for the model and its base, which shows forgetting."""
    recipe: Literal[tuple(RECIPES)] | None = None  # type: ignore[valid-type]
    """Sets default keys for this kind of records (docs/data.md)."""
    text_field: str = Field("text", min_length=1)
    """Field (column) with the text."""
    text_template: Template | None = None
    """Template over the fields, such as '{question}\\n{answer}'; replaces text_field."""
    prompt_template: Template | None = None
    """Template over the fields for a prompt before the text. The model reads the prompt but does not learn it."""
    messages_field: str | None = Field(None, min_length=1)
    """Field with a chat, [{role, content}, ...]. The tokenizer's chat template formats it, and only assistant turns are
    learnt."""
    target_field: str | None = Field(None, min_length=1)
    """Field in text_template; the regression learns only this field's number."""
    sequence_length: Positive = 512
    """Maximum sequence length in tokens."""
    long_texts: Literal["cut", "truncate", "drop"] = "cut"
    """For texts above sequence_length: cut into pieces and learn them all, truncate to the beginning, or drop."""
    pack: bool = False
    """Concatenate texts to full sequences; attention stays within each text."""
    numeric_targets: Literal["all", "last"] = "all"
    """Numbers that the regression learns: all, or only the last in each text."""
    on_bad_line: Literal["error", "skip"] = "error"
    """For a broken line, a text that is empty or above 16 MiB, or a missing field: stop, or skip and count."""
    empty_cell: str | None = None
    """Template text for an empty cell, a null, a NaN or a missing JSON field; with target_field also for a cell NaN,
    NA, N/A, None, NULL or similar. Default: empty cells become empty text, the others are bad lines. In target_field
    these are always bad lines."""
    number_columns: dict[str, list[str]] | None = None
    """How numbers are written, and in which columns, such as {'1234,5 €': [price]}; init and fit write it. Default: by
    the first cells of train, for tables. The text has the plain number."""
    limit: Positive | None = None
    """Number of texts to use, from the start of train."""
    cache_dir: str | None = Field(None, min_length=1)
    """Folder for prepared data; default: $CQWEN_DATA_CACHE or ~/.cache/cqwen/data for large data, and small files are
    read into memory."""
    numbers: Literal[tuple(POLICIES)] = "plain"  # type: ignore[valid-type]
    """Which numerals become <NUM> (docs/numbers.md): plain; accounting: in (1,234) too, as -1234; all: also those with
    leading zeros, in dates and in identifiers."""

    keep_digits: bool | None = None
    """Keep a number's digits in view: <NUM> reads as its numeral's first character, and the others follow as given
    tokens. They are not learnt, and generation writes them by itself. So a base reads numerals as it always has
    (docs/numbers.md). Default: with start: calibrated, a named base and no target_field."""

    def of_watched(self, name: str) -> DataConfig:
        """Config for reading `watch[name]`: numbers and lengths as in the run; whole texts, in order."""
        kept = {key: getattr(self, key) for key in ("sequence_length", "numbers", "on_bad_line")}
        return DataConfig(train=self.watch[name], **kept)

    @property
    def policy(self) -> NumberPolicy:
        """The policy that `numbers` names; `Config.policy` also has `keep_digits`."""
        return POLICIES[self.numbers]

    @model_validator(mode="before")
    @classmethod
    def _recipe(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or not isinstance(tree.get("recipe"), str):
            return tree
        found, target = RECIPES.get(tree["recipe"], {}), tree.get("target_field")
        if tree["recipe"] == "table":
            if not isinstance(target, str):
                raise refused("target_field", target, "the column whose number is to be written, with recipe: table")
            found = {key: value.replace("TARGET", target) for key, value in found.items()}
        return {**found, **{key: value for key, value in tree.items() if value is not None}}

    @model_validator(mode="after")
    def _sources(self) -> DataConfig:
        for key, value in (("train", self.train), ("eval", self.eval)):
            if value is not None and not (all(value) if isinstance(value, list) else value):
                raise refused(key, value, "paths that are not empty")
        if self.eval is not None and self.eval_fraction > 0:
            raise refused("eval_fraction", self.eval_fraction, "0, as data.eval is given")
        return self

    @model_validator(mode="after")
    def _fields(self) -> DataConfig:
        if self.messages_field is not None:
            for key in ("text_template", "prompt_template", "target_field"):
                if getattr(self, key) is not None:
                    raise refused(key, Said("cannot be combined with data.messages_field"))
        text = _names("text_template", self.text_template)
        _names("prompt_template", self.prompt_template)
        if self.target_field is not None:
            if self.target_field not in text:
                raise refused("target_field", self.target_field, "a field of data.text_template, in braces there once")
            if self.numeric_targets != "all":
                raise refused("target_field", Said("cannot be combined with data.numeric_targets: last"))
        return self


def _names(key: str, template: str | None) -> list[str]:
    """Fields that occur exactly once in a template. Raises a validator error for an invalid template."""
    try:
        fields = template_fields(template)
        formats = any(how or kind for _, _, how, kind in string.Formatter().parse(template or ""))
    except ValueError as error:
        raise refused(key, template, f"a format with {{field}}s ({error})") from None
    if template is not None and (formats or not fields or "" in fields):
        raise refused(key, template, "only named JSON fields in braces, such as {question}")
    return [name for name in fields if fields.count(name) == 1]
