"""The report of real (tiny) runs: complete, self-contained, and drawn by a real browser."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.runs import cqwen_forked

from cqwen_dist.config import UserError
from cqwen_dist.tools.report.html import render, write_report
from cqwen_dist.tools.report.run_data import POINTS, read_run


@pytest.fixture(scope="module")
def one(one_rank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_report([one_rank], page := tmp_path_factory.mktemp("report") / "one.html")
    return page


@pytest.fixture(scope="module")
def both(one_rank: Path, two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_report([one_rank, two_ranks], page := tmp_path_factory.mktemp("report") / "both.html")
    return page


def data_of(page: Path) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)[1])


def test_the_page_loads_no_other_files(one: Path, both: Path) -> None:
    for page in (one, both):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(link|img|iframe|script)[^>]+(src|href)\s*=", text)
        assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)
        assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert page.stat().st_size < 400_000


def test_every_metric_of_the_run_is_on_the_page(one: Path, one_rank: Path) -> None:
    run, data = read_run(one_rank), data_of(one)
    drawn = {name for chart in data["charts"] for name, _ in chart["series"]} | set(data["others"])
    assert set(run.curves) <= drawn
    assert data["runs"][0]["curves"]["train/total_loss"]["x"] == [1, 2, 3, 4, 5, 6]
    assert [stage["name"] for stage in data["runs"][0]["stages"]] == ["heads", "lora"]
    assert [(stage["start"], stage["stop"]) for stage in data["runs"][0]["stages"]] == [(0, 3), (3, 6)]
    assert [evaluation["step"] for evaluation in data["runs"][0]["evaluations"]] == [0, 3, 6]
    text = one.read_text()
    assert "train.global_batch_size" not in text, "one run differs in nothing"
    assert "global_batch_size: 12" in text
    assert json.loads((one_rank / "environment.json").read_text())["platform"] in text


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser() -> str:
    """The browser's path; skips the test with the reason where none is installed. CQWEN_BROWSER names another."""
    named = os.environ.get("CQWEN_BROWSER")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to look with: none of {', '.join(NAMES)} is installed")
    return found


def look(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a local page, let its scripts run, and give the options' output (--dump-dom, --screenshot=...).

    Names resolve to nothing: a page that asks the network for anything shows it among the console's errors on stderr.
    """
    usual = "--headless=new --no-sandbox --disable-gpu --no-first-run --enable-logging=stderr --window-size=1280,2400"
    own = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=4000"]
    command = [browser(), *usual.split(), *own, *options, page.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True)


def charts_in(dom: str) -> int:
    return int(re.search(r'data-charts="(\d+)"', dom)[1])


def test_a_browser_draws_every_chart_without_errors(one: Path, tmp_path: Path) -> None:
    seen = look(one, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in seen.stderr, [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
    data = data_of(one)
    assert charts_in(seen.stdout) == len(data["charts"]) + len(data["others"])
    figures = re.findall(r"<figure>.*?</figure>", seen.stdout, re.S)
    assert len(figures) == charts_in(seen.stdout) + 4, "coverage, PIT, predicted against true, abstaining"
    for figure in figures:
        title = re.search(r"<figcaption>(.*?)</figcaption>", figure)[1]
        assert re.search(r'<path class="line" d="M[\d.-]|<circle |<rect x=', figure), f"{title}: nothing drawn"
    for bad in ("NaN", "undefined", "Infinity"):
        assert bad not in re.sub(r"<script.*?</script>", "", seen.stdout, flags=re.S), bad


def test_a_figure_that_is_infinite_now_is_not_shown_as_it_was_before(one_rank: Path, tmp_path: Path) -> None:
    """metrics.jsonl has null for it."""
    (tmp_path / "config.yaml").write_text((one_rank / "config.yaml").read_text())
    figures = [{"eval/perplexity": 7.5, "eval/reg_mae": None}, {"eval/perplexity": None, "eval/reg_mae": 3.0}]
    lines = [{"step": step, "stage": "heads", "eval/accuracy": 0.25, **of} for step, of in enumerate(figures)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert run.last == {"eval/accuracy": 0.25, "eval/reg_mae": 3.0}
    assert run.curves["eval/perplexity"].y == [7.5]


def test_a_run_leaves_its_report_and_the_verb_writes_one(one_rank: Path, two_ranks: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    done = cqwen_forked("report", one_rank, two_ranks, "--out", out)
    assert done.returncode == 0, done.stderr
    assert out.read_text().startswith("<!doctype html>")
    assert str(out) in done.stdout
    assert re.search(rf"^  bad   {one_rank}: Numbers are hardly better|^  good  {one_rank}: ", done.stdout, re.M)
    bad = re.findall(rf"^  bad   {one_rank}: (.*)$", done.stdout, re.M)
    done = cqwen_forked("report", tmp_path)
    assert done.returncode == 2
    assert "RUN" in done.stderr
    assert done.stderr.count("\n") == 1
    # the run is done, so this trains nothing and leaves the page
    config = tmp_path / "config.yaml"
    config.write_text((one_rank / "config.yaml").read_text())
    (one_rank / "report.html").unlink(missing_ok=True)
    done = cqwen_forked("train", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("note: ") == len(bad)
    assert all(f"note: {title}" in done.stdout for title in bad), "the worst of the page is on the screen too"
    assert (one_rank / "report.html").read_text().startswith("<!doctype html>")


def test_hostile_names_and_broken_lines_are_harmless(one_rank: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = (one_rank / "config.yaml").read_text()
    name = "</script><script>alert(1)</script>"
    text = re.sub(r"^  name: null$", f"  name: '{name}'", text, flags=re.M)
    assert name in text
    (folder / "config.yaml").write_text(text)
    lines = [json.dumps({"step": step, "stage": "a", "train/total_loss": 1.0 / step}) for step in range(1, 2001)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2001, "tra']))
    run = read_run(folder)
    assert run.steps == 2000
    curve = run.curves["train/total_loss"]
    assert len(curve.x) == len(curve.y) == POINTS, "thinned"
    assert curve.low is not None
    assert curve.high[0] == 1.0
    page = render([run])
    assert name not in page
    assert page.count("<script") == 2
    with pytest.raises(UserError, match="RUN"):
        read_run(tmp_path / "nowhere")
