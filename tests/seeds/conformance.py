"""The specification, row by row: `python tests/seeds/conformance.py` prints the page, `make docs` writes it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DECISIONS, ROWS = ROOT / "docs" / "decisions.md", Path(__file__).with_name("rows.yaml")
HEAD = """# The seeds, row by row

The requirements in five documents by CausalQwen's author (S0 to S4, see CONTRIBUTING.md), with the files that implement
them, the tests that check them, and a decision for each departure. `make docs` writes this page from
`tests/seeds/rows.yaml`. The suite fails for a row without a test or a decision, and for a test that does not exist.

| # | asked | seed | lives in | tests | decisions |
|---|---|---|---|---|---|
"""


@cache
def rows() -> dict[int, dict[str, Any]]:
    return dict(yaml.safe_load(ROWS.read_text(encoding="utf-8")))


def known_tests() -> dict[str, Path]:
    """ "file stem::function" -> file, of all tests."""
    return {
        f"{path.stem}::{name}": path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }


def decisions_there() -> dict[str, str]:
    """Identifier -> title, of every heading of docs/decisions.md."""
    return dict(re.findall(r"^### (D[\w-]+): (.+)$", DECISIONS.read_text(encoding="utf-8"), re.MULTILINE))


def lives_at(place: str) -> Path:
    """A place of rows.yaml: below the package, or below the root."""
    inside = ROOT / "cqwen_dist" / place
    return inside if inside.exists() else ROOT / place


def page() -> str:
    there, titles = known_tests(), decisions_there()
    lines = []
    for number, row in rows().items():
        lives = ", ".join(f"`{lives_at(place).relative_to(ROOT)}`" for place in row["lives"])
        tests = "<br>".join(f"`{there[t]}::{t.split('::')[1]}`" for t in row.get("tests", []))
        links = ", ".join(
            f"[{d}](decisions.md#{re.sub(r'[^a-z0-9_ -]', '', f'{d}: {titles[d]}'.lower()).replace(' ', '-')})"
            for d in row.get("decisions", [])
        )
        asks = row["asks"].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {number} | {asks} | {row['seed']} | {lives} | {tests} | {links} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
