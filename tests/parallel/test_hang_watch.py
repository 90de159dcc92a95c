"""What the hang watch leaves, before the first progress and after; a hang in training: tests/crash/test_stopping.py."""

import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

from support.ranks import Crew, fork_server, tell
from support.runs import wait_for

from cqwen_dist.cluster.launch import stacks_of
from cqwen_dist.parallel.runtime import HangWatch


def test_a_long_setup_shows_where_it_stands_and_goes_on(tmp_path: Path) -> None:
    watch = HangWatch()
    with watch.watching(tmp_path, 0, 0.2):
        here = "test_a_long_setup"
        wait_for("whole stacks", lambda: any(here in path.read_text() for path in stacks_of(tmp_path)), every=0.01)
        (path,) = stacks_of(tmp_path)
        watch._seconds = 60.0  # from here on a hang ends the process
        watch.alive()
        assert path.read_bytes() == b"", "it was none"
    assert not path.exists()


def test_a_folder_that_is_deleted_meanwhile_ends_quietly(tmp_path: Path) -> None:
    with HangWatch().watching(tmp_path, 0, 60.0):
        shutil.rmtree(tmp_path)


def hanging(rank: int, mouth: Connection, run: str) -> None:
    watch = HangWatch()
    with watch.watching(Path(run), rank, 1.0, lambda text: tell(mouth, text)):
        watch.alive()
        time.sleep(60)


def test_a_hang_is_told_before_the_rank_ends(tmp_path: Path) -> None:
    crew = Crew(fork_server(), hanging, 1, str(tmp_path))
    ((_, said),) = crew.hear(60)
    assert said.startswith("rank 0 has made no progress for 1 s and ends; stacks: ")
    assert crew.end(60) == [1]
    assert "in hanging" in (tmp_path / "stacks" / "rank-0.txt").read_text()
