"""Exported folders: what is written, what loads it, in which precision, in how many files, and what is refused."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exported import tiny_pair, write_folder
from support.numerics import assert_close
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import cqwen_dist.auto  # noqa: F401  registers
from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.trained import load_trained, run_of
from cqwen_dist.config import UserError
from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.tools.export import export as export_module
from cqwen_dist.tools.export.export import export

LORA = {"r": 3, "alpha": 6, "dropout": 0.0, "target_modules": ["q_proj", "v_proj", "o_proj"]}
TEXT = "tea costs 3.5 and milk costs"


def folder_of(tmp_path: Path, **shape: Any) -> tuple[CausalQwenForCausalLM, Path]:
    model, tokenizer = tiny_pair(**shape)
    return model, write_folder(tmp_path / "in", model, tokenizer)


def zero_bias(model: CausalQwenForCausalLM) -> None:
    with torch.no_grad():
        model.model.abduction.loc_net.bias.zero_()
        model.model.action.cls_bias.zero_()


def words(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(4))


def same(a: CausalQwenForCausalLM, b: CausalQwenForCausalLM, tolerance: float = 5e-5) -> None:
    """To two layers of fp32's rounding: tensors mapped from a file begin anywhere, which a BLAS may go by."""
    with torch.no_grad():
        x, y = (m(words(), logits_to_keep=2) for m in (a, b))
    for name in ("loc_U", "scale_U", "loc_Y", "scale_Y", "logits"):
        assert_close(y[name], x[name], tolerance, name)


