"""status.json: what a run is doing, for people, `cqwen status` and launchers (no torch)."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cqwen_dist.checkpoint.manifest import write_atomically

STATUS = "status.json"


def write_status(run_dir: Path, status: str, **details: Any) -> None:
    """running | done | fatal | ..., with step and reason; atomic."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_atomically(run_dir / STATUS, json.dumps({"status": status, **details, "time": now}))


def read_status(run_dir: Path) -> dict[str, Any]:
    """The last status written; {"status": "unknown"} where there is none."""
    try:
        found = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) and "status" in found else {"status": "unknown"}
