"""Every kind of report page in a real browser: on a desk, on a phone, in the dark, printed."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_json
from support.browser import look

from cqwen_dist.prediction.learnt_range import OUTSIDE
from cqwen_dist.prediction.table import NUMBER_COLUMNS
from cqwen_dist.tables.judging import OURS, conditional, errors, intervals, shown_rows, verdict
from cqwen_dist.tools.report.html import write_report

PHONE, DESK = 420, 1280
# Opens every page in a frame of each width, uses every switch, and writes down what there is to see.
SHELF = """<!doctype html><title>shelf</title><body><script type="application/json" id="pages">PAGES</script><script>
const found = {};
const look = (frame, name, width) => {
  const page = frame.contentDocument, root = page.documentElement;
  const figures = [...page.querySelectorAll("figure")].filter((f) => f.clientWidth);
  const empty = figures.filter((f) => !f.querySelector("svg .line, svg circle, svg rect[rx]"));
  const tops = [...page.querySelectorAll(".tile")].map((tile) => tile.getBoundingClientRect().top);
  const marks = page.querySelector(".fit figure .legend")?.innerText || "";
  const beyond = page.querySelectorAll(".fit figure:first-child .beyond").length;
  const first = page.querySelector(".charts figure").getBoundingClientRect().top;
  const axis = page.querySelector(".fit figure svg")?.textContent || "";
  const still = [], blank = [];
  for (const f of figures) {
    const button = f.querySelector("button"), link = f.querySelector("a.csv"), drawn = f.querySelector("svg");
    if (button) { button.click(); if (f.contains(drawn)) still.push(f.querySelector("figcaption").textContent); }
    link.addEventListener("click", (event) => event.preventDefault());
    link.click();
    if (decodeURIComponent(link.href).trim().split("\\n").length < 2) blank.push(link.download);
  }
  for (const box of page.querySelectorAll("#controls input")) box.click();
  found[`${name} ${width}`] = {
    figures: figures.length, empty: empty.map((f) => f.textContent), still, blank,
    wide: root.scrollWidth, paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    marks, beyond, axis, first, tiles: tops.length, rows: new Set(tops).size,
    text: /NaN|undefined|Infinity/.test(page.querySelector("main").innerText),
  };
};
const pages = JSON.parse(document.getElementById("pages").textContent), waiting = [];
for (const [name, text] of Object.entries(pages)) for (const width of [PHONE, DESK]) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  waiting.push(new Promise((done) => { frame.onload = () => { look(frame, name, width); done(); }; }));
  frame.srcdoc = text;
  document.body.append(frame);
}
Promise.all(waiting).then(() => { document.body.dataset.found = JSON.stringify(found); });
</script></body>"""


@pytest.fixture(scope="module")
def pages(one_rank: Path, two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a run, of two runs, and of a fit."""
    folder = tmp_path_factory.mktemp("pages")
    fit = folder / "fit"
    fit.mkdir()
    (fit / "run").symlink_to(one_rank)
    (fit / "fit.json").write_bytes(judged())
    found = {"run": [one_rank], "runs": [one_rank, two_ranks], "fit": [fit]}
    return {name: write_report(runs, folder / f"{name}.html") for name, runs in found.items()}


def judged() -> bytes:
    """A fit.json of 120 prices between 10 and 10,000; one prediction was held."""
    draw = np.random.default_rng(0)
    truth = 10 ** draw.uniform(1, 4, 120)
    predictions = {name: truth * 10 ** draw.normal(0, wide, 120) for name, wide in ((OURS, 0.1), ("extra trees", 0.2))}
    ends = np.stack([predictions[OURS] / 1.5, predictions[OURS] * 1.5], 1)
    ends[5], predictions[OURS][5] = (1, 1e7), 1e6
    rows = [
        {**dict.fromkeys(NUMBER_COLUMNS, float(p)), "low_90": low, "high_90": high, OUTSIDE: ""}
        for p, (low, high) in zip(predictions[OURS], ends, strict=True)
    ]
    rows[5][OUTSIDE] = "size"
    results = {name: errors(of, truth) for name, of in predictions.items()}
    results[OURS] |= intervals(ends, truth)
    prompts = [f"size: {i}\nnotes: <b>{'long ' * 40}</b>\nprice: " for i in range(120)]
    document = {"target": "price", "rows": 120, "by_log": True, "results": results, **verdict(predictions, truth)}
    document |= shown_rows(rows, prompts, truth) | conditional(predictions, results, ends, truth)
    return to_json(document)


def seen(pages: dict[str, Path], folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """What the shelf wrote down of each page and width."""
    held = json.dumps({name: page.read_text(encoding="utf-8") for name, page in pages.items()}).replace("<", "\\u003c")
    shelf = SHELF.replace("[PHONE, DESK]", f"[{PHONE}, {DESK}]").replace("PAGES", held)
    (folder / "shelf.html").write_text(shelf, encoding="utf-8")
    done = look(folder / "shelf.html", folder / "profile", "--dump-dom", *options)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(re.search(r'data-found="(.*?)"', done.stdout)[1]))


def test_every_page_works_on_a_desk_and_on_a_phone(pages: dict[str, Path], tmp_path: Path) -> None:
    found = seen(pages, tmp_path)
    assert len(found) == 6
    for name, page in found.items():
        width = name.split()[1]
        assert page["figures"] >= 20, name
        assert page["empty"] == [], f"{name}: charts without a line or a point"
        assert page["still"] == [], f"{name}: a switch that draws nothing anew"
        assert page["blank"] == [], f"{name}: CSV without a row"
        assert page["wide"] <= int(width), f"{name}: nothing scrolls sideways"
        assert not page["text"], f"{name}: no NaN"
    fit, run = found["fit 1280"], found["run 420"]
    assert fit["figures"] == found["run 1280"]["figures"] + 5
    assert fit["beyond"] == 1
    assert "triangles: 1 beyond the axis" in fit["marks"]
    assert "1 far outside of what was learnt" in fit["marks"]
    assert "10,000" in fit["axis"], "an axis of logarithms"
    assert run["first"] < 1800, "on a phone the curves are near the top"
    assert 2 * run["rows"] <= run["tiles"] + 1, "two tiles in a row"


def test_the_words_of_the_worst_rows_are_text(pages: dict[str, Path]) -> None:
    assert "&lt;b&gt;long" in pages["fit"].read_text(encoding="utf-8")


def test_every_page_follows_a_dark_desk(pages: dict[str, Path], tmp_path: Path) -> None:
    for name, page in seen(pages, tmp_path, "--blink-settings=preferredColorScheme=0").items():
        assert max(map(int, re.findall(r"\d+", page["paper"]))) < 60, f"{name}: {page['paper']}"


def test_a_fits_page_is_printed(pages: dict[str, Path], tmp_path: Path) -> None:
    look(pages["fit"], tmp_path / "profile", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    printed = (tmp_path / "page.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000, "with its charts"
