"""ZeRO-3 from files: no rank ever holds the whole base, and what comes out is the model as it is loaded whole."""

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from matrix.plain_training import LORA, Trained, step_batch, train_plainly, with_tables
from matrix.sharded_training import Case, Found, config_of, distance, take_steps
from matrix.test_matrix import TOLERANCE
from support.ranks import run_ranks
from support.runs import as_rank, losses, train_run, write_config, write_texts
from support.tiny import NUM, VOCAB, tiny_base
from torch import nn

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError
from cqwen_dist.config.architectures import ARCHITECTURES
from cqwen_dist.data.tokenizer import train_tokenizer
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.model.base_loading import load_base
from cqwen_dist.parallel.groups import Groups, build_groups
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.parallel.vocab_parallel import vocab_range
from cqwen_dist.run.status import write_status
from cqwen_dist.training.assembly import engine_settings
from cqwen_dist.training.zero.engine import Engine
from cqwen_dist.training.zero.partitioned_base import WeightFiles, load_partitioned_base

BOTH = "heads+lora"


def load(folder: str, case: Case, groups: Groups) -> tuple[CausalQwenModel, Runtime, list[tuple[int, int, int]]]:
    """The oracle's model out of files; of each parameter of the base: (numbers held, numbers partitioned, whole)."""
    config, runtime = config_of(case), as_rank()
    torch.manual_seed(1)  # as tiny_model does
    base, head, _ = load_partitioned_base(folder, config, runtime)
    sizes = [(p.numel(), p.ds_tensor.numel(), p.ds_numel) for p in base.parameters()]
    start, stop = vocab_range(VOCAB, groups.vocab_rank, groups.vocab_size)
    model = CausalQwenModel.from_base_model(
        base,
        head=head,
        start="seed",
        num_token_id=NUM,
        number_dims=2,
        wide=64,
        candidates="arithmetic",
        lora=LORA,
        vocab_start=start,
        rows=stop - start,
    )
    return with_tables(model), runtime, sizes


def train_from_files(folder: str, case: Case, oracle: Trained) -> tuple[Any, Found]:
    """The case's training from files, and how far it is from the oracle's."""
    groups, config = build_groups(case.group), config_of(case)
    model, runtime, sizes = load(folder, case, groups)
    settings = engine_settings(config, groups.world_size, model.config.base["model_type"])
    engine = Engine(model, settings, runtime.device, groups, runtime.timeout_s)
    found = distance(case, groups, take_steps(case, groups, engine), oracle)
    return sizes, found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("base")
    tiny_base().save_pretrained(place, max_shard_size="20KB")
    assert len(list(place.glob("*.safetensors"))) > 1
    return str(place)


