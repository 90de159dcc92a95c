"""Told to stop, by a signal to a single rank: all ranks stop in order, wherever they are, and nothing is done twice."""

import json
import signal
from pathlib import Path

import pytest
from crash.harness import ALL, STOPPED, WAIT, Blow, command, crash_config, result_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The config, and the result of the run that was left alone."""
    config = crash_config(tmp_path_factory.mktemp("stopped"))
    assert command(config).codes == [0, 0]
    return config, result_of(config.parent / "run")


@pytest.mark.parametrize(
    ("blow", "step"),
    [
        (Blow(1, "figures", 1, 0.0, signal.SIGUSR1), 3),  # an evaluation that is due: it is made up for
        (Blow(1, WAIT, 5, 200.0, signal.SIGTERM), 4),  # a batch that never comes
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                (Blow(1, "figures", 5, 0.0, signal.SIGUSR1), 10),  # the last one
                (Blow(1, "step", 4, 1.0, signal.SIGTERM), 4),  # it takes the step that it is in
                (Blow(1, "evaluation", 2, 0.0, signal.SIGTERM), 0),  # while the base model is measured
                (Blow(1, "start", 4, 0.0, signal.SIGTERM), 0),  # while the start is calibrated
                (Blow(1, "boundary", 2, 0.0, signal.SIGINT), 5),
                (Blow(0, "save", 2, 0.0, signal.SIGUSR1), 4),  # or one more
                (Blow(ALL, "setup", 1, 0.0, signal.SIGTERM), 0),
            )
        ),
    ],
    ids=lambda value: value.point if isinstance(value, Blow) else "",
)
def test_a_run_stopped_anywhere_resumes_equal_to_the_bit(
    alone: tuple[Path, dict], tmp_path: Path, blow: Blow, step: int
) -> None:
    config, expected = alone
    run = tmp_path / "run"
    stopped = command(config, f"run.dir={run}", blow=blow)
    assert stopped.codes == [STOPPED, STOPPED], stopped.said
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["total_steps"]) == ("preempted", 10 if step else None)
    # A signal that is quicker than the step's first all-reduce stops before it.
    assert status["step"] in (step - (blow.point == "step"), step, step + (blow.point == "save"))
    assert status["checkpoint"] == (f"step-{status['step']:08d}" if step else None)
    assert "signal to stop: " in status["reason"]

    again = command(config, f"run.dir={run}")
    assert again.codes == [0, 0], again.said
    assert result_of(run) == expected
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["restarts"], status["reason"]) == ("done", 1, None)


@pytest.mark.slow
def test_a_stopped_bf16_run_resumes_equal_to_the_bit(tmp_path: Path) -> None:
    config = crash_config(tmp_path, train__precision="bf16")
    assert command(config).codes == [0, 0]
    run = tmp_path / "again"
    for call in (3, 4):
        assert command(config, f"run.dir={run}", blow=Blow(0, "step", call, 0.0, signal.SIGTERM)).codes == [75, 75]
    assert command(config, f"run.dir={run}").codes == [0, 0]
    assert result_of(run) == result_of(tmp_path / "run")