def test_trust_remote_code_in_a_runs_config_alone_is_refused(one_rank, tmp_path, monkeypatch) -> None:
    shutil.copytree(one_rank, run := tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    with pytest.raises(UserError, match=r"config\.yaml: model\.trust_remote_code: found True, allowed: false, or"):
        run_of(run)
    monkeypatch.setenv("CQWEN_TRUST_REMOTE_CODE", "1")
    assert run_of(run)[0].model.trust_remote_code


def test_transformers_ends_an_exports_text_where_training_texts_end(one_rank: Path, tmp_path: Path) -> None:
    """A base's own files may name another end, such as a chat's."""
    shutil.copytree(one_rank, run := tmp_path / "run")
    (file,) = run.glob("**/generation_config.json")
    file.write_text(json.dumps({"eos_token_id": 7}))
    out = export(run, tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, 7]
    with torch.no_grad():
        model.model.action.threshold[tokenizer.eos_token_id] = -1e6
    given = tokenizer("tea", return_tensors="pt")
    assert model.generate(**given, max_new_tokens=5).shape[1] == given["input_ids"].shape[1] + 1


@pytest.mark.parametrize("merge", [False, True])
def test_exports_the_whole_model_a_merged_one_or_a_peft_adapter(tmp_path: Path, merge: bool) -> None:
    model, folder = folder_of(tmp_path, lora=LORA)
    out = export(folder, tmp_path / "out", merge)
    again, _ = load_trained(out)
    same(model, again)
    assert (again.config.lora is None) == merge
    assert (out / "adapter" / "adapter_model.safetensors").is_file() != merge
    assert not list(tmp_path.glob(".out*"))
    allowed = out.stat().st_mode & 0o666
    assert all(file.stat().st_mode & 0o666 == allowed for file in out.rglob("*") if file.is_file())
    card = (out / "README.md").read_text()
    assert "# out" in card
    assert str(tmp_path) not in card
    assert ("peft for the adapters" in card) != merge


def test_bf16_export_halves_the_backbone_and_keeps_the_heads_in_fp32(tmp_path: Path) -> None:
    model, folder = folder_of(tmp_path, lora=LORA)
    out = export(folder, tmp_path / "out", dtype="bf16")
    again, _ = load_trained(out)
    types = {name: p.dtype for name, p in again.named_parameters()}
    heads = {n: t for n, t in types.items() if "features" not in n or n.endswith(("w_num", "num_row"))}
    assert set(heads.values()) == {torch.float32}
    assert {t for n, t in types.items() if n not in heads} == {torch.bfloat16}
    same(model, again, 0.1)
    assert "Rounded to bf16; largest relative change" in (out / "README.md").read_text()
    back = export(out, tmp_path / "back", dtype="fp32")
    same(again, load_trained(back)[0], 0.05)
    for name, buffer in again.named_buffers():
        assert buffer.dtype == torch.float32, f"{name}: a rounded rotary frequency is a wrong one"


def test_exports_in_shards_load_by_the_auto_classes(tmp_path: Path) -> None:
    model, folder = folder_of(tmp_path)
    out = export(folder, tmp_path / "out", shard_size="40KB")
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 2
    assert (out / "model.safetensors.index.json").is_file()
    again = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(again, CausalQwenForCausalLM)
    same(model, again.eval())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert isinstance(tokenizer, CausalQwenTokenizer)
    batch = tokenizer([TEXT, "12"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(1).tolist() == [len(tokenizer.encode(TEXT)), 1]
    assert batch["numeric_values"][1, -1] == 12.0
    assert batch["attention_mask"][1, 0] == 0, "padding is on the left, as generating needs it"
    tokenizer.save_pretrained(tmp_path / "second")
    second = AutoTokenizer.from_pretrained(tmp_path / "second")
    assert (second.num_token_id, second.policy) == (tokenizer.num_token_id, tokenizer.policy)
    assert second.encode(TEXT) == tokenizer.encode(TEXT)
    assert second.decode(second(TEXT)["input_ids"], second(TEXT)["numeric_values"]) == TEXT


def test_own_abduction_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CQWEN_TRUST_REMOTE_CODE", "1")
    model, folder = folder_of(tmp_path, abduction="support.custom_parts:Bent")
    same(model, load_trained(export(folder, tmp_path / "whole"))[0])


def test_the_interval_factors_are_exported(tmp_path: Path) -> None:
    levels = {"0.5": [0.9, 0.8], "0.9": [0.25, 0.5]}
    factors = {"levels": levels, "edges": [0.0], "n": 300, "bar": 0.3, "words": {"shift": 2.0, "factor": 50.0}}
    factors |= {"doubts": {}, "word_temperature": 1540.0}
    _, folder = folder_of(tmp_path)
    (folder / "calibration.json").write_text(json.dumps(factors))
    out = export(folder, tmp_path / "out")
    assert json.loads((out / "calibration.json").read_text()) == factors
    assert "90% x 0.25, 0.5." in (out / "README.md").read_text()
    for path in (folder, out):
        model, tokenizer = load_trained(path)
        assert model.config.calibration == factors
    hub = AutoModelForCausalLM.from_pretrained(out)
    batch = CausalQwenTokenizer.of(tokenizer)(TEXT, return_tensors="pt")
    _, numbers = hub.generate(**batch, max_new_tokens=20, return_numbers=True)
    at = numbers.generated.nonzero()
    assert len(at)
    low, high, loc, scale = (x[at[:, 0], at[:, 1]] for x in (*numbers.interval(0.9), numbers.loc, numbers.scale))
    expected = torch.where(loc < 0.0, 0.25, 0.5).double() * 2 * 6.313751514675043 * 40.0 * scale
    assert_close(high - low, expected, 1e-9)
    (folder / "calibration.json").write_text('{"levels": 3}')
    with pytest.raises(UserError, match=r"calibration\.json"):
        load_trained(folder)


def test_export_that_does_not_read_back_equal_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = folder_of(tmp_path)
    calls = []

    def drifting(model: CausalQwenForCausalLM) -> dict[str, Tensor]:
        calls.append(model)
        return {"loc_U": torch.full((2,), 1.0 + 1e-3 * (len(calls) > 3))}

    monkeypatch.setattr(export_module, "probe", drifting)
    with pytest.raises(RuntimeError, match="differs in loc_U"):
        export(folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_the_model_card_has_the_runs_figures(one_rank: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a checkpoint of a run, then from what was exported: the same card, the same adapter for PEFT."""
    state = json.loads((one_rank / "checkpoints" / "step-00000006" / "state.json").read_text())
    out = export(one_rank, tmp_path / "out")
    again = export(out, tmp_path / "again")
    for folder in (out, again):
        card = (folder / "README.md").read_text()
        assert "| trained | 6 steps, stages heads, lora |" in card
        if state.get("figures"):
            assert f"| next-word accuracy | {state['figures']['eval/accuracy']:.4g} |" in card
        else:
            assert "Nothing was measured on" in card
        assert str(one_rank) not in card + (folder / "training.json").read_text()
        assert (folder / "adapter" / "adapter_config.json").is_file()
        assert "| adapters | in place, and separately in PEFT's format |" in card
    same(load_trained(one_rank)[0], load_trained(again)[0])
    assert "earlier step" not in card + caplog.text
    between = export(checkpoint_folder(one_rank, 4), tmp_path / "between")  # evaluated at step 3, before a step
    card = (between / "README.md").read_text()
    assert "Nothing was measured on held-out texts at this step." in card
    assert "which a model of an earlier step predicted: the law's own" in card
    assert "as wide as an earlier step needed: step-00000004 was not evaluated" in caplog.text


def test_a_full_disk_during_export_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    _, folder = folder_of(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))  # Python ignores its signal
    try:
        with pytest.raises(UserError, match=r"OUT: found .*: a folder on a disk that takes .*(os error|Errno) 27"):
            export(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*out*"))
