"""Where figures go: metrics.jsonl, W&B, the console line."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from cqwen_dist.config import RunConfig, UserError
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms
from cqwen_dist.training.telemetry.metrics import MetricsLog, open_trackers


def opened(folder: Path, run: RunConfig, config: dict[str, Any], step: int) -> MetricsLog:
    return MetricsLog(folder, step, trackers=open_trackers(folder, run, config, step))


def log_two_steps_twice(run: str) -> list[str]:
    """The name of the W&B run after each start."""
    names = []
    for step in (0, 2):
        log = opened(Path(run), RunConfig(dir=run, wandb="offline", name="tea"), {"seed": 1}, step)
        for number in (step + 1, step + 2):
            log.push({"step": number, "stage": "heads", "train/total_loss": torch.tensor(1.0 / number)})
        log.close()
        names.append((Path(run) / "wandb_id").read_text())
    return names


def test_wandb_offline_writes_a_folder_and_resumes_with_the_same_id(tmp_path: Path) -> None:
    ((name, again),) = run_ranks(log_two_steps_twice, 1, str(tmp_path))
    assert re.fullmatch("[0-9a-f]{8}", name)
    assert again == name
    folders = [path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run")]
    assert folders
    for folder in folders:
        assert folder.name.endswith(f"-{name}")
        assert (folder / f"run-{name}.wandb").stat().st_size > 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["train/total_loss"]) for record in records] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)
    ]


def test_a_step_is_written_when_the_next_one_comes(tmp_path: Path) -> None:
    """No step waits for its own loss; what was pushed is on disk, flushed, one step later."""
    log = MetricsLog(tmp_path, 0)
    path = tmp_path / "metrics.jsonl"
    log.push({"step": 1, "x": torch.tensor(0.5)})
    assert path.read_text() == ""
    log.add({"eval/accuracy": 0.25})
    log.push({"step": 2})
    assert json.loads(path.read_text()) == {"step": 1, "x": 0.5, "eval/accuracy": 0.25}
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_metrics_have_the_first_and_third_seeds_names(tmp_path: Path) -> None:
    """S1 6.1 beside S3 5; and what is not finite is null: JSON has no word for it."""
    log = MetricsLog(tmp_path, 0)
    log.push({"step": 1, "train/total_loss": torch.tensor(2.0), "train/prob_sum_mean": torch.tensor(1.5)})
    log.add({"dist/U_loc_mean": 0.25, "dist/U_scale_mean": 3.0, "eval/perplexity": float("inf")})
    log.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    old = ("total_loss", "ovr_prob_sum", "units_mean_loc", "units_mean_scale")
    assert [record[name] for name in old] == [2.0, 1.5, 0.25, 3.0]
    assert record["eval/perplexity"] is None


def test_alarms_are_logged_with_metrics_and_not_doubled_by_a_restart(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (0, 20):  # the second goes on from step 20 and sees the spike of step 31 again
        log = MetricsLog(tmp_path, step, Alarms(None), said.append)
        for number in range(step + 1, 32):
            log.push({"step": number, "train/total_loss": torch.tensor(90.0 if number == 31 else 5.0)}, [7, 8])
        if step == 0:
            log.close()
            assert len(said) == 1
    log.close()
    lines = (tmp_path / "alarms.jsonl").read_text().splitlines()
    assert lines == [] or json.loads(lines[0])["kind"] == "loss-spike"
    assert len(lines) <= 1
    assert "loss-spike" in said[0]


class Recorded:
    """Stands in for a W&B run."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.alerts: list[str] = []

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((step, figures))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)

    def finish(self) -> None:
        self.logged.append((-1, {}))


def test_the_start_is_step_0_everywhere_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1 6.1 watches the start; a run that begins again from step 0, or goes on from step 2, has it once."""
    import wandb

    seen, asked = Recorded(), []
    monkeypatch.setattr(wandb, "init", lambda **options: (asked.append(options), seen)[1])
    for step in (0, 0, 2):
        log = opened(tmp_path, RunConfig(dir=str(tmp_path), wandb="online"), {}, step)
        if step == 0:
            log.start("heads", {"eval/accuracy": 0.5, "dist/U_scale_mean": 3.0})
        log.push({"step": step + 1, "stage": "heads"})
        log.push({"step": step + 2, "stage": "heads"})
        log.alarm(Alarm(step + 1, "loss-spike", "text"))
        log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert (records[0]["eval/accuracy"], records[0]["units_mean_scale"], records[0]["stage"]) == (0.5, 3.0, "heads")
    assert seen.logged[0][0] == 0
    assert seen.logged[0][1]["eval/accuracy"] == 0.5
    assert {(options["id"], options["resume"]) for options in asked} == {((tmp_path / "wandb_id").read_text(), "allow")}
    assert "loss-spike" in seen.alerts


def test_without_its_package_tensorboard_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"run\.tensorboard.*pip install 'cqwen-dist\[tensorboard\]'"):
        opened(tmp_path, RunConfig(dir=str(tmp_path), tensorboard=True), {}, 0)
