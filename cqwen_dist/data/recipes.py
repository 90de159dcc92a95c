"""Recognises a data file from its records, and returns the `data` keys to read it. `cqwen init` and `fit` share it."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from cqwen_dist.config.data import QUESTION_AND_ANSWER, RECIPES, can_be_named, column_lines
from cqwen_dist.config.errors import BadLine, Said, UserError
from cqwen_dist.data.cells import TableCells, as_number, is_index, is_missing, is_rounded
from cqwen_dist.data.columns import cell_in, columns_of, forms_in, placed_sample, sample
from cqwen_dist.data.number_forms import EMPTY_MARKS, Form, by_form, forms_of, numeral, said
from cqwen_dist.data.records import Text
from cqwen_dist.data.text_files import no_records

_TOTALS = {"total", "totals", "grand total", "sum", "subtotal", "average", "gesamt", "summe", "insgesamt"}
_TOTALS |= {"total général", "somme", "suma", "totale", "totaal", "totalt"}
_TOTALS |= {"итого", "всего", "合计", "总计", "合計", "総計"}
_PROMPTS = ("prompt", "question", "instruction", "input")
FORMS = "all in one form, such as 1234.5, 1.234,5, $1,234.50, (1,234), 12 % or 12 kg, up to 1e30"
LARGEST = 1e30  # of a target: its square is finite, and so is it in float32
LEAST_COUNTED = 20  # cells: fewer whole numbers may all differ by chance


class DataRecipe(NamedTuple):
    """name: kind of records, for people. keys: for `data`."""

    name: str
    keys: dict[str, Any]
    notes: Sequence[str] = ()  # values of a table that are not learnt as they are


def recognise(source: str, target: str | None = None, decimal_comma: bool | None = None) -> DataRecipe:
    """Recipe for a source, from its first records. target: column whose number the model learns to write.

    Raises `UserError` for an empty source, if no recipe fits, and for numbers with two readings.
    """
    records = sample(source)
    if not records:
        raise UserError("--data", source, "at least one record")
    if isinstance(records[0], Text):
        return DataRecipe("plain texts", {})
    recipe = None if target is not None else _of_fields(records, source, decimal_comma)
    return DataRecipe(*(recipe or _of_table(records, target, source, decimal_comma)))


def table_columns(
    records: Sequence[Mapping[str, Any]],
    target: str,
    source: str,
    forms: Mapping[str, Form],
    key: str = "--data",
    template: str = "",
) -> tuple[list[str], TableCells, list[str]]:
    """The columns to learn from, how to read their cells, and notes. Raises `UserError` if the target holds no numbers.

    The columns are all that a template can name, without the target and row numbers, in file order. template: the
    user's; its columns stay.
    """
    names = columns_of(records)
    if target not in names:
        raise UserError("--target", target, f"a column of {source}: {', '.join(names)}")
    cells = TableCells(forms, target)
    inputs = [name for name in names if name != target]
    left_out = _left_out(inputs, records, cells, template)
    usable = [name for name in inputs if name not in chain(*left_out.values())]
    if not usable or not can_be_named(target):
        raise UserError(key, ", ".join(names), f"{target} and a further column, without {{}}:! in their names", source)
    _check_targets(cells, target, [record.get(target) for record in records], source)
    notes = [f"columns left out, as {why}: {', '.join(left)}" for why, left in left_out.items() if left]
    cells = TableCells({name: form for name, form in forms.items() if name in (*usable, target)}, target)
    return usable, cells, [*notes, *_notes(records, target, cells)]


def _left_out(
    inputs: Sequence[str], records: Sequence[Mapping[str, Any]], cells: TableCells, template: str
) -> dict[str, list[str]]:
    """The columns that are not learnt from, by why."""
    indices = [name for name in inputs if is_index(name) and f"{{{name}}}" not in template]
    unnamed = [name for name in inputs if not can_be_named(name) and name not in indices]
    rest = [name for name in inputs if name not in (*indices, *unnamed)]
    running = [name for name in rest if f"{{{name}}}" not in template and _is_running(records, name, cells)]
    running *= len(running) < len(rest)  # something has to be learnt from
    kept = "a template of yours or fit's --text-columns keeps those that it names"
    return {
        "they number the rows": indices,
        f"they count the rows ({kept})": running,
        "a template cannot name them": unnamed,
    }


def _is_running(records: Sequence[Mapping[str, Any]], name: str, cells: TableCells) -> bool:
    """Whether a column counts the rows: whole numbers that all differ, in any order, with less than a gap per number.

    A new row has a number that no row had, so such a column says nothing of it.
    """
    read = (cell_in(cells, name, record.get(name)) for record in (records if name in cells.forms else ()))
    texts = [*filter(None, read)]
    numbers = {int(text) for text in texts if len(text) < 20 and text.removeprefix("-").isdecimal()}
    return len(numbers) == len(texts) >= LEAST_COUNTED and max(numbers) - min(numbers) <= 2 * (len(texts) - 1)


def _check_targets(cells: TableCells, target: str, values: Sequence[object], source: str) -> None:
    order = list(range(len(values)))
    if target not in cells.forms:  # name a cell that is no number, or else one in a form that few others have
        forms = [forms_of({"": [str(cell)]}, target="").get("") for cell in values]
        often = Counter(forms)
        order.sort(key=lambda row: (forms[row] is not None, often[forms[row]]))
    for row in order:
        where = f"{source}, record {row + 1}"
        try:
            text = cells.text(target, values[row])
        except BadLine as bad:
            raise UserError("--target", bad.found, bad.allowed, where) from None
        number = as_number(text)
        if text and (target not in cells.forms or number is None or abs(number) > LARGEST):
            raise UserError("--target", values[row], f"numbers in the column {target}, {FORMS}", where)


def _notes(records: Sequence[Mapping[str, Any]], target: str, cells: TableCells) -> list[str]:
    """Notes about a table: number forms, cells read as empty, a row of totals."""
    notes = [said(cells.forms)]
    marks = [str(record.get(name)).strip() for record in records for name in cells.forms]
    held = Counter(mark for mark in marks if mark in EMPTY_MARKS or (mark.startswith("#") and mark != "#N/A"))
    if held:
        notes.append(f"{held.total():,} cells are read as empty: {', '.join(held)}")
    notes += _of_names(records, target, cells)
    if why := _why_total(records, target, cells):
        notes.append(f"the last row looks like a total ({why}): take it out of the file, as the model learns it")
    return notes


def _of_names(records: Sequence[Mapping[str, Any]], target: str, cells: TableCells) -> Iterator[str]:
    """Notes on names that are read as numbers: a target's long digits, ISBNs, and versions."""
    rounded = [text for record in records if is_rounded(text := cells.text(target, record.get(target)))]
    if rounded:
        yield f"{len(rounded):,} numbers of {target} are learnt rounded, as float64 holds them: {rounded[0]}"
    for name in (name for name, form in cells.forms.items() if name != target and form == Form()):
        texts = {str(record[name]).strip() for record in records if not is_missing(record.get(name))} - EMPTY_MARKS
        if texts and all(re.fullmatch("97[89][0-9]{10}", text) for text in texts):
            yield f"{name}: ISBNs are read as numbers; with hyphens they stay text"
        elif version := _version(texts):
            yield f"{name}: {version} is read as {numeral(version)}; for versions, write v{version}"


