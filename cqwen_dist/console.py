"""Output of the command line: strict JSON, a plain console, quiet libraries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer
from pydantic_core import to_json

if TYPE_CHECKING:
    from rich.console import Console


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
