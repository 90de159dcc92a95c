"""The options of `cqwen fit`."""

from dataclasses import dataclass, field
from typing import Annotated

import typer

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.console import DecimalComma


@dataclass(frozen=True)
class FitRequest:
    """A table, the column to predict, which rows judge, and the time."""

    table: Annotated[str, typer.Argument(metavar="FILE", help="A table: .csv, .tsv, .parquet, .arrow, .json, .jsonl.")]
    target: Annotated[str, typer.Option(help="The column of numbers to predict.")]
    base: Annotated[str, typer.Option(help="A model's folder or hub name.")] = "HuggingFaceTB/SmolLM2-135M"
    text_columns: Annotated[list[str], typer.Option(help="Read only this column; may be repeated.")] = field(
        default_factory=list
    )
    template: Annotated[str | None, typer.Option(help="The prompt, with columns in braces; default: all.")] = None
    split: Annotated[str | None, typer.Option(help="JSON file of 0-based test-row indices: FILE.json[#N].")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed for the split and for training.")] = 0
    seeds: Annotated[int, typer.Option(min=1, help="Train with so many seeds in one job; --minutes is of all.")] = 1
    folds: Annotated[int, typer.Option(min=1, help="Judge each row once, by this many runs in one job.")] = 1
    minutes: Annotated[float, typer.Option(help="Time limit on this machine, for all phases together.")] = 20.0
    test_rows: Annotated[int | None, typer.Option(min=2, help="Maximum number of test rows, drawn at random.")] = None
    decimal_comma: DecimalComma = None

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise UserError("--minutes", self.minutes, "more than 0")
        if self.folds > 1 and (self.seeds > 1 or self.split is not None):
            other = "--split" if self.split is not None else "--seeds"
            raise UserError("--folds", Said(f"{self.folds} with {other}"), f"one of the two: {other} or --folds")

    @property
    def runs(self) -> int:
        """In one job: of the seeds, or of the folds."""
        return max(self.seeds, self.folds)
