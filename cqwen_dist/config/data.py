"""The `data` section: where texts come from, which parts are learnt, how they are cut into samples."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Above0, Count, Positive, Section, Seed, Share, refused

Sources = str | Annotated[list[str], Field(min_length=1)]
OTHER = "other"  # the type of numbers that are in no field of number_types
# Keys of `data` that watched texts share.
_OF_ALL = (
    *("sequence_length", "numbers", "calculator_marks", "max_text_mib", "on_bad_line", "on_nonfinite", "sample_by"),
    "decimal_comma",
)

# Keys that `data.recipe` sets where the config does not. `cqwen init` writes the same keys.
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
    """With line ends and tabs where a shell or YAML left two characters."""
    return template.replace("\\n", "\n").replace("\\t", "\t")


# With fields in braces. Read anew, as a resolved config is, it stays as it is.
Template = Annotated[str, AfterValidator(unescaped)]


def template_fields(template: str | None) -> list[str]:
    """The names in braces of a template, in order."""
    return [name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None]


def filled(template: str, cell: Callable[[str], str]) -> str:
    """The template with the cell of each field; `str.format` itself reads {a.b} and {2019} otherwise."""
    parts = string.Formatter().parse(template)
    return "".join(text + ("" if name is None else cell(name)) for text, name, _, _ in parts)


def can_be_named(column: str) -> bool:
    """Whether a template can hold a column's name in braces: `*` means all others there."""
    if column.strip() != column or column in ("", "*") or {*column} & {*"{}\\"}:
        return False
    try:
        return list(string.Formatter().parse(f"{{{column}}}")) == [("", column, "", None)]
    except ValueError:
        return False


def column_lines(columns: Iterable[str]) -> str:
    """The template of a table's row: a line `column: {column}` for each."""
    return "".join(f"{name}: {{{name}}}\n" for name in columns)


