"""Pictures and tables of what the model does: individuals who write, people under treatments, intervals that widen.

It claims nothing. The people and the curve are those of the first seed of `treatments`.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.line_chart import line_chart
from cqwen_dist.generate.continuation import counterfactuals
from cqwen_dist.run.files import write_atomically
from experiments.claims import individuals, treatments
from experiments.claims.people import DOSES
from experiments.claims.subject import Ask

TITLE = "Gallery"
PROMPTS = (
    "Question: Tom has 3 bags with 12 apples each and gives 8 apples to his sister. How many apples are left?\n"
    "Answer: Tom",
    "Once upon a time there was a girl who lived by the sea.",
)
WORDS = 20


def of_first(ask: Ask) -> dict[str, Any]:
    """Tables and pictures of the first seed, without claims. What writers wrote is read where it was made before.

    Raises `UserError`.
    """
    folder = ask.out / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    wrote = folder / "writers.json"
    if not wrote.is_file():
        write_atomically(wrote, json.dumps(written(ask), indent=1))
    found = treatments.of_seed(ask)
    kept = json.loads(wrote.read_text(encoding="utf-8"))
    return {
        "claims": [],
        "tables": [*(_writers(prompt, texts) for prompt, texts in kept.items()), people_table(found["people"])],
        "pictures": {
            "interval": interval_chart(found["curve"], "CausalQwen"),
            "mended": interval_chart(found["curve"], "scale of errors"),
            "width": width_chart(found["width"]),
        },
        "details": {"writers": kept, "people": found["people"], "curve": found["curve"]},
    }


def written(ask: Ask) -> dict[str, dict[str, list[str]]]:
    """What the same writers write after each prompt, at two temperatures of words; the start is that of
    `individuals`."""
    model, tokenizer = individuals.start_of(ask)
    found: dict[str, dict[str, list[str]]] = {prompt: {} for prompt in PROMPTS}
    for by, wide in (("as inferred", 1.0), ("the default", "auto")):
        ask.say(f"{ask.size.individuals} writers: word temperature {by}")
        for prompt in PROMPTS:
            options: dict[str, Any] = {"word_temperature": wide, "max_new_tokens": WORDS}
            written_by = counterfactuals(model, tokenizer, prompt, ask.size.individuals, seed=0, digits=3, **options)
            found[prompt][by] = [each.text for each in written_by]
    return found


def _writers(prompt: str, texts: dict[str, list[str]]) -> dict[str, Any]:
    rows = [[str(number), *row] for number, row in enumerate(zip(*texts.values(), strict=True), 1)]
    return {
        "title": f"The same writers after: {' '.join(prompt.split())} ...",
        "head": ["writer", *texts],
        "rows": rows,
    }


def people_table(people: list[dict[str, Any]]) -> dict[str, Any]:
    """A table, four lines a person: predicted with its interval, the fact kept by both scales, the truth."""
    rows = []
    for person in people:
        about = f"{person['age']} years, severity {person['severity']}, {person['symptom']}; given {person['dose']}"
        spans = zip(person["predicted"], person["low"], person["high"], strict=True)
        rows += [
            [f"{about}: {person['outcome']:.1f}", "predicted", *(f"{p:.1f} ({a:.1f} to {b:.1f})" for p, a, b in spans)],
            ["", "the fact kept", *(f"{y:.1f}" for y in person["kept"])],
            ["", "the fact kept, scale of errors", *(f"{y:.1f}" for y in person["mended"])],
            ["", "true", *(f"{y:.1f}" for y in person["true"])],
        ]
    head = ["person, dose given, its outcome", "", *(f"dose {dose:g}" for dose in DOSES)]
    return {"title": "People who were not learnt from; y(dose), with 90 % intervals", "head": head, "rows": rows}


def interval_chart(curve: dict[str, Any], law: str) -> str:
    """A law's 90 % interval for one person over the dose, beside the truth's. law: the lines whose names begin so."""
    shown = {name: line for name, line in curve["lines"].items() if name.startswith((law, "CausalQwen, med", "truth"))}
    lines = {name: list(zip(curve["doses"], line, strict=True)) for name, line in shown.items()}
    person = curve["person"]
    title = f"90 % interval of a person of {person['age']} years, severity {person['severity']}, {person['symptom']}"
    return line_chart(title, lines, "dose", "outcome")


def width_chart(width: dict[str, list[float]]) -> str:
    """The mean width of intervals by dose, of every law and of the truth."""
    lines = {name: list(zip(DOSES, line, strict=True)) for name, line in width.items()}
    return line_chart("Mean width of the 90 % interval", lines, "dose", "width", points=True)
