"""Hosts, their environment, and what travels to them. No ssh here: test_slurm_jobs has a real one."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cqwen_dist.cluster import hostfile as module
from cqwen_dist.cluster import rank
from cqwen_dist.cluster.hostfile import prepared, read_environment, read_hostfile
from cqwen_dist.cluster.rank import Order
from cqwen_dist.config import UserError


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=8\n\n me@node-2.lab  slots=4  # half\n")
    assert read_hostfile(path) == {"node1": 8, "me@node-2.lab": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one line"),
        ("node1\n", "line 1: --hostfile: found 'node1', allowed: host slots=N"),
        ("node1 slots=0\n", "line 1"),
        ("a slots=1\nnode1;reboot slots=2\n", "line 2"),
        ("-oProxyCommand=x slots=2\n", "line 1"),
        ("a slots=1\na slots=2\n", "this host is listed twice"),
    ],
)
def test_a_wrong_hostfile_is_reported_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_hostfile(path)
    assert said in str(refused.value)


def test_the_environment_has_the_named_variables_and_the_files_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    file = tmp_path / "variables"
    file.write_text('# theirs\nNCCL_DEBUG=WARN\nMINE=a\'; echo $(id) = "b"\n')
    found = read_environment(file)
    assert (found["NCCL_DEBUG"], found["MINE"]) == ("WARN", 'a\'; echo $(id) = "b"')
    assert "SOMETHING_ELSE" not in found
    assert found["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('A="eth0"', "eth0"),
        ("A='two words'  # why", "two words"),
        ("export A=/data/hf", "/data/hf"),
        ("  export\tA = 1 ", "1"),
        ("A=x # a comment", "x"),
        ("A=hf_a#b'c", "hf_a#b'c"),
        ("A=", ""),
        ('A=""', ""),
        ("A=^lo,docker0=x", "^lo,docker0=x"),
    ],
)
def test_a_variables_file_is_read_as_shells_and_containers_write_it(tmp_path: Path, line: str, value: str) -> None:
    file = tmp_path / "variables"
    file.write_text(f"# theirs\n\n{line}\n")
    assert read_environment(file)["A"] == value


@pytest.mark.parametrize("line", ["A", 'A="eth0', "export", "2A=1", "A-B=1", "setenv A 1"])
def test_a_line_that_sets_no_variable_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "variables"
    file.write_text(f"B=1\n{line}\n")
    with pytest.raises(UserError, match=r"line 2: --env-file: .*, allowed: NAME=VALUE"):
        read_environment(file)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "HTTPS_PROXY", "no_proxy", "TRITON_CACHE_DIR"])
def test_the_launching_shells_settings_reach_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "set")
    assert read_environment(None)[name] == "set"


def test_the_remote_shell_interprets_no_user_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed joins the words with blanks and hands them to a shell: they must be safe as they are."""
    monkeypatch.setattr(module, "which", lambda name: name)
    monkeypatch.setattr(module, "_signal", lambda *_: None)
    hostile = ["train", "a'; echo foo", "$(touch x)", "two words", "`id`", "数\n"]
    with prepared(hostile, {"node1": 1}, {"WANDB_API_KEY": "secret"}, tmp_path, 29_000) as (command, own, _):
        assert all(shlex.quote(word) == word for word in command)
        assert "secret" not in " ".join(command)
        order = Order.decode(command[-1])
        assert (order.words, order.folder) == (hostile, os.getcwd())
        assert order.environment_file is not None
        secret = Path(order.environment_file)
        assert json.loads(secret.read_text()) == {"WANDB_API_KEY": "secret"}
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert not any(name.startswith(("PYTHON", "NCCL_")) for name in own)
    assert not secret.exists()


def test_a_remote_rank_runs_its_order(tmp_path: Path) -> None:
    """Its folder, its environment, its log; and how it ended stands beside the log."""
    logs = tmp_path / "logs"
    words = ["config", "validate", "nothing.yaml"]
    order = Order("t", words, str(tmp_path), logs=str(logs))
    command = [sys.executable, "-m", "cqwen_dist.cluster.rank", order.encode()]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RANK": "3"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert (logs / "rank-3.log").read_text().startswith("error: rank 3: nothing.yaml: config: found no such file")
    ending = json.loads((logs / "rank-3.ended").read_text())
    assert (ending["rank"], ending["how"]) == (3, "wrong input")


@pytest.mark.parametrize(
    ("gpu", "theirs", "wanted"), [(True, {}, None), (False, {}, "cpu"), (True, {"DS_ACCELERATOR": "cpu"}, "cpu")]
)
def test_a_rank_over_ssh_looks_for_gpus_on_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, theirs: dict[str, str], wanted: str | None
) -> None:
    """Not on the machine that launches, which may have none; and ranks of a host share its cores."""
    monkeypatch.setattr(rank, "has_gpu", lambda: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(os, "execv", lambda *_: sys.exit(0))
    monkeypatch.setattr(rank.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)
    environment = {"LOCAL_SIZE": "4", "DS_ACCELERATOR": "cpu"}  # as the launcher has it
    monkeypatch.setattr(os, "environ", environment)
    (tmp_path / "variables").write_text(json.dumps({"NCCL_DEBUG": "INFO", **theirs}))
    order = Order("t", ["train"], str(tmp_path), environment_file=str(tmp_path / "variables"))
    monkeypatch.setattr(sys, "argv", ["rank", order.encode()])
    with pytest.raises(SystemExit):
        rank.main()
    assert environment.get("DS_ACCELERATOR") == wanted
    assert (environment["OMP_NUM_THREADS"], environment["NCCL_DEBUG"]) == ("3", "INFO")
