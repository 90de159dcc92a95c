"""The text of batch scripts: whole files compared, hostile strings run through bash and sbatch's own quoting."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cqwen_dist.config import UserError
from cqwen_dist.config.templates import template
from cqwen_dist.tools.slurm.submission import Job, Resources, render

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
HOSTILE = "a'; echo foo"

PLAIN = Job(
    name="cqwen-gsm8k",
    folder=Path("/home/me/project"),
    run_dir=Path("/scratch/me/runs/gsm8k"),
    script=Path("/scratch/me/runs/gsm8k/slurm/submit-1/job-1.sbatch"),
    resources=Resources(nodes=2, gpus_per_node=8, partition="gpu", time="12:00:00"),
    python="/home/me/project/.venv/bin/python",
)
FULL = Job(
    name=f"{HOSTILE} 数",
    folder=Path(f"/home/me/{HOSTILE}"),
    run_dir=Path(f'/scratch/50% of "me"/{HOSTILE}'),
    script=Path(f"/scratch/{HOSTILE}/job-1.sbatch"),
    resources=Resources(
        nodes=4,
        ranks_per_node=2,
        partition="cpu",
        constraint="(a|b)&c",
        time="2-00:00:00",
        exclusive=True,
        sbatch=("--account=lab-7", "--qos=long", "--exclude=node[3,7-9]", "--comment=two words", "--mail-type=END"),
    ),
    container=f"/images/{HOSTILE}.sif",
    container_command="apptainer exec --nv --bind '/data dir'",
    setup=["module purge", "module load apptainer"],
    warn_s=300,
    max_restarts=2,
    no_preflight=True,
)


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    assert text == path.read_text(encoding="utf-8"), f"{path}: rendered otherwise; look at the difference, then copy it"


@pytest.mark.parametrize(("name", "job"), [("plain.sbatch", PLAIN), ("full.sbatch", FULL)])
def test_the_rendered_script_equals_the_golden_text(name: str, job: Job) -> None:
    compare(name, render(job))


def test_the_shipped_script_equals_the_rendered_one() -> None:
    directives = ["--job-name=cqwen-train", "--output=cqwen-%j.out", "--nodes=1", "--ntasks-per-node=1"]
    directives += ["--signal=B:USR1@180", "--open-mode=append", "--requeue"]
    rendered = template("cqwen_dist.tools.slurm", "job.sbatch.j2").render(job=None, shipped=True, directives=directives)
    assert (ROOT / "slurm" / "train.sbatch").read_text() == rendered, (
        "slurm/train.sbatch comes from cqwen_dist/tools/slurm/job.sbatch.j2: write what is rendered here into it"
    )


SCRIPTS = [
    *sorted((ROOT / "slurm").glob("*.sbatch")),
    *sorted((ROOT / "launch").glob("*.sh")),
    ROOT / "experiments" / "smoke.sh",
    *sorted(GOLDEN.iterdir()),
]


@pytest.mark.parametrize("command", [["bash", "-n"], ["shellcheck"]], ids=lambda command: command[0])
def test_bash_and_shellcheck_accept_the_scripts(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    for path in SCRIPTS:
        done = subprocess.run([*command, path], capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), path


def test_hostile_strings_arrive_unchanged(tmp_path: Path) -> None:
    """Bash runs the script's own assignments; nothing is expanded, nothing is executed."""
    text = render(FULL)
    (assignment,) = [line for line in text.splitlines() if line.startswith("run=(")]
    (python,) = [line for line in text.splitlines() if line.startswith("python=(")]
    script = f'{assignment}\n{python}\nprintf \'%s\\0\' "${{run[@]}}" "${{python[@]}}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    words = done.stdout.split("\0")[:-1]
    assert words[0] == str(FULL.configs[0])
    assert words[1:] == ["apptainer", "exec", "--nv", "--bind", "/data dir", f"/images/{HOSTILE}.sif", "python3"]
    assert not list(tmp_path.iterdir())


def test_refuses_options_that_make_no_valid_job() -> None:
    made: list[tuple[Callable[[], object], str]] = [
        (lambda: Resources(nodes=0), "--nodes: found 0, allowed: 1 or more"),
        (lambda: Resources(sbatch=("--gres=gpu:a100:8",)), "allowed: with --gpus-per-node too"),
        (lambda: replace(PLAIN, container_command="docker"), "found 'docker', allowed: with --container"),
        (lambda: Resources(sbatch=("--array=0-3",)), "several configs, which train in one job"),
    ]
    for make, said in made:
        with pytest.raises(UserError) as refused:
            make()
        assert said in str(refused.value)
    for time in ("90", "1-12", "UNLIMITED"):
        assert f"--time={time}" in replace(PLAIN, resources=Resources(time=time)).directives()
