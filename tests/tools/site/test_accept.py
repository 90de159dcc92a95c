"""`cqwen accept`: what passes and what does not, and the whole table on two ranks of this machine."""

import json
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.runs import cqwen, cqwen_forked

from cqwen_dist.tools.site.accept import layouts
from cqwen_dist.tools.site.doctor import all_reduce_seconds, bus_bandwidth


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
