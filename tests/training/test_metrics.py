"""Where figures go: metrics.jsonl, W&B, the console line."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

import cqwen_dist
from cqwen_dist.config import RunConfig, UserError
from cqwen_dist.training.telemetry.alarms import Alarm, Alarms
from cqwen_dist.training.telemetry.metrics import MetricsLog
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.telemetry.trackers import open_trackers


def opened(folder: Path, run: RunConfig, config: dict[str, Any], step: int) -> MetricsLog:
    return MetricsLog(folder, step, open_trackers=partial(open_trackers, folder, run, config, step))


def log_two_steps(run: str, step: int) -> None:
    log = opened(Path(run), RunConfig(dir=run, wandb="offline", name="tea"), {"seed": 1}, step)
    for number in (step + 1, step + 2):
        log.push({"step": number, "stage": "heads", "train/total_loss": torch.tensor(1.0 / number)})
    log.close()


def test_wandb_offline_writes_a_folder_and_resumes_with_the_same_id(tmp_path: Path) -> None:
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


def test_wandb_online_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: list[dict[str, object]] = []
    runs = [Recorded(), Recorded()]
    monkeypatch.setattr(wandb, "init", lambda **options: (asked.append(options), runs[len(asked) - 1])[1])
    monkeypatch.setenv("WANDB_PROJECT", "tea")
    for step in (0, 1):
        log = opened(tmp_path, RunConfig(dir=str(tmp_path), wandb="online"), {"a": 1}, step)
        log.push({"step": step + 1, "stage": "heads", "train/total_loss": torch.tensor(0.5)})
        log.alarm(Alarm(step + 1, "loss-spike", "text"))
        log.close()
    first, second = asked
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text()
    assert {(options["mode"], options["resume"], options["project"]) for options in asked} == {
        ("online", "allow", "tea")
    }
    assert first["config"] == {"a": 1}
    assert [run.logged[0][0] for run in runs] == [1, 2]
    assert runs[0].logged[0][1]["total_loss"] == 0.5
    assert runs[0].alerts == ["loss-spike"]
    assert runs[0].logged[-1] == (-1, {}), "finished"


def test_the_start_is_step_0_everywhere_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1 6.1 watches the start; a run that begins again from step 0, or goes on from step 2, has it once."""
    import wandb

    seen = Recorded()
    monkeypatch.setattr(wandb, "init", lambda **_: seen)
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (0, 0, 2):
        log = opened(tmp_path, RunConfig(dir=str(tmp_path), wandb="online", trackers=["tensorboard"]), {}, step)
        if step == 0:
            log.start("heads", {"eval/accuracy": 0.5, "dist/U_scale_mean": 3.0})
        log.push({"step": step + 1, "stage": "heads"})
        log.push({"step": step + 2, "stage": "heads"})
        log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert (records[0]["eval/accuracy"], records[0]["units_mean_scale"], records[0]["stage"]) == (0.5, 3.0, "heads")
    assert seen.logged[0][0] == 0
    assert seen.logged[0][1]["eval/accuracy"] == 0.5
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(0, 0.5)]


def test_a_wandb_login_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"run\.wandb: found online .No API key.* allowed: a W&B login, or offline"):
        opened(tmp_path, RunConfig(dir=str(tmp_path), wandb="online"), {}, 0)


def test_tensorboard_has_every_step_once_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunConfig(dir=str(tmp_path), trackers=["tensorboard"])
    for first, step in ((1.0, 0), (2.0, 2)):
        log = opened(tmp_path, run, {}, step)
        for number in range(step + 1, 5):
            log.push({"step": number, "stage": "heads", "train/total_loss": torch.tensor(first)})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("train/total_loss")]
    assert seen == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow",) * 2, ("trackio",) * 2]
)
def test_without_its_package_a_tracker_is_refused_by_name(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"run\.trackers.*pip install 'cqwen-dist\[{name}\]'"):
        opened(tmp_path, RunConfig(dir=str(tmp_path), trackers=[name]), {}, 0)


def logged_with_a_restart(folder: Path, tracker: str) -> None:
    """Steps 1 to 4, then again from the checkpoint of step 2 to step 6, with other values; an alarm; a NaN."""
    config = {"train": {"seed": 1, "lr": {f"key{i}": i for i in range(120)}}}
    for step, last, value in ((0, 4, 1.0), (2, 6, 2.0)):
        log = opened(folder, RunConfig(dir=str(folder), name="tea", trackers=[tracker]), config, step)
        for number in range(step + 1, last + 1):
            log.push({"step": number, "stage": "heads", "train/total_loss": torch.tensor(value), "x": float("nan")})
        log.flush()
        log.alarm(Alarm(last, "loss-spike", "it rose"))
        log.close()