def _version(texts: Collection[str]) -> str | None:
    """A cell such as 1.10 in a column that also has 1.9: no zero that a file of decimals would write."""
    if not all(re.fullmatch(r"[0-9]+\.[0-9]+", text) for text in texts):
        return None
    fewest = min(len(text.partition(".")[2]) for text in texts)
    return min((text for text in texts if text.endswith("0") and len(text.partition(".")[2]) > fewest), default=None)


def _why_total(records: Sequence[Mapping[str, Any]], target: str, cells: TableCells) -> str | None:
    """The last row's cell that names it as a total, or that its target is the sum of all others; None for any other."""
    texts = [cell for cell in records[-1].values() if isinstance(cell, str)]
    why = next((cell for cell in texts if cell.strip(" :").casefold() in _TOTALS), None)
    values = [as_number(cells.text(target, record.get(target))) or 0.0 for record in records]
    if why is None and len(values) > 4 and values[-1] and math.isclose(values[-1], math.fsum(values[:-1])):
        why = f"{values[-1]:g} is the sum of the rows above"
    return why


def _of_fields(records: list[Any], source: str, decimal_comma: bool | None) -> tuple[str, dict[str, Any]] | None:
    """Recipe by the names and types of the fields of all records; None for a table."""
    _refuse_whole(records, "--data", source)
    names = columns_of(records)
    # From the most specific kind of record to the least: a table with a text column is also a list of texts.
    chats = _all_are(_is_chat, records)
    if {"chosen", "rejected"} <= {*names}:
        return _of_preferences(names, chats, source)
    prompts, answers = {"prompt", "question"} & {*chats}, {"completion", "response", "answer"} & {*chats}
    if prompts and answers:
        found = Said(f"chats in {min(prompts)} and {min(answers)}")
        raise UserError("--data", found, "one field messages with the messages of both", source)
    if chats:
        return "chats", {"messages_field": chats[0]}
    if {"prompt", "completion"} <= {*names} and "label" in _all_are(lambda value: isinstance(value, bool), records):
        found = Said("preference data: prompt, completion, and label, which is false for bad completions")
        raise UserError("--data", found, "the records whose label is true, without the field label", source)
    if recipe := _of_prompts({*names}):
        return recipe
    texts = _all_are(lambda value: isinstance(value, str), records)
    if "text" in texts:
        return "plain texts", {}
    if forms_in(records, source, None, decimal_comma):
        return None
    if texts:
        longest = max(texts, key=lambda name: sum(len(record.get(name) or "") for record in records))
        return f"texts in the field {longest}", {"text_field": longest}
    allowed = "chats, instruction and output, question and answer, text, or a column of numbers"
    raise UserError("--data", ", ".join(names), allowed)


