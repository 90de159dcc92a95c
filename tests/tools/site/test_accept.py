"""`cqwen accept`: what passes and what does not, and the whole table on two ranks of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from support.ranks import run_ranks
from support.runs import cqwen, cqwen_forked

from cqwen_dist.parallel.collectives import Stopped
from cqwen_dist.run import lock
from cqwen_dist.tools.site import accept as module
from cqwen_dist.tools.site.accept import Row, Site, _differences, figures, of_steps
from cqwen_dist.tools.site.measure import OPERATIONS, bus_bandwidth, collective_seconds
from cqwen_dist.tools.site.ranks import layouts

ALONE = {"ranks": 1, "layouts": [{"tokens_per_s": 100.0}]}


def steps(**changes: float) -> dict[str, object]:
    row = {"zero_stage": 2, "vocab_group_size": 2, "said_bytes": 500, "planned_bytes": 500, "measured_mib": 100.0}
    return {"ranks": 2, "layouts": [{**row, "planned_mib": 104.0, "tokens_per_s": 150.0, **changes}]}


def verdicts(rows: list[Row]) -> list[bool | None]:
    return [row.passed for row in rows]


def test_accepts_exact_messages_and_memory_within_a_tenth() -> None:
    rows = of_steps(ALONE, steps())
    assert verdicts(rows) == [True, True, None]
    assert rows[2].what == "scaling efficiency: ZeRO-2, vocabulary group 2"
    assert rows[2].found == "0.75: 150 tokens/s over 2 times one rank's"
    assert verdicts(of_steps(ALONE, steps(said_bytes=501))) == [False, True, None]
    assert verdicts(of_steps(ALONE, steps(planned_mib=111.0))) == [True, False, None]


def test_bandwidths_are_shown_by_operation_and_size() -> None:
    row = of_steps(ALONE, {**steps(), "gib_per_s": {"all-gather": {"1": 0.25, "16": 1.5}}})[-1]
    assert (row.what, row.passed) == ("bandwidth of all-gather", None)
    assert row.found == "GiB/s a link: 0.25 of 1 MiB, 1.50 of 16 MiB"


def bandwidths() -> dict[str, list[float]]:
    device = torch.device("cpu")
    return {name: list(collective_seconds([4096, 1 << 20], device, 2, name).values()) for name in OPERATIONS}


def test_collectives_are_timed_alike_on_every_rank() -> None:
    one, two = run_ranks(bandwidths, 2)
    assert one == two, "the slowest rank's median"
    assert all(seconds > 0 for times in one.values() for seconds in times)
    assert bus_bandwidth(100, 2.0, 4) == 2 * 0.75 * 50
    assert bus_bandwidth(100, 2.0, 4, "all-gather") == 0.75 * 50


def test_refuses_more_gpus_than_there_are() -> None:
    done = cqwen_forked("accept", "--gpus", 64)
    assert done.returncode == 2
    assert "--gpus" in done.stderr
    assert "--ranks" in done.stderr


def test_layouts_cover_every_stage_and_a_group_that_divides_the_ranks() -> None:
    assert layouts(1) == [(1, 1)]
    assert layouts(2) == [(1, 1), (2, 2), (3, 2)]
    assert layouts(12) == [(1, 1), (2, 6), (3, 6)]
    assert layouts(64) == [(1, 1), (2, 8), (3, 8)]


def test_the_difference_of_runs_is_their_worst_loss_or_norm(tmp_path: Path) -> None:
    run = [(2.0, 8.0)] * 10
    assert max(_differences(run, run)) == 0
    assert max(_differences(run, [*run[:9], (2.0, 10.0)])) == pytest.approx(0.25)
    assert max(_differences(run, run[:9])) == float("inf")
    assert figures(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"train/total_loss": 2.0, "train/grad_norm": 8.0}\n{"train/tot')
    assert figures(tmp_path) == [(2.0, 8.0)], "a line that a kill cut off is none"


def test_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path)
    assert done.returncode == 2
    assert "--folder" in done.stderr
    assert "empty" in done.stderr
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path / "thesis" / "x")
    assert (done.returncode, "--folder: found" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("stopped", ["run_words", "launch"])
def test_one_signal_ends_accept_and_its_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: str) -> None:
    began = []

    def ranks(name: str) -> object:
        def run(*_: object, **__: object) -> int:
            began.append(name)
            return 75 if name == stopped else 0

        return run

    for name in ("run_words", "launch"):
        monkeypatch.setattr(module, name, ranks(name))
    monkeypatch.setattr(module.Path, "is_file", lambda _: True)
    monkeypatch.setattr(module.Path, "read_text", lambda *_, **__: '{"device": "cpu", "layouts": []}')
    monkeypatch.setattr(module, "of_steps", lambda *_: [])
    monkeypatch.setattr(lock, "BEAT_S", 0.01)  # the lock reads its holder from the text above, and waits for its beat
    site = Site(2, None, tmp_path / "site", began.append)
    with pytest.raises(Stopped):
        site.accept()
    assert began[-1] == stopped
    assert began.count(stopped) == 1
    with pytest.raises(Stopped):  # the same command begins anew
        site.accept()
    (archived,) = site.folder.glob("archived-*")
    assert (archived / "config.yaml").is_file()


def test_ctrl_c_ends_the_run_that_was_to_be_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began = []

    def start(command: list[str], **options: object) -> object:
        began.append(Popen(["sleep", "60"]))
        return began[0]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Site(2, None, tmp_path, print).killed()
    assert began[0].poll() is not None


@pytest.mark.slow
def test_accept_passes_on_two_ranks_of_this_machine(tmp_path: Path) -> None:
    done = cqwen("accept", "--ranks", 2, "--folder", tmp_path / "site", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "site" / "accept.json").read_text())
    by_name = {row["what"]: row for row in found["rows"]}
    assert len(by_name) == 3 * 3 + 3 + 3 + 1
    assert [name for name, row in by_name.items() if row["passed"] is False] == []
    assert by_name["killed and gone on with"]["found"].endswith("equal")
