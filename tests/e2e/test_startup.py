"""How the command starts: as a module, at once, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import command_environment

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import runpy, sys
try:
    runpy.run_module("cqwen_dist", run_name="__main__")
except SystemExit as stopped:
    assert not stopped.code, stopped.code
found = {"torch", "transformers", "deepspeed", "numpy"} & set(sys.modules)
assert not found, f"imported by {sys.argv}: {found}"
"""
VERBS = ("train", "launch", "eval", "generate", "export", "plan", "status", "checkpoint", "config")
PLAN = "plan configs/qwen2.5-72b.yaml --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --json"


@pytest.mark.parametrize(("arguments", "said"), [("--help", VERBS), (PLAN, ("{",))])
def test_light_verbs_import_no_torch(arguments: str, said: tuple[str, ...]) -> None:
    """Planning is arithmetic."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=command_environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in said)
