"""The text of batch scripts: whole files compared, hostile strings run through bash and sbatch's own quoting."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cqwen_dist.config import UserError
from cqwen_dist.tools.slurm.submission import Job, Resources, _quoted, _template, render

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
        account="lab-7",
        qos="long",
        constraint="(a|b)&c",
        exclude="node[3,7-9]",
        time="2-00:00:00",
        exclusive=True,
        sbatch=("--comment=two words", "--mail-type=END"),
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


@pytest.mark.parametrize("kind", ["train", "sweep"])
def test_the_shipped_scripts_equal_the_rendered_ones(kind: str) -> None:
    output = "cqwen-%j.out" if kind == "train" else "cqwen-%A_%a.out"  # their run is given on the command line
    directives = [f"--job-name=cqwen-{kind}", f"--output={output}", "--nodes=1", "--ntasks-per-node=1"]
    directives += ["--signal=B:USR1@180", "--open-mode=append", "--requeue"]
    rendered = _template().render(job=None, shipped=kind, directives=directives)
    assert (ROOT / "slurm" / f"{kind}.sbatch").read_text() == rendered, (
        "slurm/*.sbatch come from cqwen_dist/tools/slurm/job.sbatch.j2: write what is rendered here into them"
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
    assert words[0] == str(FULL.config)
    assert words[1:] == ["apptainer", "exec", "--nv", "--bind", "/data dir", f"/images/{HOSTILE}.sif", "python3"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["plain", HOSTILE, 'a "quoted" \\ word'])
def test_an_option_is_quoted_as_sbatch_reads_it(value: str) -> None:
    """sbatch takes double quotes and backslashes; it expands nothing. (On the real one: test_slurm_jobs.)"""
    quoted = _quoted(value)
    assert "\n" not in quoted
    if quoted != value:
        assert quoted[0] == quoted[-1] == '"'
        assert quoted[1:-1].replace('\\"', "\0").replace("\\\\", "\\").replace("\0", '"') == value


def test_refuses_options_that_make_no_valid_job() -> None:
    made: list[tuple[Callable[[], object], str]] = [
        (lambda: Resources(nodes=0), "--nodes: found 0, allowed: 1 or more"),
        (lambda: Resources(time="soon"), "--time: found 'soon'"),
        (lambda: replace(PLAIN, resources=Resources(partition="a\nb")), "printable"),
        (lambda: Resources(sbatch=("mem=0",)), "--sbatch: found 'mem=0'"),
        (lambda: Resources(sbatch=("--gres=gpu:a100:8",)), "allowed: with --gpus-per-node too"),
        (lambda: replace(PLAIN, setup=("a\n#SBATCH --nodes=9",)), "printable"),
        (lambda: replace(PLAIN, run_dir=Path("/r\\s")), "without backslashes"),
        (lambda: replace(PLAIN, warn_s=5), "--warn-s: found 5"),
        (lambda: replace(PLAIN, container_command="docker"), "found 'docker', allowed: with --container"),
        (lambda: Resources(sbatch=("--array=0-3",)), "slurm/sweep.sbatch"),
        (lambda: Resources(sbatch=("-t2",)), "allowed: --time of cqwen submit"),
        (lambda: Resources(exclusive=True, cpus_per_task=4), "--cpus-per-task: found 4, allowed: no value"),
    ]
    for make, said in made:
        with pytest.raises(UserError) as refused:
            make()
        assert said in str(refused.value)
    for time in ("90", "1-12", "UNLIMITED"):
        assert f"--time={time}" in replace(PLAIN, resources=Resources(time=time)).directives()


@pytest.mark.parametrize(
    ("resources", "lines"),
    [
        (Resources(gpus_per_node=1), ["--cpus-per-task=4"]),
        (Resources(ranks_per_node=2), ["--cpus-per-task=2"]),
        (Resources(gpus_per_node=2, cpus_per_task=24, mem="200G"), ["--cpus-per-task=24", "--mem=200G"]),
        (Resources(gpus_per_node=8, exclusive=True), ["--exclusive", "--mem=0"]),
    ],
)
def test_a_job_takes_whole_nodes_only_where_asked(resources: Resources, lines: list[str]) -> None:
    kinds = ("--exclusive", "--cpus-per-task", "--mem")
    found = [line for line in replace(PLAIN, resources=resources).directives() if line.startswith(kinds)]
    assert found == lines


def test_gpus_are_requested_as_gpus_per_node_or_gres() -> None:
    """A typed one in place of --gpus-per-node, which some sites refuse; a rank for each as before."""
    needs = Resources(nodes=2, gpus_per_node=8, sbatch=("--gres=gpu:a100:8",))
    lines = render(replace(PLAIN, resources=needs)).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH") and "gpu" in line] == ["#SBATCH --gres=gpu:a100:8"]
    assert "ranks=8" in lines
    assert "export DS_ACCELERATOR=cpu" not in lines
