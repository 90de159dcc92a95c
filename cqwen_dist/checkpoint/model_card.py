"""The README.md of an exported model: what it is, what its own run measured, how to load it, what to expect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from cqwen_dist.generate.modes import MODES
from cqwen_dist.intervals import LEVELS, Intervals

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
    """A hub name as it is; of a path of this machine only its last part."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return path.name if name.startswith((".", "/", "~")) or path.is_dir() else name


def model_card(name: str, config: Any, about: Mapping[str, Any], plain: str | None = None) -> str:
    """Markdown. config: a `CausalQwenConfig`.

    about: base, step, stages, figures (an evaluation's metrics), dtype, adapter ("merged", "beside" or None), rounding
    (name -> largest relative change by the dtype). plain: the class that --as-base wrote, if it did; about["bias"] is
    then what it left out, or None.
    """
    base = about.get("base")
    hub = base is not None and base.count("/") == 1
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [causalqwen]"]
    lines += [f"base_model: {base}"] if hub else []
    lines += ["---", "", f"# {name}", "", *_introduction(config, about, plain), "| | |", "|---|---|"]
    facts = {
        "base": base,
        "trained": None if about.get("step") is None else f"{about['step']} steps, stages {about.get('stages')}",
        "backbone's precision": about.get("dtype"),
        "adapters": about.get("adapter"),
    }
    if not plain:
        facts["vocabulary, width of U"] = f"{config.vocab_size}, {config.causal_hidden_size}"
        facts["unit of the numbers' head"] = str(config.target)
    lines += [f"| {key} | {value} |" for key, value in facts.items() if value is not None]
    lines += _measured(about, plain)
    lines += ["", "## Use", "", "```python", *(_plain_use() if plain else _use()), "```"]
    if not plain:
        lines += ["", *_needs(config), "", "## Intervals", "", _intervals_text(config)]
    return "\n".join(lines) + "\n"


def _introduction(config: Any, about: Mapping[str, Any], plain: str | None) -> list[str]:
    """What kind of model it is."""
    if not plain:
        return [
            "A CausalQwen: a language model that reads and writes numbers as numbers. A numeral is one token, "
            "`<NUM>`, with its value beside it; words are chosen one-vs-rest, P = P(S > C), and numbers come with "
            "their uncertainty.",
            "",
        ]
    lines = [
        f"**This model writes no numbers.** A plain `{plain}` folded out of a CausalQwen: its logits are that model's "
        f"loc_S. Sampling from it is the CausalQwen's mode `compatible`. {_plain_numbers(config)}",
        "",
    ]
    if about.get("bias"):
        left_out = f"a bias of up to {about['bias']:.3g} in the logits, which it has no place for."
        lines += [f"**Left out:** {left_out}", ""]
    return lines


def _measured(about: Mapping[str, Any], plain: str | None) -> list[str]:
    """The run's metrics, and what rounding changes. None of them is a plain model's: it reads and ranks otherwise."""
    lines, metrics = [], about.get("figures")
    if plain:
        lines += ["", "Nothing was measured of this model: its run's metrics are the CausalQwen's."]
    elif metrics:
        lines += ["", "## Measured on held-out texts of its own run", "", "| | |", "|---|---|"]
        lines += [f"| {text} | {metrics[key]:.4g} |" for key, text in SHOWN.items() if key in metrics]
    elif metrics is not None:  # unknown where this was exported from a folder that says nothing
        lines += ["", "Its run has measured nothing on held-out texts."]
    if about.get("rounding"):
        changes = ", ".join(f"{key} {value:.2g}" for key, value in about["rounding"].items())
        lines += ["", f"Rounded to {about['dtype']}; largest relative change on sixteen tokens: {changes}."]
    return lines


def _plain_numbers(config: Any) -> str:
    if config.added_rows:
        return (
            f"The base's vocabulary has no row to spare: the {config.added_rows} that were added for `<NUM>` are left "
            "out again, so it reads a number as the digits that its tokenizer makes of it, and writes no `<NUM>`: what "
            "was trained to write a number there as one token has no token to write."
        )
    return (
        f"Where the CausalQwen would write a number it writes the word `<NUM>` (id {config.num_token_id}), which has "
        "no value. It reads a number as that word, or as the digits that its tokenizer makes of it."
    )


def _use() -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)',
        'tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)',
        'prompt = tokenizer("He paid", return_tensors="pt")',
        'ids, numbers = model.generate(**prompt, digits="auto", return_numbers=True)',
        "print(tokenizer.decode(ids[0], numbers.values[0]))",
        'print(*numbers.records(0), sep="\\n")  # one line a number, with its 90 % interval',
    ]


def _needs(config: Any) -> list[str]:
    """What the snippet needs, and what else there is."""
    needed = "torch and transformers" if config.lora is None else "torch, transformers, and peft for the adapters"
    return [
        f"This needs {needed}; the code is in this folder (`*_causal_qwen.py`; written with transformers "
        f"{transformers.__version__}). With the package cqwen_dist, `import cqwen_dist.auto` stands for "
        "`trust_remote_code=True`.",
        "",
        '`pipeline("text-generation", model=".", trust_remote_code=True)` writes the same text. `generate` and the '
        f"pipeline take `mode=`: {', '.join(MODES)}. All but standard draw (`seed=`); "
        '`mode="individual", num_return_sequences=8` writes what eight individuals would.',
    ]


def _plain_use() -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
    ]


def _intervals_text(config: Any) -> str:
    intervals = Intervals.from_dict(config.calibration)
    if not intervals.factors:
        return (
            "A number's intervals are the Cauchy's own quantiles. Where errors have light tails they are too wide: "
            "90 % may hold nearly all."
        )
    known = ", ".join(f"{level:.0%} x {intervals.factors[level]:.3g}" for level in LEVELS if level in intervals.factors)
    return (
        f"Recalibrated by split conformal prediction on {intervals.n} held-out numbers (`calibration.json`): the "
        f"Cauchy's own half-widths, {known}. They hold for numbers like those."
    )
