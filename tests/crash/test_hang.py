"""A rank that hangs: every rank writes where it stands, and all have ended within a collective's timeout."""

import json
import signal
from pathlib import Path

import pytest
from crash.harness import HANG, Blow, command, crash_config, result_of

TIMEOUT_S = 9.0


@pytest.mark.slow
def test_a_hanging_rank_ends_all_ranks_within_the_timeout_and_shows_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = crash_config(tmp_path)
    with monkeypatch.context() as environment:
        environment.setenv("CQWEN_TIMEOUT_MIN", str(TIMEOUT_S / 60))
        ended = command(config, blow=Blow(1, "step", 4, 0.0, HANG))
    assert ended.codes == [1, 1]
    assert (ended.survived_s or 0.0) < TIMEOUT_S, "one rank ended a timeout after the other"
    run = tmp_path / "run"
    before = (run / "latest").stat().st_mtime  # of step 2
    assert all(path.stat().st_mtime - before < 1.5 * TIMEOUT_S for path in (run / "stacks").iterdir())
    stacks = {path.name: path.read_text() for path in (run / "stacks").iterdir()}
    assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
    assert "in watched" in stacks["rank-1.txt"], "the sleep of this test"
    assert "trainer.py" in stacks["rank-0.txt"]
    status = json.loads((run / "status.json").read_text())
    assert status["status"] == "running", "lost, not fatal: another try may go on"

    stopped = command(config, blow=Blow(0, "step", 2, 1.0, signal.SIGTERM))
    assert stopped.codes == [75, 75], stopped.said
    assert result_of(run)["checkpoint"] > "step-00000002"
    assert list((run / "stacks").glob("*")) == [], "the stacks of an earlier start are gone"
