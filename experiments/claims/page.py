"""docs/experiments.md: the tables and verdicts between its marks come from the results, and the pictures beside it
too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments.md"
PICTURES = ROOT / "docs" / "experiments"  # NAME.json and NAME-PICTURE.svg
CLAIM_HEAD = ["claim", "measure", "bar", "mean over seeds", "95 % interval", "verdict"]


def filled(page: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with what stands between `<!-- NAME -->` and `<!-- end -->` written anew, for each result by name.

    Raises ValueError for a result without a mark.
    """
    for name, result in results.items():
        mark, end = f"<!-- {name} -->\n", "<!-- end -->"
        if mark not in page:
            raise ValueError(f"no mark {mark.strip()} in the page")
        before, _, rest = page.partition(mark)
        page = before + mark + section(name, result) + end + rest.partition(end)[2]
    return page


def section(name: str, result: dict[str, Any]) -> str:
    """The Markdown of one experiment: how it was run, its claims, its tables, its pictures."""
    run = result["run"]
    seeds = "one seed" if run["seeds"] == 1 else f"{run['seeds']} seeds (0 to {run['seeds'] - 1})"
    told = (
        f"`{run['command']}`, {run['date']}, {seeds}, {run['machine']}, {run['seconds'] / 60:.0f} minutes. "
        f"{run['sizes'][0].upper()}{run['sizes'][1:]}. Data: {run['data']}."
    )
    claims = [
        [c["claim"], c["measure"], shown(c["bar"]), shown(c["mean"]), _range(c), f"**{c['verdict']}**"]
        for c in result["claims"]
    ]
    parts = [told, *([table(CLAIM_HEAD, claims)] if claims else [])]
    parts += [f"{found['title']}:\n\n{table(found['head'], found['rows'])}" for found in result["tables"]]
    parts += [f"![{picture}](experiments/{name}-{picture}.svg)" for picture in result["pictures"]]
    return "\n" + "\n\n".join(parts) + "\n\n"


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


def committed() -> dict[str, dict[str, Any]]:
    """The results whose tables the page shows, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PICTURES.glob("*.json"))}


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
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), committed()), encoding="utf-8")
    return found