def test_mlflow_has_one_run_with_parameters_and_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged_with_a_restart(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("cqwen").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tea", "FINISHED")
    assert run.data.params["train.seed"] == "1"
    assert len(run.data.params) == 121
    assert run.data.tags["alarm.loss-spike"] == "it rose"
    assert "x" not in run.data.metrics
    seen = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/total_loss"))
    assert seen == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_trackio_has_one_run_and_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="pip install trackio")
    script = (
        "import pathlib, sys\n"
        "from test_metrics import logged_with_a_restart\n"
        "logged_with_a_restart(pathlib.Path(sys.argv[1]), 'trackio')\n"
        "import trackio; from trackio.sqlite_storage import SQLiteStorage\n"
        "(run,) = trackio.Api().runs('cqwen'); print('run', run.name)\n"
        "logs = SQLiteStorage.get_logs('cqwen', run.name, run_id=run.id)\n"
        "print('values', [(line['step'], line['train/total_loss']) for line in logs if 'train/total_loss' in line])\n"
    )
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}  # read when it is imported
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    name = (tmp_path / "wandb_id").read_text()
    assert f"run tea-{name}" in ran.stdout
    assert "values [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]" in ran.stdout


def test_the_console_line_shows_stage_step_loss_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total_steps=10, start_step=4, every_s=1000.0)
    progress.step(5, "heads", 100, {})
    assert capsys.readouterr().out == "", "not at every step"
    record = {"train/total_loss": 1.25, "train/lr": 1e-3, "train/grad_norm": 0.5, "perf/peak_memory_gib": 2.0}
    progress.step(6, "heads", 100, record, force=True)
    said = capsys.readouterr().out
    assert re.search(
        r"heads step 6/10  loss 1\.2500  lr 0\.001  gradient 0\.5  2\.0 GiB  [\d,]+ tokens/s  0m \d\ds left", said
    ), said


def test_the_time_left_follows_the_speed_of_the_present_stage_and_of_recent_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(total_steps=1000, start_step=0, silent=True)
    for step in range(1, 401):  # 100 slow steps, 100 quick ones, then a stage with steps of 3 s
        now[0] += 10.0 if step <= 100 else 1.0 if step <= 200 else 3.0
        progress.step(step, "heads" if step <= 200 else "lora", 100, {})
        if step == 200:
            assert progress.left_s == pytest.approx(800 * 1.0), "the last 100 steps took 1 s each"
        if step == 201:
            assert progress.left_s == pytest.approx(799 * 3.0), "a step of the new stage took 3 s"
    assert progress.left_s == pytest.approx(600 * 3.0)
    now[0] += 5.0
    progress.step(301, "lora", 100, {})  # copies differed: the run went back to a checkpoint
    assert progress.left_s == pytest.approx(699 * 5.0)


def test_on_a_terminal_one_progress_bar_stays_below_the_lines(tmp_path: Path) -> None:
    """The real command's way: rank 0 writes to a terminal that a person watches."""
    script = """
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.telemetry.trackers import open_trackers
progress = Progress(4, 0)
progress.part("calibration [x]", 1, 3)
for step in range(1, 5):
    progress.step(step, "heads [/x]", 100, {"train/total_loss": 2.0 / step}, force=step == 4)
progress.say("alarm gradients: of [/embedding]")
progress.close()
"""
    main, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    said = b""
    with suppress(OSError):  # the terminal is gone with its last writer
        while part := os.read(main, 4096):
            said += part
    assert process.wait(60) == 0, said
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", said).decode()
    assert plain.count("heads [/x] step") == 1, "a line at the stage's end, else the bar"
    assert re.search(r"heads \[/x\] step 4/4  loss 0\.5000 .* left", plain)
    assert re.search(r"heads \[/x\] .*4/4 +loss 0\.5000", plain), "the bar"
    assert "alarm gradients: of [/embedding]" in plain


def test_square_brackets_are_printed_literally(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    progress = Progress(total_steps=10, start_step=0)
    progress.step(1, "[/x]", 100, {}, force=True)
    progress.say("checkpoint: runs/a[bold]b[/c]/:tea: is damaged")
    log = MetricsLog(tmp_path, 0, say=progress.say)
    log.alarm(Alarm(1, "gradients", "of [/embedding]"))
    log.close()
    step, said, alarm = capsys.readouterr().out.splitlines()
    assert step.startswith("[/x] step 1/10")
    assert said == "checkpoint: runs/a[bold]b[/c]/:tea: is damaged"
    assert alarm == "alarm gradients: of [/embedding]"


def test_no_console_of_the_package_parses_markup() -> None:
    for path in Path(cqwen_dist.__file__).parent.rglob("*.py"):
        for call in re.findall(r"(?<!\w)Console\(([^)]*)\)", path.read_text(encoding="utf-8")):
            assert "markup=False" in call, f"{path}: a name with square brackets would be taken for a style"


def test_the_page_on_wandb_names_what_is_logged() -> None:
    source = "".join(path.read_text() for path in Path(cqwen_dist.__file__).parent.rglob("*.py"))
    page = (Path(cqwen_dist.__file__).parents[1] / "docs" / "wandb.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| `(train|eval|perf)/` \|", line)]
    assert len(rows) == 3
    for row in rows:
        for name in re.findall(r"`([a-z_0-9]+)`", row[3]):
            assert f"/{name}" in source, name
