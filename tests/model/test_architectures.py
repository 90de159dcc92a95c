"""What each architecture has to show, on a tiny random model of transformers' own class (CONTRIBUTING.md)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from support.exported import tiny_pair, write_folder
from support.numerics import assert_all_close, assert_close
from support.runs import command_environment, losses, train_run, write_config
from support.tiny import number_prompts, random_batch, random_ids, tiny_base, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import LoraConfig
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.config.trainable import is_lora
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.model.layers import fuse_adapters
from cqwen_dist.model.lora import merge_lora, peft_config
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.export.export import export
from cqwen_dist.training.zero.partitioned_base import WeightFiles

KINDS = list(ARCHITECTURES)
LORA: dict[str, Any] = {"r": 2, "alpha": 4}


def lora_of(kind: str) -> dict[str, Any]:
    """Adapters in the usual places, as a model's config has them."""
    return LoraConfig(**LORA, target_modules=ARCHITECTURES[kind].targets(LoraConfig().target_modules)).model_dump()


def moved(module: torch.nn.Module) -> torch.nn.Module:
    """The same adapters in every model: B starts at 0."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            if is_lora(name):
                p.copy_(torch.randn(p.shape, generator=draw) * 0.1)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_equal_pefts_on_the_plain_model(kind: str) -> None:
    lora = lora_of(kind)
    model = tiny_model(kind, lora=lora).train()
    moved(model.transformer)
    fuse_adapters(model.transformer)
    plain = get_peft_model(tiny_base(kind), peft_config(LoraConfig(**lora))).train()
    moved(plain.base_model.model.model)
    ids = random_ids(2, 11)
    upstream = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(5))
    z = model.features(ids, torch.zeros(ids.shape, dtype=torch.float64))
    again = plain.base_model.model.model(input_ids=ids).last_hidden_state
    assert_close(z, again, 1e-5, "z")
    (z * upstream).sum().backward()
    (again * upstream).sum().backward()
    inner = dict(plain.base_model.model.model.named_parameters())
    found = {name: p.grad for name, p in model.transformer.named_parameters() if is_lora(name)}
    assert found.keys() == {name for name in inner if is_lora(name)}
    assert all(grad is not None and grad.any() for grad in found.values()), "an adapter has no gradient"
    assert_all_close(found, {name: inner[name].grad for name in found}, 1e-4)
    size = Architecture.of(tiny_base(kind).config.to_dict())
    assert size.lora_parameters(2, lora["target_modules"]) == sum(inner[name].numel() for name in found)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_merged_adapters_keep_the_features(kind: str) -> None:
    batch, model = random_batch(), tiny_model(kind, lora=lora_of(kind))
    moved(model.transformer)
    before = model.kept_features(batch, batch.kept)
    merge_lora(model.transformer)
    assert not any(is_lora(name) for name, _ in model.named_parameters())
    # A merged weight is rounded once more; gated linear attention multiplies that up over the positions
    assert_close(model.kept_features(batch, batch.kept), before, 3e-5, "z")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_no_generated_token(kind: str) -> None:
    model = CausalQwenForCausalLM(tiny_model(kind).config, tiny_model(kind)).eval()
    prompts, settings = number_prompts(), {"max_new_tokens": 6, "mode": "standard"}
    plain = model.generate(**prompts, **settings, use_cache=False)
    assert torch.equal(model.generate(**prompts, **settings), plain)
    for _ in range(2):  # the second generation reuses the cache of the first
        assert torch.equal(model.generate(**prompts, **settings, cache_implementation="static"), plain)


def test_a_cache_changes_no_token_where_longrope_turns_to_its_long_factors() -> None:
    """As in Phi-4-mini behind 4,096 tokens; transformers reads the text again there."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [2.0, 4.0, 8.0]}
    base = {"rope_parameters": {**rope, "original_max_position_embeddings": 12}}
    base |= {"original_max_position_embeddings": 12}
    model = CausalQwenForCausalLM(tiny_model("phi3", base=base).config, tiny_model("phi3", base=base)).eval()
    for length in (9, 12, 13):
        prompt, settings = random_ids(2, length), {"max_new_tokens": 12, "mode": "standard"}
        plain = model.generate(prompt, **settings, use_cache=False)
        assert len({*plain[0].tolist()}) > 4, "words that would not show it"
        for kind in ("dynamic", "static"):
            assert torch.equal(model.generate(prompt, **settings, cache_implementation=kind), plain), (length, kind)


