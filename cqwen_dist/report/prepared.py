"""`cqwen prepare`: the data made ready, and what is in it for a person to see: a table and two plots."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cqwen_dist.report.console import plain_console, print_json, quiet_libraries

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

    from cqwen_dist.config import Config
    from cqwen_dist.data.dataset import TextDataset
    from cqwen_dist.data.load import Datasets
    from cqwen_dist.data.tokenizer import NumericalAwareTokenizer

SUMMARY = "summary.json"
PLOT = "summary.svg"
_BAR = 40


def prepare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Dotted overrides, such as data.limit=1000.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: data.workers, or a core each.")] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Tokenise the data once, in parallel; runs on the same data then map it. Says what is in it.

    The folder (under data.cache_dir) is named by what is in the sources, the
    tokenizer and the config, so nothing is done twice. A run finds it by itself
    where data.cache_dir is given or the files are large.
    """
    from cqwen_dist.config import load_config

    checked = load_config(config, overrides or [])
    quiet_libraries()
    from cqwen_dist.data.load import open_prepared
    from cqwen_dist.data.prepare import prepare as make

    tokenizer = tokenizer_of(checked)
    data = checked.data if workers is None else checked.data.model_copy(update={"workers": workers})
    began = time.monotonic()
    with _ProgressLine() as said:
        folder = make(data, tokenizer, said)
    datasets = open_prepared(folder, data, tokenizer)
    found = summary(datasets, data.sequence_length)
    found["folder"], found["seconds"] = str(folder), round(time.monotonic() - began, 2)
    (folder / SUMMARY).write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = plain_console(record=True, width=100, stderr=as_json)
    console.print(drawn(found))
    console.save_svg(str(folder / PLOT), title="prepared data")
    if as_json:
        print_json(found)
    else:
        console.print(f"in {folder} after {found['seconds']:.1f} s; the plots are also in {PLOT} there")


def tokenizer_of(config: Config) -> NumericalAwareTokenizer:
    """The run's tokenizer; where the run builds one from its data and has not yet, the same one. Raises `UserError`."""
    from cqwen_dist.data.records import ReadReport
    from cqwen_dist.data.sources import read_split
    from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer

    number, policy = config.model.num_token_id, config.data.numbers
    from cqwen_dist.config import TRAIN_TOKENIZER

    if config.model.tokenizer != TRAIN_TOKENIZER or Path(config.base_folder).is_dir():
        return NumericalAwareTokenizer.from_pretrained(config.tokenizer_source, number, None, policy)
    size = int((config.model.architecture or {})["vocab_size"])
    texts = read_split(config.data, ReadReport())[0]
    return NumericalAwareTokenizer(
        train_tokenizer([text.text for text in texts], size - 1, policy), number, size, policy
    )


def summary(datasets: Datasets, sequence_length: int) -> dict[str, Any]:
    """Plain values: counts, shares, median and IQR/2 of the targets, and the two distributions."""
    parts = {"train": datasets.train, **({"eval": datasets.eval} if datasets.eval is not None else {})}
    return {
        "sequence_length": sequence_length,
        "skipped": datasets.reading.lines(),
        **{name: _of(dataset, sequence_length) for name, dataset in parts.items()},
    }


def _of(dataset: TextDataset, sequence_length: int) -> dict[str, Any]:
    from dataclasses import asdict

    report, statistics = dataset.report, dataset.statistics()
    numerals = report.numbers + report.left
    return {
        **asdict(report),
        "numbers_per_token": report.numbers / max(report.tokens, 1),
        "left_share": report.left / max(numerals, 1),
        "tokens_per_sequence": report.tokens / max(report.sequences, 1) / sequence_length,
        "median": statistics.median if statistics.count else None,
        "iqr_half": statistics.scale if statistics.count else None,
        "text_lengths": _lengths(dataset.text_lengths()),
        "number_sizes": _sizes(dataset),
    }


def _lengths(lengths: np.ndarray) -> list[tuple[str, int]]:
    """Texts by their tokens, in powers of 2."""
    import numpy as np

    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
    return [(f"to {2**power:,}", int(counts[power])) for power in range(first, len(counts))]


