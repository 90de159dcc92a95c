"""A table in, predictions out: each row becomes a prompt, and the number that would come next goes into new columns."""

from __future__ import annotations

import csv
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import input_device, padded
from cqwen_dist.generate.decisions import choose, law_at_end
from cqwen_dist.generate.generator import at_hand
from cqwen_dist.generate.numbers import Digits, check_digits, number_interval, shown
from cqwen_dist.generate.streaming import Tokenizer
from cqwen_dist.intervals import LEVELS, Intervals
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import ovr_prob_at

NUMBER_COLUMNS = ("predicted", *(f"{end}_{level * 100:g}" for level in LEVELS for end in ("low", "high")), "p_num")
CHOICE = "chosen"


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file with a header. Raises `UserError`."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns, rows = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError("FILE", str(path), f"a CSV file with a header, UTF-8 ({error})") from None
    if not columns or len(set(columns)) < len(columns):
        raise UserError("FILE", f"columns {columns}", "a header with different names", str(path))
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError("FILE", f"row {number} of another length", f"{len(columns)} cells", str(path))
    return columns, rows


def prompts_of(template: str, columns: Sequence[str], rows: Sequence[dict[str, str]]) -> list[str]:
    """The template, such as "age {age}, bmi {bmi}: score", filled with each row's cells as they stand.

    Raises `UserError` for a name that is no column, and a template that says the same for every row.
    """
    try:
        parts = [(text, name) for text, name, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise UserError("--template", template, f"text with columns in braces ({error})") from None
    names = [name for _, name in parts if name is not None]
    odd = next((name for name in names if name not in columns), None)
    if odd is not None or not names:
        raise UserError("--template", odd or template, f"columns in braces, out of {', '.join(columns)}")
    return ["".join(text + (row[name] if name is not None else "") for text, name in parts) for row in rows]


@torch.no_grad()
def predict_numbers(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    batch_size: int = 16,
    digits: Digits = "auto",
) -> Iterator[dict[str, float]]:
    """The number behind each prompt as `NUMBER_COLUMNS`: loc_Y, its intervals (recalibrated where the model holds the
    factors) and P(<NUM>), the probability that a number comes there at all. model: a `CausalQwenForCausalLM`.

    digits: of the predicted value ("auto": what its 50 % interval leaves). Raises `UserError`.
    """
    check_digits(digits)
    if batch_size < 1:
        raise UserError("--batch-size", batch_size, "1 or more")
    net, intervals = model.model, Intervals.from_dict(model.config.calibration)
    device = input_device(model)
    for start in range(0, len(prompts), batch_size):
        law = law_at_end(model, padded(tokenizer, prompts[start : start + batch_size], device))
        with at_hand(net.action):
            action = net.action
            y, seen = action.value(law), action.word_part(law)
            num = torch.tensor([model.config.num_token_id], device=seen.loc.device)
            head = (action.cls_weight, action.cls_bias, action.threshold)
            p_num = ovr_prob_at(seen.loc, seen.scale, *head, num)[:, 0]
        y = Cauchy(y.loc.double(), y.scale.double())
        values = net.target.inverse(y.loc).tolist()
        ends = {level: number_interval(y, net.target, intervals, level) for level in LEVELS}
        for row, value in enumerate(values):
            half = float(ends[0.5][1][row] - ends[0.5][0][row]) / 2
            spans = [float(end[row]) for level in LEVELS for end in ends[level]]
            told = [shown(value, half, digits), *(float(f"{x:.6g}") for x in (*spans, float(p_num[row])))]
            yield dict(zip(NUMBER_COLUMNS, told, strict=True))


def predict_table(
    model: Any,
    tokenizer: Tokenizer,
    path: Path,
    template: str,
    out: TextIO,
    *,
    options: Sequence[str] = (),
    reject_below: float = 0.0,
    batch_size: int = 16,
    digits: Digits = "auto",
) -> int:
    """Write the table with its new columns as CSV; returns its rows.

    options: choose one of these texts for each row instead (columns `chosen`, empty where none reaches reject_below,
    and `p OPTION`). Raises `UserError`, also where the table has one of the new columns already.
    """
    columns, rows = read_table(path)
    prompts = prompts_of(template, columns, rows)
    added = [CHOICE, *(f"p {option}" for option in options)] if options else list(NUMBER_COLUMNS)
    taken = [name for name in added if name in columns]
    if taken:
        raise UserError("FILE", f"a column {taken[0]}", "other names than the new columns'", str(path))
    writer = csv.DictWriter(out, [*columns, *added], lineterminator="\n")
    writer.writeheader()
    found: Iterator[dict[str, Any]]
    if options:
        chosen = choose(model, tokenizer, prompts, options, reject_below)
        found = ({CHOICE: c.option or "", **{f"p {o}": f"{p:.6g}" for o, p in c.p.items()}} for c in chosen)
    else:
        found = predict_numbers(model, tokenizer, prompts, batch_size=batch_size, digits=digits)
    for row, new in zip(rows, found, strict=True):
        writer.writerow({**row, **new})
    return len(rows)
