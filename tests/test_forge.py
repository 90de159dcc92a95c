"""What a forge runs: workflows and forms by GitHub's own schemas, and each command in them is one that there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

tomllib = pytest.importorskip("tomllib", reason="Python 3.10")
ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEMAS = {
    "github-workflows": [f".github/workflows/{name}.yml" for name in WORKFLOWS],
    "github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/wish.yml"],
    "github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schema(schema: str) -> None:
    pytest.importorskip("check_jsonschema")
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    found = subprocess.run([*checker, *SCHEMAS[schema]], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_jobs_call_what_the_makefile_and_the_hooks_have() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    jobs = yaml.safe_load(WORKFLOWS["ci"])["jobs"]
    called = {word for job in WORKFLOWS.values() for word in re.findall(r"make ([a-z-]+)", job)}
    assert called | set(jobs["other-machines"]["strategy"]["matrix"]["part"]) <= targets
    assert {"lint", "test", "test-oldest"} <= called
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert {"$(BIN)" + hook["entry"].removeprefix(".venv/bin").partition(" --")[0] for hook in hooks} <= {
        "$(BIN)/" + line for line in re.findall(r"\$\(BIN\)/((?:ruff \w+|mypy))", makefile)
    }


def test_jobs_use_the_projects_versions() -> None:
    pythons = yaml.safe_load(WORKFLOWS["ci"])["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    (torch,) = set(re.findall(r"TORCH: (torch==[\d.]+)\+cpu", WORKFLOWS["ci"]))
    assert f"?= {torch}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "## " + PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
