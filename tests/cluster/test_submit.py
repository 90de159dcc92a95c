"""`cqwen submit` with a stand-in for sbatch: what is checked, written, submitted and said."""

import os
from pathlib import Path

import pytest
from support.runs import write_config

from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.status import write_status
from cqwen_dist.tools.slurm.submission import Resources, plan_job

SBATCH = """#!/bin/bash
for word in "$@"; do
  if [ -n "$SLURM_CPU_BIND" ]; then echo "sbatch: error: of a job around it" >&2; exit 1; fi
  if [ "$word" = --test-only ]; then echo "sbatch: Job 1 to start at noon" >&2; exit 0; fi
done
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
echo "$((40 + $(wc -l < "$(dirname "$0")/calls")));cluster"
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that takes everything; it writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_submits_a_job_with_its_own_copy_of_the_config(tmp_path, sbatch, monkeypatch, cqwen) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")  # submitted from within a job
    config = write_config(tmp_path)
    words = ["submit", config, "train.seed=3", "--nodes", 2, "--ranks-per-node", 2, "--partition", "main"]
    done = cqwen(*words, "--sbatch=--mem=0", "--sbatch=--dependency=afterok:7")
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout.splitlines()
    script = tmp_path / "run" / "slurm" / "submit-1" / "job.sbatch"
    assert (sbatch / "calls").read_text().splitlines() == [f"--parsable {script}"]
    assert out[0] == "job 41: cqwen-run, 2 nodes x 2 ranks"
    assert [line.partition(":")[0] for line in out[1:]] == ["follow", "stop", "resume"]
    copied = script.with_name("config.yaml")
    assert load_config(copied).train.seed == 3, "what is queued does not change when the file does"
    text = script.read_text()
    assert f"run=({copied})\n" in text
    for line in ("--mem=0", "--partition=main", "--dependency=afterok:7"):
        assert f"#SBATCH {line}\n" in text

    tried = cqwen("submit", config, "train.seed=3", "--dry-run")
    assert (tried.returncode, tried.stdout.splitlines()[0]) == (0, "#!/usr/bin/env bash")
    assert tried.stderr.splitlines()[0] == "Job 1 to start at noon"
    assert not (tmp_path / "run" / "slurm" / "submit-2").exists()


def test_a_dry_run_needs_no_slurm_and_writes_nothing(tmp_path, monkeypatch, cqwen) -> None:
    config = write_config(tmp_path)
    monkeypatch.setenv("PATH", os.devnull)
    tried = cqwen("submit", config, "--nodes", 2, "--dry-run")
    assert (tried.returncode, tried.stdout.splitlines()[0]) == (0, "#!/usr/bin/env bash")
    assert "there is no sbatch here" in tried.stderr
    done = cqwen("submit", config, "--nodes", 2)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: sbatch: no such command here")
    assert not (tmp_path / "run").exists()


def test_a_config_that_cannot_run_is_not_submitted(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with pytest.raises(UserError, match="run.resume"):  # noqa: RUF043
        plan_job(config, ["run.resume=never"], Resources())
    with pytest.raises(UserError, match="data.train"):  # noqa: RUF043
        plan_job(config, ["data.train=nowhere"], Resources())
    run = tmp_path / "run"
    run.mkdir()
    write_status(run, "done")
    (run / "latest").write_text("step-00000006\n")
    with pytest.raises(UserError, match="a run that is not done yet"):
        plan_job(config, [], Resources())


@pytest.mark.parametrize(("limit", "longer"), [("3", "4")])
def test_a_time_limit_within_the_warning_is_refused(tmp_path: Path, limit: str, longer: str) -> None:
    """The job would be told to save as it starts, and queue itself again until the budget is spent."""
    config = write_config(tmp_path)
    with pytest.raises(UserError, match=f"--time: found '{limit}', allowed: more than the 180 s of --warn-s"):
        plan_job(config, [], Resources(time=limit))
    plan_job(config, [], Resources(time=longer))
