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
from cqwen_dist.tools.site import accept as module
from cqwen_dist.tools.site.accept import STOPPED, Site, _differences, _not_stopped, layouts
from cqwen_dist.tools.site.measure import all_reduce_seconds, bus_bandwidth


def times() -> list[float]:
    return list(all_reduce_seconds([4096, 1 << 20], torch.device("cpu"), 2).values())


def test_collectives_are_timed_alike_on_every_rank() -> None:
    one, two = run_ranks(times, 2)
    assert one == two, "the slowest rank's median"
    assert all(seconds > 0 for seconds in one)
    assert bus_bandwidth(100, 2.0, 4) == 2 * 0.75 * 50


def test_layouts_cover_every_stage_and_a_group_that_divides_the_ranks() -> None:
    assert layouts(1) == [(1, 1)]
    assert layouts(2) == [(1, 1), (2, 2), (3, 2)]
    assert layouts(12) == [(1, 1), (2, 6), (3, 6)]
    assert layouts(64) == [(1, 1), (2, 8), (3, 8)]


def test_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path)
    assert done.returncode == 2
    assert "--folder" in done.stderr
    assert "empty" in done.stderr
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path / "thesis" / "x")
    assert (done.returncode, "--folder: found" in done.stderr) == (2, True), done.stderr


def test_a_difference_is_the_worst_loss_or_norm_and_a_signal_ends_all() -> None:
    run = [(2.0, 8.0)] * 10
    assert max(_differences(run, [*run[:9], (2.0, 10.0)])) == pytest.approx(0.25)
    assert max(_differences(run, run[:9])) == float("inf")
    assert _not_stopped(1) == 1
    with pytest.raises(Stopped):
        _not_stopped(STOPPED)


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
    assert len(by_name) == 3 + 1
    assert [name for name, row in by_name.items() if row["passed"] is False] == []
    assert by_name["killed and gone on with"]["found"].endswith("equal")
