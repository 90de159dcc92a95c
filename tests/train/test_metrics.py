"""Where figures go: metrics.jsonl, W&B, the console line."""

import json
import re
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from cqwen_dist.config import RunConfig
from cqwen_dist.train.metrics import MetricsLog, Progress


def log_two_steps(run: str, step: int) -> None:
    log = MetricsLog(Path(run), RunConfig(dir=run, wandb="offline", name="tea"), {"seed": 1}, step)
    for number in (step + 1, step + 2):
        log.push({"step": number, "stage": "heads", "train/total_loss": torch.tensor(1.0 / number)})
    log.close()


def test_wandb_offline_writes_a_folder_and_goes_on_under_the_same_id(tmp_path: Path) -> None:
    run_ranks(log_two_steps, 1, str(tmp_path), 0)
    name = (tmp_path / "wandb_id").read_text()
    assert re.fullmatch("[0-9a-f]{8}", name)
    run_ranks(log_two_steps, 1, str(tmp_path), 2)
    assert (tmp_path / "wandb_id").read_text() == name
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
    log = MetricsLog(tmp_path, RunConfig(dir=str(tmp_path)), {}, 0)
    path = tmp_path / "metrics.jsonl"
    log.push({"step": 1, "x": torch.tensor(0.5)})
    assert path.read_text() == ""
    log.add({"eval/accuracy": 0.25})
    log.push({"step": 2})
    assert json.loads(path.read_text()) == {"step": 1, "x": 0.5, "eval/accuracy": 0.25}
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_console_line_tells_stage_step_loss_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total_steps=10, start_step=4, every_s=1000.0)
    progress.step(5, "heads", 100, None)
    assert capsys.readouterr().out == "", "not at every step"
    rate = progress.step(6, "heads", 100, 1.25, force=True)
    assert rate > 0
    said = capsys.readouterr().out
    assert re.search(r"heads step 6/10  loss 1\.2500  [\d,]+ tokens/s  0m \d\ds left", " ".join(said.split("\n"))), said
