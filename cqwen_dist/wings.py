"""Names, as text, what the core uses from its two wings, `tools` and `tables`. Each is imported on first use.

No core module imports a wing (tests/test_architecture.py), so the core can be read and changed without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cqwen_dist.config.errors import Said, UserError

_BENCH = ("data", "loss", "step", "packed", "memory", "ranks", "generate", "gpu")
PLACES = {
    **{verb: f"tools.verbs:{verb}" for verb in ("plan", "doctor", "accept", "quickstart", "report")},
    **{f"bench {verb}": f"tools.bench.bench_verbs:{verb}" for verb in _BENCH},
    "fit": "tables.table_verbs:fit",
    "bench numbers": "tables.table_verbs:numbers",
    "a run's page": "tools.report.html:leave_report",
    "bundled:diabetes": "tools.diabetes:diabetes_texts",
}


def from_wing(name: str) -> Any:
    """The object named in `PLACES`. Raises `UserError` if its wing is not installed."""
    module, _, attribute = f"{__package__}.{PLACES[name]}".partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):  # a library is missing, not the wing
            raise
        wing = ".".join(module.split(".")[:2])
        raise UserError(name, Said(f"no {wing} here"), "an installation of cqwen_dist with this folder") from None
