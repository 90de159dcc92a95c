"""Runs the experiments by name: seed after seed, each kept when it is done, then one JSON and pictures for each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from cqwen_dist.config import UserError
from cqwen_dist.run.files import write_atomically
from experiments.claims import (
    forgetting,
    grid,
    growth,
    individuals,
    one_vs_rest,
    stages,
    treatments,
    uncertainty,
)
from experiments.claims.page import shown
from experiments.claims.scores import scores_of
from experiments.claims.subject import Ask
from experiments.claims.texts import SIZES, Sizes
from experiments.learn.arms import require_base

NAMES = {
    "uncertainty": uncertainty.TITLE,
    "one_vs_rest": one_vs_rest.TITLE,
    "individuals": individuals.TITLE,
    "grid": grid.TITLE,
    "stages": stages.TITLE,
    "forgetting": forgetting.TITLE,
    "treatments": treatments.TITLE,
}
SEPARATE: dict[str, tuple[Callable[[Ask], Any], Callable[[list[Any]], dict[str, Any]]]] = {
    "grid": (grid.of_seed, grid.summary),
    "stages": (stages.of_seed, stages.summary),
    "forgetting": (forgetting.of_seed, forgetting.summary),
    "treatments": (treatments.of_seed, treatments.summary),
}
OWN_DATA = {"treatments": "made-up people"}


def run(
    names: list[str],
    base: str,
    data: str,
    out: Path,
    scale: str = "small",
    seeds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """The results of these experiments by name, JSON-ready; each is written to out/NAME.json and out/NAME-*.svg.

    What was measured before is read again: a seed of `uncertainty` and `one_vs_rest` (they share it) or of
    `individuals`, if base, data, scale and count of seeds are the same. Raises `UserError`.
    """
    for name in names:
        if name not in NAMES:
            raise UserError("NAME", name, ", ".join(NAMES))
    if scale not in SIZES:
        raise UserError("--scale", scale, " or ".join(SIZES))
    require_base(base)
    size = SIZES[scale]
    _refuse_others(out, {"base": base, "data": data, "scale": scale, "sizes": list(size)})
    found = {}
    for name in names:
        began = time.monotonic()
        result = _result(name, base, data, out, size, seeds, say)
        spent = out / f"{name}.seconds"  # a resumed experiment counts its earlier parts
        seconds = time.monotonic() - began + (float(spent.read_text()) if spent.is_file() else 0.0)
        write_atomically(spent, f"{seconds:.0f}")
        about = {
            "command": f"python -m experiments {name}" + ("" if scale == "small" else f" --scale {scale}"),
            "date": date.today().isoformat(),
            "seeds": seeds,
            "seconds": seconds,
            "machine": _machine(),
            "data": f"{OWN_DATA.get(name, Path(data).name)} on {Path(base).name}",
            "sizes": sizes_of(name, size),
        }
        found[name] = json.loads(to_json({"run": about, **result}, inf_nan_mode="null"))
        write_atomically(out / f"{name}.json", json.dumps(found[name], indent=1))
        for picture, drawing in result["pictures"].items():
            write_atomically(out / f"{name}-{picture}.svg", drawing)
        for claim in found[name]["claims"]:
            say(f"{claim['verdict']}: {claim['claim']} ({claim['measure']} {shown(claim['mean'])})")
    return found


def _result(
    name: str, base: str, data: str, out: Path, size: Sizes, seeds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Claims, tables, pictures, details of one experiment."""
    say(f"{NAMES[name]} ({name})")
    asks = [Ask(out, base, data, size, seed, seeds, say) for seed in range(seeds)]
    if name == "individuals":
        return individuals.summary(individuals.of_seeds(asks), size.individuals)
    if name in SEPARATE:
        of_seed, summary = SEPARATE[name]
        return summary([of_seed(ask) for ask in asks])
    scores = [scores_of(ask) for ask in asks]
    if name == "uncertainty":
        return uncertainty.summary(scores)
    return one_vs_rest.summary(scores, [growth.of_seed(ask) for ask in asks])


def sizes_of(name: str, size: Sizes) -> str:
    """The sizes that matter to an experiment, in words."""
    start = f"{size.held_out} held-out texts a seed; a start from some {size.calibration} tokens"
    trainings = (
        f"{start}; heads: {size.grid_steps} steps of {size.step_tokens} positions; "
        f"LoRA: {size.lora_heads} + {size.lora_steps} steps of {size.lora_texts} texts"
    )
    return {
        "individuals": f"{size.individuals} writers, {size.prompts} prompts, {size.words} words each",
        "grid": f"{start}; {size.grid_steps} steps of {size.step_tokens} positions",
        "stages": trainings,
        "forgetting": trainings,
        "treatments": f"{size.people} people to learn from, {size.asked} others, {size.minutes:g} minutes asked of fit",
    }.get(name, f"{start}; {size.steps} steps of {size.step_tokens} positions")


def _refuse_others(out: Path, asked: dict[str, Any]) -> None:
    """Raises `UserError` where the folder holds results of another base, data or scale."""
    note = out / "asked.json"
    if note.is_file() and (before := json.loads(note.read_text(encoding="utf-8"))) != asked:
        key = next(name for name in asked if before.get(name) != asked[name])
        raise UserError("--out", str(out), f"another folder: this one has results with {key} {before.get(key)}")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(note, json.dumps(asked))


def _machine() -> str:
    threads = torch.get_num_threads()
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
