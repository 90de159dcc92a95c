"""The container files: what they install is what the project asks for, and a linter has nothing to say."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
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


def steps() -> list[tuple[str, str]]:
    """(instruction, words) of the Dockerfile, without comments."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKER)).splitlines()
    return [(words[0], words[1]) for line in lines if len(words := line.split(None, 1)) == 2]


@pytest.mark.slow
def test_the_dockerfiles_steps_install_what_runs_the_quickstart(tmp_path: Path) -> None:
    """In an environment of its own, with the files that the image gets and no others. The dependencies are this
    environment's, and so are the packages of apt."""
    image, environment, work = tmp_path / "image", tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    site = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given |= {"PATH": path, "TORCH": f"torch=={torch.__version__}", "OMP_NUM_THREADS": "1"}

    def run(command: str) -> str:
        done = subprocess.run(["bash", "-ec", command], cwd=work, env=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    for instruction, words in steps():
        if instruction == "RUN" and not words.startswith("apt-get"):
            run(words.replace("/opt/cqwen", str(image)))
        elif instruction == "COPY":
            *sources, target = words.split()
            to = image / Path(target).relative_to("/opt/cqwen")
            to.parent.mkdir(parents=True, exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    to.mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, to)
    shutil.rmtree(image)  # what is installed needs none of it
    assert str(site) in run("python -c 'import cqwen_dist; print(cqwen_dist.__file__)'")
    few = "model.pretrain.steps=5 stages.0.steps=2 stages.1.steps=2 train.eval_every=100"
    (entry,) = [words for instruction, words in steps() if instruction == "ENTRYPOINT"]
    assert "step 4/4" in run(f"{entry.strip('[]')} quickstart --ranks 1 {few}")
