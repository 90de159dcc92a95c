"""What `launch` makes of the launcher's end. The launcher is a stand-in here; the real one is in tests/e2e."""

import base64
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.runs import write_config

from cqwen_dist.cluster import launch as module
from cqwen_dist.cluster import node
from cqwen_dist.run.status import write_status


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write_config(tmp_path)


def end_of(monkeypatch: pytest.MonkeyPatch, config: Path, script: str) -> int:
    """The exit code of `launch` where the launcher is this Python script; argv[1] is the run's folder."""
    command = [sys.executable, "-c", script, str(config.parent / "run")]
    monkeypatch.setattr(module, "launch_command", lambda *_: command)
    return module.launch(config, [], 2)


WRITE = 'import sys; open(sys.argv[1] + "/status.json", "w").write(\'{"status": "%s"}\')'


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("preempted", 75), ("running", 1)])
def test_the_runs_status_decides_when_the_launcher_exits_with_0(monkeypatch, config, status, code) -> None:
    assert end_of(monkeypatch, config, WRITE % status) == code


def test_a_job_has_the_worst_end_of_its_runs(monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path) -> None:
    """A stop before a failure: the same command goes on with the others. A run that was done does not count."""
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace(str(tmp_path / "run"), str(tmp_path / "other")))
    for ends, code in {("done", "done"): 0, ("done", "fatal"): 1, ("fatal", "preempted"): 75}.items():
        for folder in ("run", "other"):
            (tmp_path / folder).mkdir(exist_ok=True)
            write_status(tmp_path / folder, "running")
        script = "; ".join(
            f"open({str(tmp_path / folder / 'status.json')!r}, 'w').write('{{\"status\": \"{status}\"}}')"
            for folder, status in zip(("run", "other"), ends, strict=True)
        )
        monkeypatch.setattr(module, "launch_command", lambda *_, script=script: [sys.executable, "-c", script])
        assert module.launch(config, [str(other)], 2) == code


def test_a_status_of_an_earlier_command_is_ignored(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """The launcher returns 0 where a rank died by a signal, for instance of no memory before its first word."""
    write_status(config.parent / "run", "done")
    assert end_of(monkeypatch, config, "pass") == 1


@pytest.mark.parametrize(("launcher", "code"), [(2, 2), (137, 1)])
def test_exit_code_is_2_for_wrong_input_and_1_for_other_failures(monkeypatch, config, launcher, code) -> None:
    assert end_of(monkeypatch, config, WRITE % "done" + f"; sys.exit({launcher})") == code


def test_stop_that_rank_0_wrote_is_one_though_others_lost_a_rank(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    assert end_of(monkeypatch, config, WRITE % "preempted" + "; sys.exit(1)") == 75


def test_a_rank_that_hears_no_signal_does_not_outlive_launcher(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
    script = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {deaf!r}], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1] + "/pid", "w").write(str(child.pid))
"""
    began = time.monotonic()
    end_of(monkeypatch, config, script)
    pid = int((config.parent / "run" / "pid").read_text())
    assert time.monotonic() - began < 20
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_no_shell_interprets_user_input() -> None:
    hostile = ["run.dir=a'; echo foo", "data.text_template={question} $(touch x)\n{answer}"]
    command = module.launch_command(["train", "my config.yaml", *hostile], 3, 29500)
    assert command[-3:] == ["my config.yaml", *hostile]
    assert gpus_of(command) == ["0", "1", "2"]


def gpus_of(command: list[str]) -> list[str]:
    (world,) = [word.partition("=")[2] for word in command if word.startswith("--world_info=")]
    (gpus,) = json.loads(base64.urlsafe_b64decode(world)).values()
    return gpus


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ("2,3", ["2", "3"]),
        ("4,5,6", ["4", "5"]),
        ("GPU-8c6b1d0a-1f,GPU-77aa", ["GPU-8c6b1d0a-1f", "GPU-77aa"]),
        ("MIG-3f2a", ["MIG-3f2a", "-1"]),  # the second rank is refused by name, instead of taking somebody's GPU
        ("", ["-1", "-1"]),
    ],
)
def test_ranks_get_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch, given: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus_of(module.launch_command(["train"], 2, 29500)) == gpus
    called: list[list[str]] = []
    monkeypatch.setattr(node.os, "execve", lambda program, command, environment: called.append(command))
    monkeypatch.setattr(node.signal, "pthread_sigmask", lambda how, signals: None)
    monkeypatch.setattr("sys.argv", ["node", "--ranks", "2", "--logs", "logs", "--", "run.yaml"])
    for name, value in {"CQWEN_HOSTS": "n1", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    node.main()
    assert gpus_of(called[0]) == gpus
