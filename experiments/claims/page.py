"""docs/experiments.md: the claims, verdicts and pictures between its marks come from the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments.md"
PICTURES = ROOT / "docs" / "experiments"  # NAME.json and NAME-PICTURE.svg
OTHER = "qwen2.5-0.5b"  # a second base, in a folder of its name
CLAIM_HEAD = ["claim", "measure", "bar", "mean", "95 % interval", "verdict"]
VERDICTS = {"holds": "yes", "does not hold": "no", "undecided": "undecided"}


def filled(page: str, results: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]] | None = None) -> str:
    """The page with the text between `<!-- NAME -->` and `<!-- end -->` replaced, for each result by name.

    others: results on a second base, for a further column. Raises ValueError for a result without a mark.
    """
    for name, result in results.items():
        mark, end = f"<!-- {name} -->\n", "<!-- end -->"
        if mark not in page:
            raise ValueError(f"no mark {mark.strip()} in the page")
        before, _, rest = page.partition(mark)
        page = before + mark + section(name, result, (others or {}).get(name)) + end + rest.partition(end)[2]
    return page


def section(name: str, result: dict[str, Any], other: dict[str, Any] | None = None) -> str:
    """The Markdown of one experiment: how it was run, its claims, its pictures."""
    run = result["run"]
    how = f"`{run['command']}`: {_conditions(run)}. {run['sizes'][0].upper()}{run['sizes'][1:]}."
    if other is not None:
        how += f" On {OTHER}: {_conditions(other['run'])}."
    files = [f"[{name}.json](experiments/{name}.json)"]
    files += [f"[{OTHER}](experiments/{OTHER}/{name}.json)"] if other is not None else []
    claims = [
        [c["claim"], c["measure"], shown(c["bar"]), shown(c["mean"]), _range(c), f"**{VERDICTS[c['verdict']]}**"]
        for c in result["claims"]
    ]
    if other is not None:
        theirs = {(c["claim"], c["measure"]): f"{shown(c['mean'])}, {_verdict(c)}" for c in other["claims"]}
        # A claim may be younger than the other base's run
        claims = [[*row, theirs.get((row[0], row[1]), "")] for row in claims]
    head = [*CLAIM_HEAD, OTHER] if other is not None else CLAIM_HEAD
    parts = [f"{how} Tables: {', '.join(files)}.", *([table(head, claims)] if claims else [])]
    parts += [f"![{picture}](experiments/{name}-{picture}.svg)" for picture in result["pictures"]]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _conditions(run: dict[str, Any]) -> str:
    seeds = "one seed" if run["seeds"] == 1 else f"{run['seeds']} seeds"
    return f"{run['date']}, {seeds}, {run['machine']}, {run['seconds'] / 60:.0f} minutes"


def _verdict(claim: dict[str, Any]) -> str:
    """The verdict; one seed has no interval, so only the side of the bar."""
    if claim["low"] is not None:
        return VERDICTS[claim["verdict"]]
    return "above the bar" if claim["mean"] > claim["bar"] else "not above"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows)])


def _plain(cell: str) -> str:
    """A cell that cannot break the table."""
    return re.sub(r"\s+", " ", cell).replace("|", "\\|").replace("<", "&lt;").strip()


def shown(value: float | None) -> str:
    """A number for a table; "none" where it is not known."""
    return "none" if value is None else f"{value:.3f}"


def _range(claim: dict[str, Any]) -> str:
    return "none" if claim["low"] is None else f"{claim['low']:.3f} to {claim['high']:.3f}"


def committed(base: str = "") -> dict[str, dict[str, Any]]:
    """The results that the page shows, by name. base: the folder of the second base's."""
    files = sorted((PICTURES / base).glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def write_page(out: Path, names: list[str]) -> list[str]:
    """Copy the results of these experiments from `out` beside the page and fill the page; returns the names found."""
    PICTURES.mkdir(exist_ok=True)
    found = [name for name in names if (out / f"{name}.json").is_file()]
    for name in found:
        result = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for picture, drawing in result["pictures"].items():
            (PICTURES / f"{name}-{picture}.svg").write_text(drawing, encoding="utf-8")
        shown = {**result, "pictures": list(result["pictures"])}
        (PICTURES / f"{name}.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), committed(), committed(OTHER)), encoding="utf-8")
    return found
