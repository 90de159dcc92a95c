"""The main road, by the real command: launch, eval, export, generate; cut down, and whole (slow)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.runs import command_environment, cqwen, cqwen_forked, metrics

from cqwen_dist.run.status import read_status

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CUT_DOWN = [
    "model.pretrain.steps=20",
    "data.limit=64",
    "stages.0.steps=3",
    "stages.1.steps=3",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cut-down quickstart, trained by two ranks under the launcher."""
    folder = tmp_path_factory.mktemp("road") / "run"
    done = cqwen_forked("launch", QUICKSTART, "--ranks", 2, f"run.dir={folder}", *CUT_DOWN)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return folder


def one_document(done: subprocess.CompletedProcess[str]) -> Any:
    """What `--json` printed; anything else on stdout, or NaN, fails."""
    assert done.returncode == 0, done.stderr

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(done.stdout, parse_constant=refuse)


def test_the_run_folder_has_all_its_files(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "environment.json", "start.json", "metrics.jsonl", "checkpoints", "latest"} <= names
    assert not [name for name in names if name.startswith(".")], "nothing half-written is left"
    assert read_status(run)["status"] == "done"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["ranks"] == 2
    assert environment["deepspeed_config"]["zero_optimization"]["stage"] == 1
    assert json.loads((run / "start.json").read_text())["calibration"]
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))


def test_the_run_and_its_export_write_the_same_numbers(run: Path) -> None:
    exported = run.parent / "exported"
    assert cqwen_forked("export", run, exported).returncode == 0
    ask = ["--prompt", "A patient of sex 1", "--prompt", "The disease progression after one year was"]
    ask += ["--max-new-tokens", "3", "--json"]
    document = one_document(cqwen_forked("generate", run, *ask))
    assert document["mode"] == "standard"
    first, second = document["outputs"]
    assert first["prompt"] == "A patient of sex 1"
    number = second["numbers"][0]
    low, high = number["intervals"]["0.9"]
    assert low < number["value"] < high
    assert second["text"].lstrip().startswith(f"{number['written']:.10g}")
    (again,) = one_document(cqwen_forked("generate", exported, *ask))["outputs"][1]["numbers"][:1]
    assert again["written"] == number["written"]
    assert again["intervals"]["0.9"] == pytest.approx(number["intervals"]["0.9"], rel=1e-5)


def test_repeating_a_finished_command_says_already_done(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    done = cqwen_forked("launch", QUICKSTART, "--ranks", 2, f"run.dir={run}", *CUT_DOWN)
    assert (done.returncode, done.stdout) == (0, f"already done: {run}\n")
    alone = cqwen_forked("train", QUICKSTART, f"run.dir={run}", *CUT_DOWN)
    assert alone.returncode == 0
    assert "already done: 6 steps" in " ".join(alone.stdout.split())
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_the_whole_quickstart_beats_the_median_and_keeps_its_words(tmp_path: Path) -> None:
    figures = one_document(cqwen("quickstart", f"run.dir={tmp_path / 'run'}", "--json", cwd=ROOT))
    assert figures["eval/reg_mdae"] < 0.8 * figures["eval/baseline_mdae"]
    assert figures["eval/accuracy"] >= figures["eval/base_accuracy"] - 0.02


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
