"""Names, as text, the verbs and functions that the core uses from its two wings, `tools` and `tables`. Each is imported
on first use.

No core module imports a wing (tests/test_architecture.py), so the core can be read and changed without them.
"""

from importlib import import_module
from typing import Any

from cqwen_dist.config.errors import Said, UserError

PLACES = {
    "code of a folder": "tools.export.portable:write_code",
    "a run's page": "tools.report.html:leave_report",
    "model.wide": "tables.wide.wide_part:WidePart",
    "start of model.wide": "tables.wide.wide_start:WideStart",
    "size of model.wide": "tables.wide.wide_size:wide_numbers",
    "bundled:diabetes": "tools.diabetes:diabetes_texts",
}
# The extra package that has each library that a wing needs and the core does not
EXTRAS = {"scipy": "tables", "fastapi": "serve", "uvicorn": "serve"}


def from_wing(name: str) -> Any:
    """The object named in `PLACES`. Raises `UserError` if its wing, or a library of its extra, is not installed."""
    module, _, attribute = f"{__package__}.{PLACES[name]}".partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing, wing = error.name or "", ".".join(module.split(".")[:2])
        if missing and module.startswith(missing):
            raise UserError(name, Said(f"no {wing} here"), "an installation of cqwen_dist with this folder") from None
        if missing.partition(".")[0] in EXTRAS:
            extra = EXTRAS[missing.partition(".")[0]]
            raise UserError(name, Said(f"no {missing} here"), f"pip install 'cqwen-dist[{extra}]'") from None
        raise
