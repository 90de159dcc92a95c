"""The container files: what they install is what the project asks for, and a linter has nothing to say."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

tomllib = pytest.importorskip("tomllib", reason="Python 3.10")
ROOT = Path(__file__).parents[1]
DOCKER, APPTAINER = ((ROOT / "launch" / name).read_text() for name in ("Dockerfile", "cqwen.def"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_container_versions_equal_the_projects() -> None:
    torch = set(re.findall(r"torch==([\d.]+)", DOCKER + APPTAINER + (ROOT / "Makefile").read_text()))
    assert len(torch) == 1, f"one torch everywhere, not {torch}"
    (wanted,) = (Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "torch")
    assert wanted.specifier.contains(*torch)
    python = {re.search(r"ARG PYTHON=([\d.]+)", DOCKER)[1], re.search(r"From: python:([\d.]+)-", APPTAINER)[1]}  # type: ignore[index]
    assert len(python) == 1
    assert SpecifierSet(PROJECT["requires-python"]).contains(*python)


def test_containers_copy_the_files_that_the_build_needs() -> None:
    """The package, the configs that a link in it names, and the files that pyproject.toml names."""
    for path in ("pyproject.toml", PROJECT["readme"], "LICENSE", "configs", "cqwen_dist"):
        assert (ROOT / path).exists()
        assert re.search(rf"^COPY .*\b{path}\b", DOCKER, re.M), f"Dockerfile: {path}"
        assert f"    {path} /opt/cqwen/{path}\n" in APPTAINER
    assert (ROOT / "cqwen_dist" / "configs").resolve() == (ROOT / "configs").resolve()
