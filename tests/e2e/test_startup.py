"""How the command starts: at once, without torch, and as a module too."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment, cqwen

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from cqwen_dist.cli import main
sys.argv = ["cqwen", *sys.argv[1:]]
try:
    main()
except SystemExit as stopped:
    assert not stopped.code, stopped.code
found = {"torch", "transformers", "deepspeed", "numpy"} & set(sys.modules)
assert not found, f"imported by {sys.argv}: {found}"
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "configs/quickstart.yaml", "--json"],
    ],
)
def test_light_verbs_import_no_torch(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=command_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_package_runs_as_a_module() -> None:
    said = cqwen("--help").stdout
    for verb in ("train", "launch", "eval", "generate", "export", "plan", "status", "checkpoint", "config"):
        assert verb in said
