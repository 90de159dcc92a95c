"""What the hang watch leaves before the first progress; a hang in training: tests/crash/test_hang.py."""

from pathlib import Path

from support.runs import wait_for

from cqwen_dist.cluster.launch import stacks_of
from cqwen_dist.parallel.hang import HangWatch


def test_a_long_setup_shows_where_it_stands_and_goes_on(tmp_path: Path) -> None:
    watch = HangWatch()
    with watch.watching(tmp_path, 0, 0.2):
        wait_for("stacks", lambda: stacks_of(tmp_path), every=0.01)
        (path,) = stacks_of(tmp_path)
        assert "test_a_long_setup" in path.read_text()
        watch._seconds = 60.0  # from here on a hang ends the process
        watch.alive()
        assert path.read_bytes() == b"", "it was none"
    assert not path.exists()
