"""The main road, by the real command: launch, eval, export, load elsewhere, generate; cut down, and whole (slow)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import command_environment, cqwen, cqwen_forked, metrics

from cqwen_dist.run.status import read_status

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CUT_DOWN = [
    "model.pretrain.steps=40",
    "data.limit=64",
    "stages.0.steps=3",
    "stages.1.steps=3",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
]

# What somebody else's process does with an exported folder; prints U and Y of one text, and the backbone's z.
LOAD_ELSEWHERE = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model import CausalQwenForCausalLM
base, plain, merged = sys.argv[1:4]
batch = NumericalAwareTokenizer.from_pretrained(plain).preprocess(["A patient of sex 1 aged 59.5 with body mass index"])
found = {}
for name, folder, kind in [("own", plain, CausalQwenForCausalLM), ("auto", plain, AutoModelForCausalLM),
                           ("merged", merged, AutoModelForCausalLM)]:
    model = kind.from_pretrained(folder).eval()
    assert type(model) is CausalQwenForCausalLM
    out = model(**batch)
    found[name] = [getattr(out, key).flatten().tolist() for key in ("loc_U", "scale_U", "loc_Y", "scale_Y")]
    words = batch["input_ids"].clamp(max=model.config.num_token_id - 1)
    found["z of " + name] = model.model.features(words, torch.zeros(words.shape)).flatten().tolist()
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), plain + "/adapter").eval()
assert "is_merged" not in plain
hidden = adapted.get_base_model().model(input_ids=words).last_hidden_state
found["z of peft"] = hidden.flatten().tolist()
with adapted.disable_adapter():
    found["z of base"] = adapted.get_base_model().model(input_ids=words).last_hidden_state.flatten().tolist()
found["parameters"] = [sum("lora_" in n for n, _ in m.named_parameters()) for m in (adapted, model)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cut-down quickstart, trained by two ranks under the launcher."""
    folder = tmp_path_factory.mktemp("road") / "run"
    done = cqwen("launch", QUICKSTART, "--ranks", 2, f"run.dir={folder}", *CUT_DOWN)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Iterator[dict[str, Path]]:
    folders = {"plain": run.parent / "plain", "merged": run.parent / "merged"}
    assert cqwen_forked("export", run, folders["plain"]).returncode == 0
    assert cqwen_forked("export", run, folders["merged"], "--merge").returncode == 0
    return folders


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


def test_eval_json_equals_the_runs_figures(run: Path, exported: dict[str, Path]) -> None:
    last = metrics(run)[-1]
    figures = one_document(cqwen_forked("eval", run, "--json"))
    for name in (
        "eval/accuracy",
        "eval/reg_mdae",
        "eval/cls_loss_mean",
        "eval/baseline_mdae",
        "eval/num_f1",
        "eval/base_accuracy",
    ):
        assert figures[name] == pytest.approx(last[name], rel=1e-4), name
    again = one_document(cqwen_forked("eval", exported["merged"], "--data", "bundled:diabetes/test", "--json"))
    assert again["eval/accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-3)


def test_an_export_loads_in_another_process_as_the_same_model(run: Path, exported: dict[str, Path]) -> None:
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(run / "base"), *map(str, exported.values())]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(), cwd=run.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["own"] == found["auto"]
    for mine, merged in zip(found["own"], found["merged"], strict=True):
        assert merged == pytest.approx(mine, rel=1e-3, abs=1e-5)
    assert found["z of peft"] == pytest.approx(found["z of own"], rel=1e-5, abs=1e-6), "the adapter folder"
    moved = max(abs(a - b) for a, b in zip(found["z of base"], found["z of peft"], strict=True))
    assert moved > 1e-3, "adapters that do nothing would prove nothing"
    assert found["parameters"][0] > 0
    assert found["parameters"][1] == 0, "nothing of the adapters is left in a merged model"


def test_generate_writes_numbers(run: Path, exported: dict[str, Path]) -> None:
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
    (again,) = one_document(cqwen_forked("generate", exported["plain"], *ask))["outputs"][1]["numbers"][:1]
    assert again["written"] == number["written"]
    assert again["intervals"]["0.9"] == pytest.approx(number["intervals"]["0.9"], rel=1e-5)


def test_repeating_a_finished_command_says_already_done(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    done = cqwen("launch", QUICKSTART, "--ranks", 2, f"run.dir={run}", *CUT_DOWN)
    assert (done.returncode, done.stdout) == (0, f"already done: {run}\n")
    alone = cqwen_forked("train", QUICKSTART, f"run.dir={run}", *CUT_DOWN)
    assert alone.returncode == 0
    assert "already done: 6 steps" in " ".join(alone.stdout.split())
    assert (run / "metrics.jsonl").read_bytes() == before


# ------------------------------------------------------------------------------------------------- whole, and slow


@pytest.mark.slow
def test_the_whole_quickstart_beats_the_median_and_keeps_its_words(tmp_path: Path) -> None:
    figures = one_document(cqwen("quickstart", f"run.dir={tmp_path / 'run'}", "--json", cwd=ROOT))
    assert figures["eval/reg_mdae"] < 0.8 * figures["eval/baseline_mdae"]
    assert figures["eval/accuracy"] >= figures["eval/base_accuracy"] - 0.02
    assert figures["median_mdae"] == pytest.approx(figures["eval/baseline_mdae"], rel=1e-6)
