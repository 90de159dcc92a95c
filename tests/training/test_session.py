"""What a command checks and writes around a run."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import typer
from support.runs import write_config

from cqwen_dist import api
from cqwen_dist.cli import runs
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.errors import DiskError
from cqwen_dist.parallel.collectives import CollectiveError, Stopped, cause_of
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.folder import open_run, refuse_changes
from cqwen_dist.run.status import RunStatus, end_status, read_status, write_status
from cqwen_dist.training import train
from cqwen_dist.training.callbacks import CallbackError
from cqwen_dist.training.replicas import RanksDiffer
from cqwen_dist.training.train import open_session


def test_a_command_that_failed_before_training_allows_config_changes(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    first = open_run(load_config(path, ["model.tokenizer=/nowhere"]))
    base = first / "base"
    base.mkdir()
    open_run(load_config(path, ["model.tokenizer=/nowhere", "stages.0.lr=0.5"]))
    assert base.is_dir(), "it does not hang on the rate"
    mended = load_config(path)
    refuse_changes(mended)
    open_run(mended)
    assert not base.is_dir(), "it was built for another tokenizer"
    assert load_config(first / "config.yaml") == mended
    (first / "start.json").write_text("{}")
    with pytest.raises(UserError, match="with which the run in"):
        open_run(load_config(path, ["train.seed=3"]))


def test_a_status_counts_starts_and_seconds_and_stays_fatal(tmp_path: Path) -> None:
    write_status(tmp_path, "preempted", step=4, seconds=100.0, restarts=1, checkpoint="step-00000004")
    status = RunStatus(tmp_path, main=True)
    found = read_status(tmp_path)
    assert found["step"] == 4, "a resumed run that fails in its start has not lost its steps"
    assert (found["status"], found["restarts"], found["checkpoint"]) == ("running", 2, "step-00000004")
    assert found["seconds"] >= 100.0
    status.at(6, 10, "heads")
    status.at(8, 10, "heads", "step-00000008", eta_s=4.04)
    found = read_status(tmp_path)
    assert (found["step"], found["total_steps"], found["checkpoint"]) == (8, 10, "step-00000008")
    assert found["eta_s"] == 4.0
    end_status(tmp_path, "fatal", "rank 1: it broke")
    end_status(tmp_path, "running", "rank 0 lost rank 1")
    assert {"status": "fatal", "reason": "rank 1: it broke", "step": 8}.items() <= read_status(tmp_path).items()


ENDS = [  # the error, its cause, whether another try may go on
    (UserError("stages.0.lr", -1, "more"), "input", False),
    (OSError(errno.ENOSPC, "No space left on device", "/full/x"), "a disk that takes no more", False),
    (OSError(errno.ESTALE, "Stale file handle", "/nfs/run"), "a file system that is away", True),
    (DiskError("run.dir", "no room", "room", away=True), "a file system that is away", True),
    (CollectiveError("all-reduce in the world group failed"), "a lost rank", True),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "a device", True),
    (torch.OutOfMemoryError("CUDA out of memory"), "memory", False),
    (RanksDiffer("x is not equal"), "ranks that differ", True),
    (ZeroDivisionError("division by zero"), "the program", False),
    (CallbackError("the callback Notify.on_step raised ReadTimeout: Read timed out."), "the program", False),
]


@pytest.mark.parametrize(("error", "name", "passing"), ENDS, ids=[f"{n}-{type(e).__name__}" for e, n, _ in ENDS])
def test_only_reproducible_failures_are_fatal(tmp_path, monkeypatch, error, name, passing) -> None:
    monkeypatch.setattr(train, "main_rank_first", lambda action: action())
    config = load_config(write_config(tmp_path))
    folder = tmp_path / "run"
    runtime = Runtime(0, 1, torch.device("cpu"), 60.0)
    with pytest.raises(Exception) as met, open_session(config, runtime):
        raise error
    assert (cause_of(met.value).name, cause_of(met.value).passing) == (name, passing)
    status = read_status(folder)
    assert status["status"] == ("running" if passing else "fatal")
    reason = str(status["reason"])
    assert reason.startswith(f"{name}: {type(met.value).__name__}: ")
    assert "\n" not in reason
    assert len(reason) < 500
    if isinstance(error, OSError) and "disk" in name:
        assert isinstance(met.value, DiskError), "one line, not a traceback"


CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_ctrl_c_prints_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise Stopped("SIGINT")

    monkeypatch.setattr(api, "train", stopped)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as ended:
        runs.train(CONFIG, ["run.dir=my runs/a", "train.eval_every=7"])
    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == "to go on: cqwen train 'my runs/a'\n"
