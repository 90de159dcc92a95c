"""Where figures go: metrics.jsonl, W&B, the console line; FLOPs and the clock against torch's own."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.tiny import random_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from cqwen_dist.config import Config, RunConfig, UserError
from cqwen_dist.sizes.flops import Work
from cqwen_dist.training.telemetry import progress as perf
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms
from cqwen_dist.training.telemetry.metrics import MetricsLog, open_trackers
from cqwen_dist.training.telemetry.progress import Clock
from cqwen_dist.training.train import work_in


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


CPU = torch.device("cpu")


def counted(model: Any, lora: dict[str, Any] | None = None, **config: Any) -> Work:
    """What a run of this model counts."""
    stage = {"name": "all", "train": ["heads", "embedding", *["lora"] * (lora is not None)], "steps": 1}
    given = {"name_or_path": "x", "lora": lora or {}}
    data = {"train": "x", "sequence_length": 64}
    return work_in(
        Config.model_validate({"model": given, "data": data, "stages": [stage], "start": "seed", **config}), model
    )


@pytest.mark.parametrize("gradients", [True, False])
def test_the_backbones_flops_equal_torchs_count(gradients: bool) -> None:
    """torch counts attention over the whole square, twice what is causal; so twice the attention is asked for."""
    model = tiny_model(number_dims=0)
    model.transformer.config._attn_implementation = "eager"  # torch does not count a CPU's fused attention
    batch = random_batch(4, 24)
    keep = torch.arange(batch.labels.numel())
    model.requires_grad_(False)
    model.features.embedding.w_num.requires_grad_(gradients)
    with FlopCounterMode(display=False) as counter:
        z = model.kept_features(batch, keep)
        if gradients:
            z.sum().backward()
    work = counted(model)
    square = replace(work, attention=2 * work.attention)
    trainable = frozenset(["embedding"] if gradients else [])
    each = square.flops(24, trainable, cached=False)
    assert keep.numel() * each.backbone == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_the_clock_separates_waiting_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 100.0, 100.05, 100.15))  # made, asked for data, has it, done
    monkeypatch.setattr(perf, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model = tiny_model()
    clock = Clock(counted(model).flops, CPU, world=2, peak=0.5)
    batch = random_batch(4, 24)
    clock.data()
    clock.work([batch])
    groups = frozenset(["embedding", "classifier"])
    figures = clock.metrics(tokens=400, groups=groups)
    assert figures["perf/data_wait_s"] == pytest.approx(0.05)
    assert figures["perf/step_s"] == pytest.approx(0.15)
    assert figures["perf/tokens_per_s"] == pytest.approx(400 / figures["perf/step_s"])
    each = clock.flops(200 / 4, groups, cached=False)
    flops = 200 * each.backbone + int(batch.label_mask.sum()) * each.heads
    assert figures["perf/tflops"] == pytest.approx(flops / figures["perf/step_s"] / 1e12)
    assert figures["perf/mfu"] == pytest.approx(figures["perf/tflops"] / 0.5)
    assert 0.05 < figures["perf/peak_memory_gib"] < 64
