"""What a disk refuses is one line on every rank; the checkpoint before stays, and the run goes on later."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.harness import command, crash_config, result_of

from cqwen_dist.checkpoint.manifest import latest_checkpoint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 kB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", folder]).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_in_one_line_and_loses_no_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    config = crash_config(tmp_path, train__keep_every=1)
    run = small_disk / "run"
    full = command(config, f"run.dir={run}")
    assert full.codes == [1, 1]  # of the harness; the command's is 2
    lines = [text.strip().splitlines()[-1] for text in full.said]
    for line in lines:
        assert "run.dir: found" in line, full.said
        assert "No space left on device" in line
    good = latest_checkpoint(run)
    assert good is not None, "nothing fitted at all: the test's disk is too small"
    assert not list((run / "checkpoints").glob(".step-*")), "what does not fit is not left in the way"

    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert command(config, f"run.dir={run}").codes == [0, 0]
    assert command(config).codes == [0, 0]
    assert result_of(run) == result_of(tmp_path / "run")
    assert json.loads((run / "status.json").read_text())["reason"] is None
