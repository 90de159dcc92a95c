"""A user's own abduction network, gate and number head, named in the config by their import path."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from support import custom_parts
from support.runs import cqwen_forked, losses, metrics, set_back, train_run, write_config
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

import cqwen_dist.auto  # noqa: F401
from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.heads.fused_loss import gate_named
from cqwen_dist.tools.export.export import export

TRUST = "CQWEN_TRUST_REMOTE_CODE"
PARTS = {"model__abduction": "support.custom_parts:Bent", "loss__gate": "support.custom_parts:HalfGate"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `one_rank`, with a network and a gate of one's own, and two micro-batches a step."""
    folder = tmp_path_factory.mktemp("custom")
    train_run(write_config(folder, train__checkpoint_every=1, train__keep_checkpoints=9, **PARTS))
    return folder / "run"


def test_custom_parts_train_and_are_saved(run: Path, one_rank: Path) -> None:
    """Bent begins as the linear network and HalfGate is half the default gate: so the first step tells them apart."""
    mine, plain = metrics(run), metrics(one_rank)
    assert mine[0]["train/cls_loss_mean"] == pytest.approx(plain[0]["train/cls_loss_mean"], rel=1e-5)
    assert mine[0]["train/reg_loss_effective"] == pytest.approx(0.5 * plain[0]["train/reg_loss_effective"], rel=1e-5)
    assert load_checkpoint(checkpoint_folder(run, 6), (0, 2**62)).heads["abduction.bend"].any()
    again = load_config(run / "config.yaml")
    assert (again.model.abduction, again.loss.gate) == tuple(PARTS.values())


def test_a_run_with_custom_parts_resumes(run: Path, tmp_path: Path) -> None:
    config = set_back(run, tmp_path / "run", 4)
    train_run(config, f"run.dir={tmp_path}/run")
    assert losses(tmp_path / "run")[-2:] == pytest.approx(losses(run)[-2:], rel=1e-5)


def test_loading_a_custom_part_needs_trust_remote_code(run, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(TRUST, raising=False)
    refused = f"model.abduction: found '{PARTS['model__abduction']}', allowed: linear; or {TRUST}=1"
    for command in (("generate", run, "--prompt", "tea"), ("export", run, tmp_path / "no")):
        done = cqwen_forked(*command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert refused in done.stderr
    monkeypatch.setenv(TRUST, "1")
    out = export(run, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["abduction"] == PARTS["model__abduction"]
    ids = torch.tensor([[3, 7, 11]])
    with torch.no_grad():
        whole, again = (load_trained(path)[0] for path in (run, out))
        assert isinstance(again.model.abduction, custom_parts.Bent)
        torch.testing.assert_close(whole(ids).loc_U, again(ids).loc_U, rtol=1e-4, atol=1e-5)

    # Not from the export's own folder, even where Python would find it there
    shutil.copy(custom_parts.__file__, out / "planted.py")
    config = json.loads((out / "config.json").read_text()) | {"abduction": "planted:Bent"}
    (out / "config.json").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(out)
    for load in (load_trained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UserError, match=r"model\.abduction: found 'planted:Bent', allowed: a module that does not"):
            load(out)
    monkeypatch.delenv(TRUST)
    for load in (load_trained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UserError, match=f"allowed: linear; or {TRUST}=1"):
            load(out)


def test_an_unsuitable_network_or_gate_is_one_line() -> None:
    said = r"^model.abduction: found .*TooNarrow: ValueError: its loc of features .* is .*\[2, 3, 23\], allowed: "
    with pytest.raises(UserError, match=said) as caught:
        tiny_model(abduction="support.custom_parts:TooNarrow")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"^loss.gate: found .*ValueError: it gave torch.float32 \[\] for P"):
        gate_named("support.custom_parts:SumGate")


def test_a_missing_class_is_refused_before_the_base_is_built(tmp_path: Path) -> None:
    config = write_config(tmp_path, loss__gate="support.custom_parts:Gone")
    with pytest.raises(AssertionError, match=r"loss\.gate: found support.custom_parts:Gone: AttributeError"):
        train_run(config)
    assert not (tmp_path / "run" / "base").exists()


HEAD = "support.custom_parts:WholeNumbers"


def write_boxes(path: Path, count: int = 80) -> Path:
    """Boxes are counted, tea is weighed."""
    draw = random.Random(0)
    texts = [f"we have {draw.randint(3, 60)} boxes of tea, {draw.uniform(3, 60):.2f} kilos" for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_custom_number_head_trains_decides_is_measured_and_exported(tmp_path, monkeypatch) -> None:
    config = write_config(
        tmp_path,
        model__number_head=HEAD,
        data__train=str(write_boxes(tmp_path / "boxes.jsonl")),
        parallel__vocab_group_size=2,
        stages__0__steps=20,
        stages__0__lr=3e-2,
        train__checkpoint_every=100,
    )
    train_run(config, "run.stop_after=heads", world=2)
    train_run(config, world=2)  # from the checkpoint of the first stage
    run = tmp_path / "run"
    assert sum(losses(run)[-5:]) < 0.9 * sum(losses(run)[:5])
    evaluated = [record for record in metrics(run) if "eval/accuracy" in record]
    assert evaluated[-1]["eval/whole_accuracy"] > 0.9
    assert load_checkpoint(checkpoint_folder(run, 23), (0, 2**62)).heads["action.whole_weight"].any()

    monkeypatch.delenv(TRUST, raising=False)
    with pytest.raises(UserError, match=f"model.number_head: found '{HEAD}', allowed: {TRUST}=1"):
        load_trained(run)
    monkeypatch.setenv(TRUST, "1")
    model, tokenizer = load_trained(export(run, tmp_path / "out", True))
    assert isinstance(model.model.action.number_head, custom_parts.WholeNumbers)
    with torch.no_grad():
        model.model.action.threshold[tokenizer.num_token_id] = -1e4  # a number comes at once
    for prompt, whole in (("we have ", True), ("we have 12 boxes of tea, ", False)):
        ids, values = tokenizer.encode(prompt)
        given = torch.tensor([ids]), torch.tensor([values], dtype=torch.float64)
        _, numbers = model.generate(*given, max_new_tokens=1, return_numbers=True, digits=4)
        (number,) = numbers.records(0, digits=4)
        assert (number.written == round(number.written)) == (number.source is not None) == whole


def test_a_number_head_that_does_not_fit_is_refused() -> None:
    for shape, said in (
        ({"number_head": "support.nowhere:Head"}, "number_head: found support.nowhere:Head: ModuleNotFoundError"),
        ({"number_head": "support.custom_parts:HalfGate"}, r"HalfGate: TypeError: HalfGate\(\) takes no arguments"),
        ({"number_head": HEAD, "candidates": "arithmetic"}, "model.candidates: .*none with a number head of your own"),
    ):
        with pytest.raises(UserError, match=said):
            tiny_model(**shape)
