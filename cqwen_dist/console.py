"""What verbs share: their arguments, strict JSON, a plain console, quiet libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_json

if TYPE_CHECKING:
    from rich.console import Console

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


def quiet_libraries() -> None:
    """Keep transformers, datasets, DeepSpeed and tokenizers from printing over the progress line; no hub telemetry."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # what fails there is raised too
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


def plain_console(**options: Any) -> Console:
    """A console without markup, as names may hold square brackets."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, **options)


def print_json(document: Any) -> None:
    """Print strict JSON, with null for numbers that are not finite."""
    typer.echo(to_json(document, indent=2, inf_nan_mode="null"))
