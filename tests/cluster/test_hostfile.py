"""Hosts, their environment, and what travels to them. No ssh here: test_slurm_jobs has a real one."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cqwen_dist.cluster import launch as module
from cqwen_dist.cluster.launch import prepared, read_environment, read_hostfile
from cqwen_dist.cluster.rank import Order
from cqwen_dist.config import UserError


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=8\n\n me@node-2.lab  slots=4  # half\n")
    assert read_hostfile(path) == {"node1": 8, "me@node-2.lab": 4}


def test_a_wrong_hostfile_is_reported_by_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    for text, said in (
        ("", "at least one line"),
        ("node1 slots=0\n", "line 1: --hostfile: found 'node1 slots=0', allowed: host slots=N"),
        ("-oProxyCommand=x slots=2\n", "line 1"),
        ("a slots=1\na slots=2\n", "this host is listed twice"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as refused:
            read_hostfile(path)
        assert said in str(refused.value)


def test_environment_has_named_variables_and_the_files_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.chdir(tmp_path)
    Path(".deepspeed_env").write_text('# theirs\nNCCL_DEBUG=WARN\nMINE=a\'; echo $(id) = "b"\n')
    found = read_environment()
    assert (found["NCCL_DEBUG"], found["MINE"]) == ("WARN", 'a\'; echo $(id) = "b"')
    assert "SOMETHING_ELSE" not in found
    assert found["PATH"] == os.environ["PATH"]


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
    """Its folder, its environment, its log; and how it ended stands beside the log. (An unknown verb ends at once; for
    other mistakes a rank lets rank 0 speak first, which takes seconds.)"""
    logs = tmp_path / "logs"
    words = ["config", "nothing"]
    order = Order("t", words, str(tmp_path), logs=str(logs))
    command = [sys.executable, "-m", "cqwen_dist.cluster.rank", order.encode()]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RANK": "3"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert (logs / "rank-3.log").read_text().startswith("error: cqwen config: no such command 'nothing'")
    ending = json.loads((logs / "rank-3.ended").read_text())
    assert (ending["rank"], ending["how"]) == (3, "wrong input")