def _all_are(kind: Callable[[Any], bool], records: list[Any]) -> list[str]:
    """Fields whose non-empty cells all satisfy `kind`. Empty cells are ignored here; reading reports them."""
    held = {name: [r[name] for r in records if r.get(name) not in (None, "", [])] for name in columns_of(records)}
    return [name for name, cells in held.items() if cells and all(map(kind, cells))]


def _of_preferences(names: list[str], chats: list[str], source: str) -> tuple[str, dict[str, Any]]:
    """Recipe for chosen and rejected answers: the chosen ones are learnt."""
    name = "preference data, of which chosen is learnt and rejected is not"
    prompt = next((name for name in _PROMPTS if name in names), None)
    if "chosen" in chats:
        if prompt in chats:
            found = Said(f"preference data with chats in {prompt} and chosen")
            raise UserError("--data", found, f"chosen with the messages of {prompt} at its beginning", source)
        return name, {"messages_field": "chosen"}
    if prompt is None:
        return name, {"text_field": "chosen"}
    return name, {"prompt_template": f"{{{prompt}}}\n", "text_template": "{chosen}"}


def _of_prompts(names: set[str]) -> tuple[str, dict[str, Any]] | None:
    """Recipe for prompts with answers."""
    if {"instruction", "output"} <= names:
        return "instructions (Alpaca)", RECIPES["alpaca" if "input" in names else "instructions"]
    pairs = (pair for pair in QUESTION_AND_ANSWER if names.issuperset(pair))
    return next(((f"{q}s and {a}s", RECIPES[f"{q}-{a}"]) for q, a in pairs), None)


def _of_table(
    records: list[Any], target: str | None, source: str, decimal_comma: bool | None
) -> tuple[str, dict[str, Any], list[str]]:
    """Recipe for a table: each row becomes `column: cell` lines, with the target last. target None: the last number."""
    forms = forms_in(records, source, target, decimal_comma)
    target = [name for name in forms if not is_index(name)][-1] if target is None else target
    usable, cells, notes = table_columns(records, target, source, forms)
    named = (*usable, target)
    keys: dict[str, Any] = {
        "prompt_template": column_lines(usable),
        "text_template": f"{target}: {{{target}}}\n",
        "target_field": target,
        "number_columns": by_form({name: form for name, form in forms.items() if name in named}),
    }
    empty = {name for record in records for name in named if not cell_in(cells, name, record.get(name), "--data")}
    if empty - {target}:
        keys["empty_cell"] = "unknown"
    if target in empty:
        keys["on_bad_line"] = "skip"
    return f"a table whose column {target} is written", keys, notes


def _is_chat(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)


def records_in(source: str) -> list[Mapping[str, Any]]:
    """All records of a table. Raises `UserError`, also for an empty table and for data that is no table."""
    return [record for _, record in placed_records(source)]


def placed_records(source: str) -> list[tuple[str, Mapping[str, Any]]]:
    """`records_in`, each with its place `file:line`."""
    placed = placed_sample(source, "FILE", None)
    records = [record for _, record in placed]
    if not records or not isinstance(records[0], Mapping):
        allowed = "a table with a row or more: .csv, .tsv, .parquet, .arrow, or .json and .jsonl with objects"
        raise UserError("FILE", source, allowed)
    _refuse_whole(records, "FILE", source)
    return placed


def _refuse_whole(records: list[Any], key: str, source: str) -> None:
    """Raises `UserError` if the one record is the whole table."""
    if len(records) == 1 and (fault := no_records(records[0])) is not None:
        raise UserError(key, fault.found, fault.allowed, source)
