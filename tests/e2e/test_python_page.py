"""docs/python.md and docs/notebook.ipynb, run as they stand: every block and cell in order, offline, on a tiny base."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import fork_server
from support.runs import command_environment, metrics, write_config

from cqwen_dist.run.status import read_status

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def execute(parts: list[str], folder: str, expected: dict[str, object]) -> None:
    """The parts in one namespace, and what names have then."""
    os.chdir(folder)
    os.environ.update(command_environment())
    torch.set_num_threads(1)
    names: dict[str, object] = {"__name__": "__main__"}
    for part in parts:
        exec(compile(part, "part", "exec"), names)  # the repository's own pages
    for expression, value in expected.items():
        assert eval(expression, names) == value, expression


def in_a_process(parts: list[str], folder: Path, **expected: object) -> None:
    process = fork_server().Process(target=execute, args=(parts, str(folder), expected), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0, "its traceback is on stderr"


def test_every_code_block_of_python_md_runs(tmp_path: Path) -> None:
    write_config(tmp_path, run__dir="runs/page", data__train="texts.jsonl").rename(tmp_path / "run.yaml")
    blocks = [block for block in BLOCKS if "# script.py" not in block]
    in_a_process(
        blocks,
        tmp_path,
        **{
            "result.status": "paused",
            "stopping.waited": 2,
            "sorted(model.config.target)": ["law", "median", "name", "scale"],
        },
    )
    for name, steps, status in (("first", 6, "done"), ("second", 2, "done"), ("third", 6, "done")):
        found = read_status(tmp_path / "runs" / name)
        assert (found["step"], found["status"]) == (steps, status), name
    fourth = tmp_path / "runs" / "fourth"
    told = [line.split(",") for line in (fourth / "losses.csv").read_text().splitlines()]
    assert told
    assert [(int(step), float(loss)) for step, loss in told] == [
        (record["step"], record["train/total_loss"]) for record in metrics(fourth)[: len(told)]
    ]


@pytest.mark.slow
def test_the_launch_line_of_python_md_trains_on_two_ranks(tmp_path: Path) -> None:
    """Twice in one process: torchrun's store keeps what the first group has left in it."""
    config = write_config(tmp_path, data__train="texts.jsonl", data__eval_fraction=0.5)
    config.rename(tmp_path / "run.yaml")
    (script,) = (block for block in BLOCKS if "# script.py" in block)
    (tmp_path / "script.py").write_text(f"{script}\nassert train('runs/two/config.yaml').status == 'done'\n")
    (line,) = re.findall(r"^torchrun (.*)$", PAGE, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *line.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=command_environment(),
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("accuracy ")]
    assert len(said) == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "runs/two/environment.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs")], "it is kept without outputs"
    parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    better = "metrics['eval/reg_mdae'] < 0.05 * metrics['eval/baseline_mdae']"  # 0.11 against 22
    near = "sorted(abs(row['predicted'] - row['total']) for row in found)[5] < 1"
    in_a_process(parts, tmp_path, **{better: True, near: True, "len(log.losses)": 40, "len(found)": 10})
