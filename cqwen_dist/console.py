"""Shared by verbs: arguments, strict JSON, a plain console, quiet libraries."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_json

from cqwen_dist.config.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from cqwen_dist.config.schema import Config

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML), or a run folder.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="Overrides by dotted key, such as stages.0.steps=3.")
]
_ON_WORDS = "Configs or run folders of further runs in one job; overrides of all by dotted key."
Words = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG ...] [key=value ...]", help=_ON_WORDS)]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Run, checkpoint or exported folder.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
_ON_TWO_READINGS = "If a column has two readings: 1.238 is 1238, or with --no-decimal-comma 1.238."
DecimalComma = Annotated[bool | None, typer.Option("--decimal-comma/--no-decimal-comma", help=_ON_TWO_READINGS)]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document on stdout.")]


def load(config: Path, overrides: list[str] | None) -> "Config":
    """Load the config from a verb's arguments. Raises `UserError`."""
    from cqwen_dist.config.reading import load_config

    return load_config(config, overrides or [])


def slug(text: str) -> str:
    """A name for a file or folder that needs no quotes in a shell."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "unnamed"


def echo(text: object = "", nl: bool = True, err: bool = False) -> None:
    """Print text that may contain untrusted input: names, notes, records, a model's words."""
    typer.echo(printable(str(text)), nl=nl, err=err)


def print_document(document: Any, as_json: bool, shown: Callable[[Any], Any]) -> None:
    """Print a document as JSON, or as `shown` renders it for people: text, or a rich table."""
    if as_json:
        print_json(document)
    elif isinstance(found := shown(document), str):
        echo(found)
    else:
        plain_console().print(found)


def quiet_libraries() -> None:
    """Silence transformers, datasets, DeepSpeed and tokenizers for the progress line; turn off hub telemetry."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its failures are also raised
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import logging
    import warnings

    import torch
    from transformers.utils import logging as transformers_logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("DeepSpeed", "huggingface_hub.repocard"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()


def plain_console(**options: Any) -> "Console":
    """A console without markup, because names may contain square brackets."""
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return Plain(highlight=False, markup=False, emoji=False, **options)


def print_json(document: Any) -> None:
    """Print strict JSON; non-finite numbers become null."""
    echo(to_json(document, indent=2, inf_nan_mode="null").decode())
