"""`cqwen status`: from the run's own files, and from what scontrol says (a stand-in here)."""

import json
from pathlib import Path

import pytest

from cqwen_dist.run.status import write_status
from cqwen_dist.tools.slurm.run_status import lines, look


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    (folder / "slurm").mkdir(parents=True)
    entries = [
        {"time": 1000.0, "event": "start", "job": "5", "start": 0, "nodes": "node[1-2]", "step": 0},
        {"time": 1100.0, "event": "end", "how": "lost", "reason": "rank 1", "code": 1, "step": 40},
        {"time": 1120.0, "event": "start", "job": "5", "start": 1, "nodes": "node[1-2]", "step": 40},
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "slurm" / "history.jsonl").write_text(text + '{"time": 11')  # cut short by a crash
    write_status(
        folder, "running", step=60, total_steps=300, stage="lora", seconds=75.2, eta_s=4000.0,
        checkpoint="step-00000040", restarts=1, reason=None,
    )  # fmt: skip
    return folder


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_status_shows_a_run_with_its_job(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        f"JobId=5 JobName=cqwen\n   JobState=RUNNING Reason=None Restarts=1\n   NodeList=node[1-2]\n   Comment={run}\n"
    )
    scontrol(tmp_path, monkeypatch, answer)
    for asked in (str(run), "5"):
        document = look(asked)
        assert (document["run"], document["step"]) == (str(run), 60)
        assert document["job"] == {
            "JobId": "5",
            "JobName": "cqwen",
            "JobState": "RUNNING",
            "Restarts": "1",
            "NodeList": "node[1-2]",
        }
    said = lines(look(str(run)))
    assert said[:4] == [
        "running, step 60 of 300, stage lora",
        "1 min 15 s at work, 1 h 06 min to go",
        "last checkpoint: step-00000040",
        "resumed 1 times",
    ]
    assert "job 5 start 0 on node[1-2] from step 0" in said[4]
    assert said[5].endswith("lost at step 40: rank 1")
