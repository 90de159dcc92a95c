"""run.stop_after: a run in two commands, as jobs with other resources share it, is the run in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import losses, train_run, write_config

from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.status import read_status


def test_a_run_paused_after_a_stage_continues_on_more_ranks(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    run = tmp_path / "run"
    for _ in range(2):  # the second command finds the stage done and pauses again
        train_run(config, "run.stop_after=heads")
        status = read_status(run)
        assert (status["status"], status["step"], status["total_steps"]) == ("paused", 3, 6)
        assert len(losses(run)) == 3
    train_run(config, world=2)
    assert read_status(run)["status"] == "done"
    train_run(config, f"run.dir={tmp_path}/whole")
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_stop_after_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.stop_after: found 'body', allowed: a stage: heads, lora"):
        load_config(write_config(tmp_path), ["run.stop_after=body"])