def source_files(source: str, key: str) -> list[str]:
    """The source itself, or the files of a pattern such as `shards/*.jsonl`, sorted.

    Raises `UserError` for a source that is neither bundled, nor of the hub, nor a folder, file or pattern with files.
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
    """Which numerals become `<NUM>`; the full policy is written out in docs/numbers.md."""

    signs: bool = True
    """Take a leading minus into the value where it is a sign; a plus stays text."""
    thousands: bool = True
    """Read 1,234,567 as one number."""
    scientific: bool = True
    """Read 1.5e-3 as one number."""
    accounting: bool = False
    """Take brackets directly around a numeral with thousands for a minus: (1,234) is -1234."""
    leading_zeros: bool = False
    """Take numerals such as 007 (else they are identifiers: text)."""
    dates: bool = False
    """Take the parts of dates and times (else 2024-01-31, 12:30 stay text)."""
    identifiers: bool = False
    """Take numerals inside v1.2.3, A4, IPs, phone numbers (else they stay text)."""


class WatchedTexts(Section):
    """Texts of another kind, not trained on."""

    source: str = Field(min_length=1)
    """A source as in data.train; small: it is read into memory."""
    text_field: str = Field("text", min_length=1)
    """The field (column) that holds the text."""
    text_template: Template | None = None
    """A format over the fields, instead of text_field."""

    @model_validator(mode="after")
    def _fields(self) -> WatchedTexts:
        _names("text_template", self.text_template)
        return self


class DataConfig(Section):
    """Where the text comes from."""

    train: Sources
    """Source(s): .jsonl, .json, .csv, .tsv, .txt (each also .gz), .parquet, a pattern of such files (shards/*.jsonl), a
    folder that `datasets` saved or can load, hf:NAME[/CONFIG][#SPLIT], or bundled:NAME."""
    eval: Sources | None = None
    """Held-out data; default: eval_fraction of train."""
    eval_fraction: Share = 0.0
    """Share of train that is held out when `eval` is not given."""
    watch: dict[Annotated[str, Field(pattern="^[a-z0-9_]+$")], WatchedTexts] = Field({})
    """Texts of other kinds by name, not trained on: every evaluation logs watch/NAME/accuracy and the base model's own,
    which shows what a run forgets."""
    weights: Annotated[list[Above0], Field(min_length=2)] | None = None
    """How often each source of train is drawn from; default: the sources one after the other."""
    mix_until: Literal["first", "all"] = "first"
    """Mixing by weights ends when the first source is used up, or repeats short ones until all."""
    mix_seed: Seed = 0
    """Seed of the draws between weighted sources."""
    recipe: Literal[tuple(RECIPES)] | None = None  # type: ignore[valid-type]
    """Sets the keys that read records of this kind, unless they are given (docs/data.md)."""
    text_field: str = Field("text", min_length=1)
    """The field (column) that holds the text."""
    text_template: Template | None = None
    """A format over the fields, such as '{question}\\n{answer}', instead of text_field."""
    prompt_template: Template | None = None
    """A format over the fields, in front of the text: read, but not learnt."""
    messages_field: str | None = Field(None, min_length=1)
    """The field that holds a chat, [{role, content}, ...]: written by the tokenizer's chat template, only the
    assistant's turns are learnt."""
    message_keys: dict[Literal["role", "content", "tool_calls"], str] = Field({})
    """What a chat's messages call these keys; {from, value} are known."""
    roles: dict[str, str] = Field({})
    """What a chat's roles mean: system, user, assistant or tool; human, gpt and such are known."""
    tools_field: str = Field("tools", min_length=1)
    """The field with a chat's tools, if a record has it."""
    target_field: str | None = Field(None, min_length=1)
    """The field of text_template whose number alone the regression learns."""
    number_types: Annotated[list[str], Field(max_length=100)] = Field([])
    """Fields of text_template: the numbers in each are a type of their own, with its own P and its own regression; all
    others are of the type other (seed S4 4.7.2)."""
    more_values: list[str] = Field([])
    """Fields with further values of target_field's number, such as the upper end of a range; the text does not hold
    them, a prediction does (seed S4 4.7.1)."""
    labels_field: str | None = Field(None, min_length=1)
    """The field {word: true or false, ...}: words that can come next after the text, and words that cannot; nothing is
    known of all others (partial labels); a text without it ends as usual."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one text of a .txt file is."""
    sequence_length: Positive = 512
    """Longest sequence, in tokens."""
    long_texts: Literal["cut", "truncate", "drop"] = "cut"
    """Texts of more tokens: cut into pieces that are all learnt, only the beginning, or none."""
    pack: bool = False
    """Concatenate texts to full sequences, attention kept inside each text."""
    group_by_length: bool = False
    """Put sequences of similar length into one step: less padding, the order less random."""
    calculator_marks: Literal["strip", "keep"] = "strip"
    """GSM8K's <<48/2=24>> marks: removed, or kept as text."""
    numeric_targets: Literal["all", "last"] = "all"
    """Which numbers the regression learns: all, or only the last of each text."""
    deduplicate: bool = False
    """Use equal texts once."""
    min_tokens: Positive | None = None
    """Leave out texts of fewer tokens."""
    max_tokens: Positive | None = None
    """Leave out texts of more tokens."""
    max_text_mib: Above0 = 16.0
    """A line or record of more MiB is a bad line."""
    on_bad_line: Literal["error", "skip"] = "error"
    """A broken line, an empty text, a missing field: stop, or count and skip."""
    empty_cell: str | None = None
    """What stands in a template for an empty cell, a null, a NaN or a field that a JSON record lacks, with target_field
    also for a cell NaN, NA, N/A, None, NULL or the like; default: nothing for an empty cell, and the others are bad
    lines, as is any in target_field."""
    decimal_comma: bool = False
    """Read 1.234,5 in a cell of CSV files as 1234.5."""
    on_nonfinite: Literal["error", "skip"] = "error"
    """A number that overflows to infinity: stop, or leave it as text and count it."""
    limit: Positive | None = None
    """Use only the first so many texts of train."""
    cache_dir: str | None = Field(None, min_length=1)
    """Folder of prepared data; default: $CQWEN_DATA_CACHE or ~/.cache/cqwen/data, and small files are read into memory
    instead."""
    workers: Positive | None = None
    """Processes that tokenise; default: one a core."""
    prefetch: Count = 2
    """Steps whose batches are made ahead of time; 0: none."""
    numbers: NumberPolicy = NumberPolicy()
    """Which numerals become <NUM>."""

    def of_watched(self, name: str) -> DataConfig:
        """The config that reads `watch[name]`: numbers and lengths as in the run, whole texts, in order."""
        own = self.watch[name]
        kept = {key: getattr(self, key) for key in _OF_ALL}
        return DataConfig(train=own.source, text_field=own.text_field, text_template=own.text_template, **kept)

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
        if self.weights is not None:
            sources = len(self.train) if isinstance(self.train, list) else 1
            if len(self.weights) != sources:
                raise refused("weights", self.weights, f"one weight for each of the {sources} sources of data.train")
        if None not in (self.min_tokens, self.max_tokens) and self.min_tokens > self.max_tokens:  # type: ignore[operator]
            raise refused("min_tokens", self.min_tokens, f"at most data.max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="after")
    def _chat(self) -> DataConfig:
        if self.messages_field is not None:
            for key in ("text_template", "prompt_template", "target_field", "labels_field", "number_types"):
                if getattr(self, key) not in (None, []):
                    raise refused(key, Said(f"{key} with messages_field"), "one of the two")
        elif self.message_keys or self.roles:
            raise refused("message_keys" if self.message_keys else "roles", Said("no messages_field"), "both, or none")
        return self

    @model_validator(mode="after")
    def _fields(self) -> DataConfig:
        text = _names("text_template", self.text_template)
        _names("prompt_template", self.prompt_template)
        if self.target_field is not None:
            if self.target_field not in text:
                raise refused("target_field", self.target_field, "a field of data.text_template, in braces there once")
            if self.numeric_targets != "all":
                raise refused("target_field", self.target_field, "it without numeric_targets: last, which it replaces")
        for i, name in enumerate(self.number_types):
            if name not in text or name in self.number_types[:i] or name == OTHER:
                allowed = f"fields of data.text_template, in braces there once, each named once, none {OTHER!r}"
                raise refused(f"number_types.{i}", name, allowed)
        if self.more_values and (self.target_field is None or self.number_types):
            allowed = "target_field with it, whose number they belong to, and no number_types"
            raise refused("more_values", self.more_values, allowed)
        return self

    @property
    def types(self) -> list[str] | None:
        """The names of the types of number; None without number_types."""
        return [OTHER, *self.number_types] if self.number_types else None


def _names(key: str, template: str | None) -> list[str]:
    """The fields that occur once in a template. Raises as a validator does for a template that fields cannot fill."""
    try:
        fields = template_fields(template)
        formats = any(how or kind for _, _, how, kind in string.Formatter().parse(template or ""))
    except ValueError as error:
        raise refused(key, template, f"a format with {{field}}s ({error})") from None
    if template is not None and (formats or not fields or "" in fields):
        raise refused(key, template, "named JSON fields in braces, nothing else, such as {question}")
    return [name for name in fields if fields.count(name) == 1]
