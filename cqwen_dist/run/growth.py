"""How the config of a run that has begun may change: what lies ahead is free, what lies behind is not (no torch).

A stage has begun when the newest checkpoint has one of its steps. The stage of that step may get another length. Later
stages may change in every key, and further ones may be appended. Keys that only say how to compute are free anyway
(`config.reading.RESUMABLE`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cqwen_dist.config import Config, UserError
from cqwen_dist.run.files import LATEST, STATE, read_object, read_small

LENGTH = ("steps", "epochs", "until")
Change = tuple[str, object, object]  # key, before, now


def refuse_past_changes(old: Config, changes: list[Change], folder: Path, where: str) -> None:
    """Raises `UserError` by key for a change of what has begun. folder: the run's; where: its config, for the error."""
    step, stops = _progress(folder)
    current = next((i for i, stop in enumerate(stops) if step <= stop), len(stops) - 1) if step else -1
    for key, before, now in changes:
        words = key.split(".")
        if words[0] != "stages":
            allowed = f"{before!r}, with which the run in {folder} began (or another run.dir; model.warm_start={folder}"
            raise UserError(key, now, f"{allowed} takes its weights along)", where)
        index = int(words[1])
        if index > current:
            continue
        name = old.stages[index].name
        if index < current or words[2] not in LENGTH:
            said = "is over" if index < current else "has begun: only its steps, epochs or until may change"
            raise UserError(key, now, f"{before!r}, as stage {name} {said} (later stages are free)", where)
        taken = step - (stops[index - 1] if index else 0)
        if words[2] == "steps" and isinstance(now, int) and now < taken:
            raise UserError(key, now, f"{taken} or more, which stage {name} has taken", where)


def _progress(folder: Path) -> tuple[int, list[int]]:
    """(steps of the newest checkpoint, where each stage ends by it); (0, []) before the first one."""
    try:
        state: dict[str, Any] = read_object(folder / read_small(folder / LATEST).strip() / STATE)
        return int(state["step"]), [int(stop) for stop in state["schedule"]["stops"]]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, []
