"""`cqwen prepare`: prepares the data and shows its content as a table."""

import json
import sys
import time
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from cqwen_dist.config.errors import printable
from cqwen_dist.config.schema import Config
from cqwen_dist.console import echo, plain_console, print_json
from cqwen_dist.data.load import Datasets, open_prepared, tokenizer_of
from cqwen_dist.data.prepare import prepare
from cqwen_dist.data.store import Document
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer

SUMMARY = "summary.json"
_TARGETS = ("median", "iqr_half")  # None without targets
SHOWN = 300  # tokens shown from the first text


def prepare_and_show(config: Config, workers: int | None, as_json: bool) -> None:
    """Prepare the config's data, write the summary into the folder, and print it. Raises `UserError`."""
    tokenizer = tokenizer_of(config)
    data = config.data
    began = time.monotonic()
    with _ProgressLine() as progress:
        folder = prepare(data, tokenizer, progress, workers)
    datasets = open_prepared(folder, data, tokenizer)
    found = summary(datasets, data.sequence_length)
    found["first_text"] = as_read(datasets.train[0][0], tokenizer) if len(datasets.train) else ""
    found["around"] = around(tokenizer, chats=data.messages_field is not None)
    found["folder"], found["seconds"] = str(folder), round(time.monotonic() - began, 2)
    (folder / SUMMARY).write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = plain_console(width=100, stderr=as_json)
    console.print(drawn(found))
    if as_json:
        print_json(found)
    else:
        console.print(f"in {folder} after {found['seconds']:.1f} s")


def summary(datasets: Datasets, sequence_length: int) -> dict[str, Any]:
    """Counts, shares, and median and IQR/2 of the targets, as JSON types."""
    found: dict[str, Any] = {"sequence_length": sequence_length, "skipped": datasets.reading.lines()}
    for name, dataset in (("train", datasets.train), ("eval", datasets.eval)):
        if dataset is None:
            continue
        report, statistics, lengths = dataset.report, dataset.statistics(), dataset.text_lengths()
        found[name] = {
            **asdict(report),
            "numbers_per_token": report.numbers / max(report.tokens, 1),
            "left_share": report.left / max(report.numbers + report.left, 1),
            "tokens_per_sequence": report.tokens / max(report.sequences, 1) / sequence_length,
            "median": statistics.median if statistics.count else None,
            "iqr_half": statistics.scale if statistics.count else None,
            "text_lengths": np.quantile(lengths, (0.5, 0.95, 1)).round().tolist() if len(dataset) else [],
        }
    return found


def around(tokenizer: NumericalAwareTokenizer, chats: bool) -> str:
    """Sentences on the tokens before and after each text."""
    begin = f"with {tokenizer.decode(tokenizer.begin)}" if tokenizer.begin else "without a token of the tokenizer's own"
    begin = "as the chat template writes it" if chats else begin
    return f"a text begins {begin} and ends with {tokenizer.decode([tokenizer.eos_token_id or 0])}"


def as_read(document: Document, tokenizer: NumericalAwareTokenizer) -> str:
    """The first tokens as the model reads them: numbers as `<NUM 12.5>`, learnt text between [[ and ]]."""
    ids, values, text = document.ids[:SHOWN].tolist(), document.values[:SHOWN].tolist(), ""
    learnt = [True] * len(ids) if document.learnt is None else document.learnt[:SHOWN].tolist()
    for own, places in groupby(tokenizer.encoder.places(ids), key=learnt.__getitem__):
        part = ""
        for number, group in groupby(places, key=lambda i: ids[i] == tokenizer.num_token_id):
            run = list(group)
            if number:
                part += "".join(f"<NUM {tokenizer.decode([ids[i]], [values[i]])}>" for i in run)
            else:
                part += tokenizer.decode([ids[i] for i in run])
        text += f"[[{part}]]" if own else part
    return text + (" ..." if len(document.ids) > SHOWN else "")


def drawn(found: dict[str, Any]) -> RenderableType:
    """Render the summary as a table."""
    names = [name for name in ("train", "eval") if name in found]
    table = Table("", *(Column(name, justify="right") for name in names), box=None, pad_edge=False)
    parts = [
        {
            **found[name],
            **{k: "none" if found[name][k] is None else f"{found[name][k]:.6g}" for k in _TARGETS},
            "lengths": ", ".join(f"{length:,.0f}" for length in found[name]["text_lengths"]),
        }
        for name in names
    ]
    rows = {
        "texts": "{texts:,}",
        "tokens": "{tokens:,}",
        f"sequences of at most {found['sequence_length']:,}": "{sequences:,}",
        "  filled by tokens": "{tokens_per_sequence:.1%}",
        "tokens of a text: median, 95 %, most": "{lengths}",
        "numbers": "{numbers:,}",
        "  a token": "{numbers_per_token:.4f}",
        "  learnt by the regression": "{targets:,}",
        "numerals left as text": "{left:,} ({left_share:.2%})",
        "  beyond float64": "{overflows:,}",
        "long texts truncated, dropped": "{truncated:,}, {dropped:,}",
        "  tokens that are lost, of them to learn": "{lost:,}, {lost_learnt:,}",
        "pieces left out: no token in them is learnt": "{unlearnt:,}",
        "median of the targets": "{median}",
        "IQR/2 of the targets": "{iqr_half}",
    }
    for title, text in rows.items():
        table.add_row(title, *(text.format(**part) for part in parts))
    return Group(
        table,
        *(Text(printable(line), style="yellow") for line in found["skipped"]),
        "",
        "the first text as the model reads it: numbers as <NUM value>, learnt text between [[ and ]]",
        Text("".join(f"    {line}\n" for line in printable(found["first_text"]).split("\n"))),
        Text(printable(found["around"])),
    )


class _ProgressLine(Progress):
    """Progress on stderr: a live line on a terminal, otherwise a line every half minute."""

    def __init__(self) -> None:
        super().__init__(TextColumn("{task.description}"), TimeElapsedColumn(), disable=not sys.stderr.isatty())
        self._line = self.add_task("preparing")
        self._began = self._printed = time.monotonic()

    def __call__(self, texts: int, tokens: int) -> None:
        now = time.monotonic()
        line = f"preparing: {texts:,} texts, {tokens:,} tokens, {tokens / max(now - self._began, 1e-9):,.0f} a second"
        self.update(self._line, description=line)
        if self.disable and now - self._printed > 30:
            self._printed = now
            echo(line, err=True)