def test_zero_3_loads_the_base_from_files_and_trains_as_one_process(folder: str) -> None:
    case = Case(3, 3, 3, "fp32", 2, BOTH)
    for sizes, found in run_ranks(train_from_files, 3, folder, case, train_plainly(BOTH)):
        assert max(found[:3]) <= TOLERANCE, found
        for held, partitioned, whole in sizes:
            assert held == 0
            assert partitioned == -(-whole // 3)


def features(folder: str, case: Case) -> Any:
    """z of a batch by the partitioned model, on rank 0's word."""
    groups = build_groups(1)
    model, runtime, _ = load(folder, case, groups)
    settings = engine_settings(config_of(case), groups.world_size, model.config.base["model_type"])
    engine = Engine(model, settings, runtime.device, groups, runtime.timeout_s)
    batch = step_batch(0)
    with torch.no_grad():
        z = engine.forward(batch, batch.label_mask.flatten().nonzero()[:, 0])
    return z.float().numpy(), model.action.cls_weight.detach().numpy()


def test_a_partitioned_bf16_model_equals_the_whole_bf16_model(folder: str) -> None:
    torch.manual_seed(1)
    shape = {"number_dims": 2, "lora": LORA, "wide": 64}
    whole = with_tables(CausalQwenModel.from_base_model(tiny_base(), start="seed", num_token_id=NUM, **shape))
    for parameter in whole.features.parameters():  # not the buffers: rotary frequencies stay fp32
        parameter.data = parameter.data.bfloat16()
    batch = step_batch(0)
    with torch.no_grad():
        whole.features.eval()
        expected = whole.kept_features(batch, batch.label_mask.flatten().nonzero()[:, 0])
    for z, weight in run_ranks(features, 2, folder, Case(2, 1, 3, "bf16", 1, BOTH)):
        assert torch.equal(torch.from_numpy(z), expected.float())
        assert torch.equal(torch.from_numpy(weight), whole.action.cls_weight.detach())


def test_head_rows_are_read_from_the_files_tied_or_not(tmp_path: Path) -> None:
    for tied in (True, False):
        base = tiny_base(tied=tied)
        place = tmp_path / str(tied)
        base.save_pretrained(place)
        head = WeightFiles(place).head(ARCHITECTURES["qwen2"], tied)
        weight = base.get_output_embeddings().weight.detach()
        assert torch.equal(head[:], weight)
        assert torch.equal(head[40:60], weight[40:60])
        assert head[VOCAB:VOCAB].shape == (0, weight.shape[1])
        for options in ({}, {"num_row_init": "small"}, {"causal_size": 8}):
            torch.manual_seed(0)
            one = CausalQwenModel.from_base_model(tiny_base(tied=tied), start="seed", num_token_id=NUM, **options)
            torch.manual_seed(0)
            same = tiny_base(tied=tied)
            same.lm_head = nn.Identity()
            two = CausalQwenModel.from_base_model(same, head=head, start="seed", num_token_id=NUM, **options)
            assert torch.equal(one.action.cls_weight, two.action.cls_weight), options


def wide_parts(folder: str) -> list[Any]:
    """The partitioned base's token table, gathered, its head whole and in part, and so the file's table."""
    case = Case(2, 1, 3, "fp32", 1, BOTH)
    base, head, rows = load_partitioned_base(folder, config_of(case), as_rank(), rows_for=lambda _: 128)
    table = base.model.embed_tokens.weight
    with deepspeed.zero.GatheredParameters(table):
        whole = table.detach().clone()
    parts = (whole, head[:], head[90:110], head[101:128], head[40:60], head[128:128], rows[:], rows[100:103])
    return [base.config.vocab_size, base.config.added_rows, *(part.numpy() for part in parts)]


def test_added_rows_equal_those_of_the_whole_base(tmp_path: Path) -> None:
    tiny_base("mistral", tied=False).save_pretrained(tmp_path, max_shard_size="20KB")
    base = load_base(str(tmp_path), torch.float32, rows_for=lambda _: 128)
    head = base.get_output_embeddings().weight.detach()
    table = base.model.embed_tokens.weight.detach()
    wanted = (table, head, head[90:110], head[101:], head[40:60], head[128:], table, table[100:103])
    for rows, added, *found in run_ranks(wide_parts, 2, str(tmp_path)):
        assert (rows, added) == (128, 27)
        for there, here in zip(found, wanted, strict=True):
            assert torch.equal(torch.from_numpy(there), here)


def refused_weights(folder: str) -> str:
    case = Case(2, 1, 3, "fp32", 1, BOTH)
    with pytest.raises(UserError) as refusal:
        load_partitioned_base(folder, config_of(case), as_rank())
    return str(refusal.value)


def test_a_missing_tensor_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 reads the weights."""
    base = tiny_base()
    left = {name: value for name, value in base.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    base.save_pretrained(tmp_path, state_dict=left)
    said = run_ranks(refused_weights, 2, str(tmp_path), timeout=60)
    assert said[0] == said[1]
    assert "found no model.layers.1.mlp.up_proj.weight in" in said[0]


@pytest.mark.slow
def test_a_zero_3_run_equals_a_zero_1_run(tmp_path: Path) -> None:
    """The whole trainer: calibrated start, evaluation, both stages; and it goes on from a checkpoint of stage 1.

    The base is a Llama that exists, tied, in whose vocabulary words use every row.
    """
    lines = write_texts(tmp_path / "texts.jsonl").read_text().splitlines()
    words = train_tokenizer([json.loads(line)["text"] for line in lines], 291)
    base = tiny_base("llama", tied=True, vocab_size=len(words), eos_token_id=words.eos_token_id)
    base.save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    from_files = {"model__architecture": None, "model__tokenizer": None, "model__name_or_path": str(tmp_path / "base")}
    config = write_config(tmp_path, **from_files, stages__0__steps=2, stages__1__steps=2, train__checkpoint_every=3)
    one = train_run(config)
    spread = ["parallel.zero_stage=3", "parallel.vocab_group_size=2"]
    three = train_run(config, f"run.dir={tmp_path}/three", *spread, world=2)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    assert three["eval/accuracy"] == one["eval/accuracy"]
    assert three["eval/base_accuracy"] == one["eval/base_accuracy"]
    folder = tmp_path / "run"
    (folder / "latest").write_text("checkpoints/step-00000003\n", encoding="utf-8")
    write_status(folder, "running")
    train_run(config, *spread, world=2)
    assert losses(folder) == pytest.approx(losses(tmp_path / "three"), rel=1e-5)
    model, tokenizer = load_trained(folder)
    assert model.config.added_rows == model.config.vocab_size - len(tokenizer.tokenizer)
