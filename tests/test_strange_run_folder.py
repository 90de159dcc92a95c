"""A run folder may be a stranger's: links, newer or broken files, paths that lead out of it."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.runs import cqwen_forked, fork, write_config

from cqwen_dist.checkpoint.manifest import FORMAT, choose_checkpoint, resolve_checkpoint
from cqwen_dist.config import UserError, load_config
from cqwen_dist.parallel.runtime import HangWatch
from cqwen_dist.run.files import read_object
from cqwen_dist.run.folder import open_run, run_lock
from cqwen_dist.training.telemetry.metrics import MetricsFile


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "stacks/rank-0.txt", "slurm/history.jsonl", "checkpoints"])
def test_a_link_in_a_run_folder_is_refused_and_its_target_stays(tmp_path: Path, name: str) -> None:
    config = load_config(write_config(tmp_path))
    run = Path(config.run.dir)
    link = run / name
    link.parent.mkdir(parents=True)
    precious = tmp_path / "precious"
    if "." in name or name in ("lock", "wandb_id"):
        precious.write_text("kept")
    else:
        precious.mkdir()
        (precious / "rank-0.txt").write_text("kept")
    link.symlink_to(precious)
    with pytest.raises(UserError, match="is a link, allowed: a run folder with files of its own"):
        open_run(config)
    kept = precious if precious.is_file() else precious / "rank-0.txt"
    assert kept.read_text() == "kept"


def _lock(run: Path) -> None:
    with run_lock(run):
        pass


def _watch(run: Path) -> None:
    (run / "stacks").mkdir()
    (run / "lock").rename(run / "stacks" / "rank-0.txt")
    with HangWatch().watching(run, 0, 60.0):
        pass


def _log(run: Path) -> None:
    (run / "lock").rename(run / "metrics.jsonl")
    MetricsFile(run / "metrics.jsonl", 0)


@pytest.mark.parametrize("write", [_lock, _watch, _log])
def test_a_link_made_while_a_run_is_open_is_not_followed(tmp_path: Path, write: Callable[[Path], None]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").symlink_to(precious)
    with suppress(UserError):
        write(run)
    assert precious.read_text() == "kept"


@pytest.mark.parametrize("written", [FORMAT - 1, FORMAT + 1])
def test_a_checkpoint_in_another_format_is_named_and_stays(tmp_path: Path, written: int) -> None:
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": written, "step": 4, "files": {}}))
    for resume in ("auto", "last-good", "never"):
        with pytest.raises(UserError, match=f"manifest.json: format: found {written}, allowed: {FORMAT}"):
            choose_checkpoint(tmp_path, resume)
    with pytest.raises(UserError, match=f"format: found {written}"):
        resolve_checkpoint(folder)


@pytest.mark.parametrize("named", ["../../elsewhere", "/elsewhere", "a/../../b"])
def test_best_names_no_path_outside_of_its_folder(tmp_path: Path, named: str) -> None:
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "best").write_text(named)
    with pytest.raises(UserError, match="a path outside of the folder"):
        resolve_checkpoint(tmp_path / "fit")


def test_a_storm_of_signals_ends_a_run_with_75(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages__0__steps=100_000)
    process = fork(tmp_path, "cqwen", "train", config)
    deadline, status = time.monotonic() + 120, tmp_path / "run" / "status.json"
    while process.is_alive() and time.monotonic() < deadline:
        if read_object(status).get("step", 0) > 3:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, number)
        time.sleep(0.02)
    process.join(5)
    assert process.exitcode == 75


HIDING = "\x1b[2Jgone \x1b]0;title\x07 \u202eesrever\x9b1A"


def test_what_strangers_wrote_reaches_a_terminal_as_visible_escapes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"status": HIDING, "reason": HIDING, "stage": HIDING, "step": 3}))
    ended = {"event": "end", "time": 1.0, "how": HIDING, "reason": HIDING, "asked": "no", "step": 0}
    (run / "slurm" / "history.jsonl").write_text(json.dumps(ended))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{HIDING} {i}.5"}) + "\n" for i in range(9)))
    config = write_config(tmp_path, data__train=str(tmp_path / "texts.jsonl"), data__eval_fraction=0.0)
    for words in (["status", run], ["status", run, "--json"], ["prepare", config, f"data.cache_dir={tmp_path}/cache"]):
        done = cqwen_forked(*words)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "gone" in said
        assert not set(said) & set("\x1b\x07\u202e\x9b"), words


def test_every_line_for_people_goes_through_one_function() -> None:
    package = Path(__file__).parents[1] / "cqwen_dist"
    direct = [path.name for path in package.rglob("*.py") if "typer.echo" in path.read_text(encoding="utf-8")]
    assert direct == ["console.py"]
