"""What the system, a disk or a stranger's file does is told in one line, not in a traceback."""

import errno
import os
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cqwen_dist import cli
from cqwen_dist.checkpoint.manifest import latest_checkpoint, read_manifest
from cqwen_dist.config import DataConfig, UserError, load_config
from cqwen_dist.config.errors import DiskError
from cqwen_dist.data.records import ReadReport
from cqwen_dist.data.sources import read_texts
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.slurm import run_status
from cqwen_dist.training.train import open_session


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def verb(run: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_status, "look", verb)
    monkeypatch.setattr(sys, "argv", ["cqwen", "status", "runs/x"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "ended by Ctrl-C\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/locked/run"), 2, "path: found Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "ulimit -n: found Too many open files, allowed"),
        (
            DiskError("run.dir", "no file system", "one that is there", "/nfs/run", away=True),
            74,
            "error: /nfs/run: run.dir: found no file system",
        ),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 1, ""),
    ],
)
def test_errors_of_the_operating_system_are_one_line(monkeypatch, capsys, error, code, said) -> None:
    def verb(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", verb)
    if code == 1:
        with pytest.raises(OSError, match="reset"):
            cli.main()
        return
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == code
    assert said in capsys.readouterr().err


def test_a_disk_error_in_safetensors_is_a_user_error(tmp_path, monkeypatch, one_rank) -> None:
    import torch

    from cqwen_dist.training import train

    monkeypatch.setattr(train, "main_rank_first", lambda action: action())
    config = load_config(one_rank.parent / "config.yaml", [f"run.dir={tmp_path}"])
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with (
        pytest.raises(UserError, match=r"run\.dir: found Error while serializing: .*os error 28\), allowed: a disk"),
        open_session(config, Runtime(0, 1, torch.device("cpu"), 60.0)),
    ):
        raise full
    assert "No space left" in read_status(tmp_path)["reason"]


def test_a_pipe_instead_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    for name in ("latest", "manifest.json", "status.json"):
        os.mkfifo(tmp_path / name)
    assert latest_checkpoint(tmp_path) is None
    assert read_manifest(tmp_path) is None
    assert read_status(tmp_path) == {"status": "unknown"}


def test_refuses_a_data_folder_with_a_loading_script(tmp_path: Path) -> None:
    (folder := tmp_path / "data").mkdir()
    (folder / "data.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match=r"data\.train: found "):
        list(read_texts(str(folder), DataConfig(train=str(folder)), ReadReport(), "data.train"))