def _sizes(dataset: TextDataset) -> list[tuple[str, int]]:
    """All numbers by their power of 10: a logarithmic scale on both sides of 0."""
    import numpy as np

    low, high = -6, 12  # smaller and larger ones share an end
    counts = np.zeros((2, high - low + 1), np.int64)
    zeros = 0
    for part in dataset.number_parts(targets=False):
        there = part[part != 0]
        zeros += len(part) - len(there)
        power = np.clip(np.floor(np.log10(np.abs(there))), low, high).astype(int) - low
        for negative in (0, 1):
            counts[negative] += np.bincount(power[(there < 0) == bool(negative)], minlength=high - low + 1)
    down = [(f"-1e{p}", int(counts[1, p - low])) for p in range(high, low - 1, -1)]
    up = [(f"1e{p}", int(counts[0, p - low])) for p in range(low, high + 1)]
    found = [*down, ("0", zeros), *up]
    seen = [i for i, (_, count) in enumerate(found) if count]
    return found[seen[0] : seen[-1] + 1] if seen else []


def drawn(found: dict[str, Any]) -> RenderableType:
    """The summary as a table and bars."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = [name for name in ("train", "eval") if name in found]
    table = Table("", *names, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    median = {name: "none" if found[name]["median"] is None else f"{found[name]['median']:.6g}" for name in names}
    spread = {name: "none" if found[name]["iqr_half"] is None else f"{found[name]['iqr_half']:.6g}" for name in names}
    rows: list[tuple[str, Any]] = [
        ("texts", lambda of: f"{of['texts']:,}"),
        ("tokens", lambda of: f"{of['tokens']:,}"),
        (f"sequences of at most {found['sequence_length']:,}", lambda of: f"{of['sequences']:,}"),
        ("  filled by tokens", lambda of: f"{of['tokens_per_sequence']:.1%}"),
        ("numbers", lambda of: f"{of['numbers']:,}"),
        ("  a token", lambda of: f"{of['numbers_per_token']:.4f}"),
        ("  learnt by the regression", lambda of: f"{of['targets']:,}"),
        ("numerals left as text", lambda of: f"{of['left']:,} ({of['left_share']:.2%})"),
        ("  beyond float64", lambda of: f"{of['overflows']:,}"),
        ("texts left out: too short, too long", lambda of: f"{of['too_short']:,}, {of['too_long']:,}"),
        ("long texts truncated, dropped", lambda of: f"{of['truncated']:,}, {of['dropped']:,}"),
        ("  tokens that are lost", lambda of: f"{of['lost']:,}"),
    ]
    for title, cell in rows:
        table.add_row(title, *(cell(found[name]) for name in names))
    table.add_row("median of the targets", *median.values())
    table.add_row("IQR/2 of the targets", *spread.values())
    train = found["train"]
    return Group(
        table,
        *(Text(line, style="yellow") for line in found["skipped"]),
        "",
        "tokens of a text",
        _bars(train["text_lengths"]),
        "",
        "numbers, by power of ten",
        _bars(train["number_sizes"]) if train["number_sizes"] else "none",
    )


def _bars(counts: list[tuple[str, int]]) -> RenderableType:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    most = max(count for _, count in counts)
    for name, count in counts:
        eighths = round(8 * _BAR * count / max(most, 1))
        bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
        table.add_row(name, f"{count:,}", bar or ("·" if count else ""))
    return table


class _ProgressLine:
    """Progress on stderr: a live line on a terminal, a line every half minute elsewhere."""

    def __init__(self) -> None:
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        self._live = Progress(TextColumn("{task.description}"), TimeElapsedColumn(), disable=not sys.stderr.isatty())
        self._task = self._live.add_task("preparing")
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> _ProgressLine:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, texts: int, tokens: int) -> None:
        now = time.monotonic()
        line = f"preparing: {texts:,} texts, {tokens:,} tokens, {tokens / max(now - self._began, 1e-9):,.0f} a second"
        self._live.update(self._task, description=line)
        if self._live.disable and now - self._printed > 30:
            self._printed = now
            typer.echo(line, err=True)