def architecture_of(kind: str) -> dict[str, Any]:
    """The tiny base's config, for a run that builds it."""
    config = tiny_base(kind).config.to_diff_dict()
    names = {"vocab_size": 291, "model_type": kind, "layer_types": getattr(tiny_base(kind).config, "layer_types", None)}
    kept = {key: value for key, value in config.items() if key not in ("transformers_version", "dtype", "num_experts")}
    return {key: value for key, value in (kept | names).items() if value is not None}


STRANGER = """
import json, sys
sys.modules["cqwen_dist"] = None  # an import of it fails
import torch
from transformers import AutoModelForCausalLM

def logits(folder):
    model, found = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(found.values()), (folder, found)
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12).unsqueeze(0)).logits[0].tolist()

print(json.dumps([logits(folder) for folder in sys.argv[1:]]))
"""


def strangers(tmp_path: Path, *folders: Path) -> list[Tensor]:
    """The logits of folders for someone without this package."""
    environment = command_environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
    command = [sys.executable, "-c", STRANGER, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.tensor(each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow  # of two: tests/tools/export/test_portable.py
def test_strangers_load_exports_of_every_architecture(tmp_path: Path) -> None:
    pairs = {kind: tiny_pair(kind=kind, lora=lora_of(kind)) for kind in KINDS}
    folders = []
    for i, pair in enumerate(pairs.values()):
        source = write_folder(tmp_path / f"in{i}", *pair)
        folders.append(export(source, tmp_path / f"out{i}", merge=i % 2 == 1))
    for (kind, (model, _)), found in zip(pairs.items(), strangers(tmp_path, *folders), strict=True):
        with torch.no_grad():
            assert_close(found, model(torch.arange(12).unsqueeze(0)).logits[0], 2e-5, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ARCHITECTURES[kind].nested])
def test_the_text_part_of_a_model_with_images_is_loaded_alone(kind: str, tmp_path: Path) -> None:
    """Under the names of weights and with the nested config that its repository has."""
    plain = tiny_base(kind)
    outer = kind.removesuffix("_text")
    shallow = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24}
    config = AutoConfig.for_model(outer, text_config=plain.config.to_dict(), vision_config=shallow)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(plain.model.state_dict())
    whole.lm_head.load_state_dict(plain.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    found = load_base(str(tmp_path), torch.float32)
    assert type(found) is type(plain)
    assert not [name for name, _ in found.named_parameters() if "visual" in name]
    with torch.no_grad():
        assert_close(found(random_ids(1, 9)).logits, plain(random_ids(1, 9)).logits, 1e-6, "logits")
    files = WeightFiles(tmp_path)
    for name, p in plain.named_parameters():
        assert torch.equal(files.tensor(name, p.shape), p), name
    sizes = Architecture.of(json.loads((tmp_path / "config.json").read_text()))
    assert sizes == Architecture.of(plain.config.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_staged_run_on_two_ranks_resumes_and_exports(kind: str, zero: int, tmp_path: Path) -> None:
    run_and_export(tmp_path, parallel__zero_stage=zero, model__architecture=architecture_of(kind))


def run_and_export(tmp_path: Path, **options: Any) -> CausalQwenForCausalLM:
    """Two stages on two ranks, in two commands; what they trained, exported and read by strangers. Its model."""
    config = write_config(tmp_path, start="calibrated", **options)
    for steps in (1, 3):  # the second command goes on with the first's last stage
        train_run(config, f"stages.1.steps={steps}", world=2)
    assert len(losses(tmp_path / "run")) == 6
    model, _ = load_trained(tmp_path / "run")
    moving = [p for name, p in model.named_parameters() if ".lora_B." in name]
    assert moving
    assert all(p.any() for p in moving), "an adapter did not train"
    exports = [export(tmp_path / "run", tmp_path / "out"), export(tmp_path / "run", tmp_path / "merged", merge=True)]
    with torch.no_grad():
        wanted = model(torch.arange(12).unsqueeze(0)).logits[0]
    for found in strangers(tmp_path, *exports):
        assert_close(found, wanted, 2e-5, "logits")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    with torch.no_grad():
        z = adapted.base_model.model.model(input_ids=torch.arange(12).unsqueeze(0)).last_hidden_state
        ours = model.model.features(torch.arange(12).unsqueeze(0), torch.zeros(1, 12, dtype=torch.float64))
    assert_close(ours, z, 1e-4, "z by PEFT")
    return model
