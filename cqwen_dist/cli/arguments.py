"""Arguments and output that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cqwen_dist.console import plain_console, print_json

if TYPE_CHECKING:
    from cqwen_dist.config import Config

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Dotted overrides, such as stages.0.steps=3.")
]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run, checkpoint or exported folder.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def load(config: Path, overrides: list[str] | None) -> Config:
    """The config of a verb's arguments. Raises `UserError`."""
    from cqwen_dist.config import load_config

    return load_config(config, overrides or [])


def print_document(document: Any, as_json: bool, shown: Callable[[Any], Any]) -> None:
    """Print a document as JSON, or as `shown` makes it for people: lines of text, or a table of rich."""
    if as_json:
        print_json(document)
    elif isinstance(found := shown(document), str):
        typer.echo(found)
    else:
        plain_console().print(found)
