"""README.md for an exported model: description, measured metrics, how to load it, limits."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import transformers
from jinja2 import Template

from cqwen_dist.generate.modes import MODES
from cqwen_dist.heads.intervals import LEVELS, Intervals

SHOWN = {
    "eval/accuracy": "next-word accuracy",
    "eval/base_accuracy": "the base model's own",
    "eval/num_f1": "`<NUM>` F1",
    "eval/reg_mdae": "median absolute error of numbers",
    "eval/baseline_mdae": "always the training median",
    "eval/reg_mae": "mean absolute error of numbers",
    "eval/coverage_90": "raw 90 % interval holds",
    "eval/coverage_90_conformal": "recalibrated 90 % interval holds",
}


def public_name(name: str | None) -> str | None:
    """A hub name unchanged; for a local path, only the last part."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return path.name if name.startswith((".", "/", "~")) or path.is_dir() else name


def model_card(name: str, config: Any, about: Mapping[str, Any], plain: str | None = None) -> str:
    """Render Markdown. config: a `CausalQwenConfig`.

    about: base, step, stages, figures (evaluation metrics, or None), dtype, adapter (its place, or None), rounding
    (name -> largest relative change from the dtype), quantize and rounded (`model.quantize` of the run, and the changes
    by the full base). plain: class written by --as-base, or None; about["bias"] is then
    the omitted bias, or None.
    """
    facts = {
        "base": about.get("base"),
        "trained": f"{about['step']} steps, stages {about.get('stages')}" if about.get("step") is not None else None,
        "backbone's precision": about.get("dtype"),
        "adapters": about.get("adapter"),
        "vocabulary, width of U": None if plain else f"{config.vocab_size}, {config.causal_hidden_size}",
        "unit of the numbers' head": None if plain else config.target,
    }
    text = files("cqwen_dist.tools.export").joinpath("model_card.md.j2").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    intervals, modes = Intervals.from_dict(config.calibration), ", ".join(MODES)
    known = {"name": name, "config": config, "about": about, "plain": plain, "facts": facts, "intervals": intervals}
    return template.render(known, shown=SHOWN, modes=modes, levels=LEVELS, transformers=transformers.__version__)
