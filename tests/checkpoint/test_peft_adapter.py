"""What ZeRO-3 trained, read with plain peft and safetensors where neither DeepSpeed nor this package is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.runs import command_environment, train_run, write_config

from cqwen_dist.checkpoint import adapter
from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import LoraConfig, UserError
from cqwen_dist.config.architectures.base_architecture import USUAL_TARGETS

IDS = list(range(20))
READ = """
import json, sys
for name in ("deepspeed", "cqwen_dist"):
    sys.modules[name] = None  # an import of it fails
from pathlib import Path
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

checkpoint, base, ids = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint / "adapter").eval()
b = [p for name, p in model.named_parameters() if "lora_B" in name]
assert b and all(p.abs().sum() > 0 for p in b), "adapters that were not read"
with torch.no_grad():
    z = model.base_model.model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
rows = [load_file(path) for path in sorted(checkpoint.glob("rows-*.safetensors")) if ".moments." not in path.name]
weight = torch.cat([part["action.cls_weight"] for part in rows])
heads = load_file(checkpoint / "heads.safetensors")
loc = z @ heads["abduction.loc_net.weight"].T + heads["abduction.loc_net.bias"]
s = loc[:, : weight.shape[1]] @ weight.T
json.dump({"z": z.tolist(), "s": s.tolist(), "rows": len(rows)}, open(sys.argv[4], "w"))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO-3 on two ranks, the vocabulary over both, trained through the stage of adapters."""
    config = write_config(
        tmp_path_factory.mktemp("zero3"), parallel__zero_stage=3, parallel__vocab_group_size=2, model__lora__alpha=8
    )
    train_run(config, world=2)
    return config.parent / "run"


def test_a_zero_3_runs_adapter_loads_without_deepspeed(run: Path, tmp_path: Path) -> None:
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    args = [str(checkpoint), str(run / "base"), json.dumps(IDS), str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-c", READ, *args], env=command_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stderr.lower()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows"] == 2

    model, _ = load_trained(checkpoint)
    with torch.no_grad():
        ids, zeros = torch.tensor([IDS]), torch.zeros(1, len(IDS), dtype=torch.float64)
        z = model.model.features(ids, zeros)[0]
        loc_s = model(ids, zeros, logits_to_keep=len(IDS)).logits[0]
    torch.testing.assert_close(torch.tensor(found["z"]), z, atol=1e-4, rtol=1e-4)
    bias = model.model.action.cls_bias
    torch.testing.assert_close(torch.tensor(found["s"]) + bias, loc_s, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "dora"), [("qwen2", False), ("mistral", True)])
def test_adapter_names_convert_to_peft_and_back(tmp_path: Path, kind: str, dora: bool) -> None:
    """Against PEFT's own writing of an adapter, DoRA's magnitudes included."""
    from peft import get_peft_model
    from safetensors.torch import load_file
    from support.tiny import tiny_base

    from cqwen_dist.model.lora import peft_config

    model = get_peft_model(tiny_base(kind), peft_config(LoraConfig(dora=dora)))
    model.save_pretrained(tmp_path)
    inner = model.base_model.model.model
    ours = {f"backbone.transformer.{name}": p.detach() for name, p in inner.named_parameters() if ".lora_" in name}
    written = load_file(tmp_path / adapter.WEIGHTS)
    made = adapter.to_peft(ours)
    assert made.keys() == written.keys()
    back = adapter.read_adapter(tmp_path)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) and torch.equal(made[k], written[k]) for name in back for k in made)


def begin_with(run: Path, folder: Path, source: Path, *overrides: str, **changes: Any) -> dict[str, Any]:
    """Train a new run that begins with `source`; its start.json."""
    config = write_config(folder, **{"model__lora__alpha": 8, "stages__0__steps": 1, "stages__1__steps": 1, **changes})
    train_run(config, f"model.name_or_path={run / 'base'}", "model.architecture=null", "model.tokenizer=null",
              f"model.warm_start={source}", *overrides)  # fmt: skip
    return json.loads((folder / "run" / "start.json").read_text())


def test_a_run_begins_with_another_runs_weights(run: Path, tmp_path: Path) -> None:
    """It is evaluated as it was left: adapters, heads, and the unit that the numbers were learnt in."""
    start = begin_with(run, tmp_path, run)
    state = json.loads((latest_checkpoint(run) / "state.json").read_text())  # type: ignore[operator]
    assert "calibration" not in start
    assert start["eval"]["eval/cls_loss_mean"] == pytest.approx(state["figures"]["eval/cls_loss_mean"], rel=1e-5)
    assert start["eval"]["eval/reg_mdae"] == pytest.approx(state["figures"]["eval/reg_mdae"], rel=1e-4)


def test_a_run_begins_with_an_adapter_that_peft_saved(run: Path, tmp_path: Path) -> None:
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    start = begin_with(run, tmp_path, checkpoint / "adapter", "stages.0.lr=1e-12", "stages.1.lr=1e-12")
    assert "calibration" in start, "the heads are its own"
    mine = load_checkpoint(latest_checkpoint(tmp_path / "run"), (0, 2**62)).features  # type: ignore[arg-type]
    theirs = load_checkpoint(checkpoint, (0, 2**62)).features
    for name in (name for name in theirs if ".lora_" in name):
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-8, rtol=1e-6)


def test_a_mismatched_or_pickled_adapter_is_refused_by_its_key(run: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"model\.lora\.r: found 4, allowed: 2, as in"):
        begin_with(run, tmp_path, run, "model.lora.r=4")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/run'\ntR.")  # what is in it would run
    adapter.write_config(foreign, {"r": 2, "alpha": 8}, None)
    with pytest.raises(AssertionError, match=r"found adapter_model.bin, a pickle, allowed: safetensors"):
        begin_with(run, tmp_path, foreign)
    with pytest.raises(UserError, match="a pickle"):
        load_trained(foreign)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora_alpha": 32}, "model.lora.alpha: found 16, allowed: 32, as in"),
        ({"use_dora": True}, "model.lora.dora: found False, allowed: True"),
        ({"target_modules": ["q_proj"]}, "model.lora.target_modules: found .*, allowed: .'q_proj'., as in"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern: found {'q_proj': 64}, allowed: none"),
        ({"target_modules": [f"model.layers.{i}.x.{name}" for i in (0, 1) for name in USUAL_TARGETS]}, None),
        ({"target_modules": r".*\.[qkv]_proj"}, None),
        ({}, None),
    ],
)
def test_adapter_of_unsupported_peft_kind_is_refused(tmp_path: Path, changes: dict[str, Any], says: str | None) -> None:
    lora = LoraConfig(alpha=16)
    adapter.write_config(tmp_path, lora.model_dump(), None)
    known = json.loads((tmp_path / adapter.CONFIG).read_text())
    (tmp_path / adapter.CONFIG).write_text(json.dumps({**known, **changes}))
    if says is None:
        adapter.refuse_lora_changes(tmp_path, lora)
        return
    with pytest.raises(UserError, match=says):
        adapter.refuse_lora_changes(tmp_path, lora)


def test_an_unreadable_adapter_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no adapter_model\.safetensors, allowed: an adapter that PEFT saved"):
        adapter.read_adapter(tmp_path)
    (tmp_path / adapter.WEIGHTS).write_bytes(b"\x07" * 30)
    with pytest.raises(UserError, match="allowed: safetensors that can be read"):
        adapter.read_adapter(tmp_path)
    save_file({"base_model.model.score.weight": torch.zeros(2)}, tmp_path / adapter.WEIGHTS)
    with pytest.raises(UserError, match=r"found 'base_model\.model\.score\.weight', allowed: adapters of a causal"):
        adapter.read_adapter(tmp_path)
    with pytest.raises(UserError, match=r"allowed: an adapter_config\.json that can be read"):
        adapter.refuse_lora_changes(tmp_path, LoraConfig())


def test_an_adapters_modules_are_written_in_order(tmp_path: Path) -> None:
    """PEFT holds a set, whose order is another in each process, so the manifests of equal runs would differ."""
    adapter.write_config(tmp_path, LoraConfig().model_dump(), None)
    modules = json.loads((tmp_path / adapter.CONFIG).read_text())["target_modules"]
    assert modules == sorted(modules)
    assert len(modules) == 7
