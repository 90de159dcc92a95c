"""The code that an exported folder carries: it answers as the package does, where the package is not."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import MODES, answers, learnt
from support.exported import tiny_pair, write_folder
from support.numerics import assert_close
from support.runs import command_environment
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.generate.modes import MODES as ALL_MODES
from cqwen_dist.tools.export import portable
from cqwen_dist.tools.export.export import export

LORA = {"r": 3, "alpha": 6, "dropout": 0.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def same(found: Any, wanted: Any, where: str = "") -> None:
    """To the bit: the same products in the same shapes."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            same(found[key], value, f"{where} {key}")
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for one, other in zip(found, wanted, strict=True):
            same(one, other, where)
    else:
        assert found == wanted, where


def test_exported_code_gives_the_packages_answers(tmp_path: Path) -> None:
    shape = {"number_dims": 2, "wide": 64, "depths": 2, "candidates": "arithmetic"}
    merged = write_folder(tmp_path / "a", *tiny_pair(lora=LORA, **shape))
    factors = {"levels": {"0.5": 0.9, "0.9": 0.25}, "n": 80}
    (merged / "calibration.json").write_text(json.dumps(factors))
    other = tiny_pair(lora={**LORA, "dora": True}, number_dims=1, kind="llama")
    folders = [
        export(merged, tmp_path / "merged", merge=True),
        export(write_folder(tmp_path / "b", *other), tmp_path / "adapters"),
    ]
    # The first is saved again by the package, and still carries its code
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folders[0]), AutoTokenizer.from_pretrained(folders[0])
    for file in folders[0].glob("*.py"):
        file.unlink()
    model.save_pretrained(folders[0])
    tokenizer.save_pretrained(folders[0])
    out, script = tmp_path / "answers.pt", Path(__file__).parents[2] / "support" / "answers.py"
    environment = command_environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
    command = [sys.executable, str(script), str(out), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    *found, further = torch.load(out, weights_only=True)
    wanted = [answers(folder) for folder in folders]
    assert set(MODES) == set(ALL_MODES)
    for own, package, folder in zip(found, wanted, folders, strict=True):
        assert any(package[mode]["records"] for mode in MODES)
        same(own, package, folder.name)
    assert "with 90 % between" in done.stdout.splitlines()[-1], "the card's snippet"
    assert further["saved again"] == further["objects"] == wanted[0]["pipeline"]
    for own, folder in zip(further["learnt"], folders, strict=True):
        package = learnt(folder)
        assert own.keys() == package.keys()
        for name, value in package.items():
            assert_close(own[name], value, 1e-5, f"{folder.name}: {name}")


@pytest.mark.parametrize(
    ("adapters", "more"), [(False, ()), (True, (("cqwen_dist.tables.wide.wide_part", "WidePart"),))]
)
def test_exported_code_imports_only_transformers_dependencies_and_peft(tmp_path, adapters, more) -> None:
    needed = importlib.metadata.requires("transformers") or []
    names = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in needed if "extra ==" not in need}
    allowed = {*sys.stdlib_module_names, *names, "torch", "transformers", *(["peft"] if adapters else [])}
    imported = set()
    texts = portable.portable_files(adapters, more)
    assert ("class WidePart" in texts[portable.MODELING]) == bool(more)
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        imported |= set(get_imports(tmp_path / f"{name}.py"))  # what transformers asks for before it loads them
        assert re.search(r"^\s*(import|from) cqwen_dist", text, re.M) is None
    assert imported <= allowed
    assert ("peft" in imported) == adapters
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    checked = subprocess.run(ruff, capture_output=True, text=True)
    assert checked.returncode == 0, f"a name that is missing, defined twice or unused:\n{checked.stdout[:2000]}"
