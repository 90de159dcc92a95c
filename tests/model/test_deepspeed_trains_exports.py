"""DeepSpeed, given an exported folder by somebody who does not use this package's engine, computes the same losses."""

from __future__ import annotations

import os
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from support.exported import tiny_pair, write_folder
from support.ranks import Pool, held_port, run_ranks
from support.tiny import random_batch
from transformers import Trainer, TrainingArguments, default_data_collator

from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.training.zero.patches import join_deepspeed

STEPS = 3
SETTINGS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 1e9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("exported"), *tiny_pair(copies=2, wide=64, number_dims=2))


def batch_of(rank: int, model: CausalQwenForCausalLM) -> dict[str, torch.Tensor]:
    batch = random_batch(2, 8, seed=rank, num=model.config.num_token_id)
    labels = batch.input_ids.masked_fill(~batch.attention_mask, -100)
    return {"input_ids": batch.input_ids, "numeric_values": batch.numeric_values, "labels": labels}


def losses_under_deepspeed(folder: str, bf16: bool) -> list[list[float]]:
    """The losses of some steps at each ZeRO stage. In fp32, checks that DeepSpeed's checkpoint reads back whole."""
    join_deepspeed()
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    every = []
    for stage in range(4):
        model = CausalQwenForCausalLM.from_pretrained(folder).train()
        wanted = {name: p.shape for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        settings = {**SETTINGS, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
        settings |= {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * world}
        batch = batch_of(rank, model)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
        losses = []
        for _ in range(STEPS):
            loss = engine(**batch).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        every.append(losses)
        if stage and not bf16:
            where = f"{folder}/zero-{stage}-{world}"
            engine.save_checkpoint(where)
            dist.barrier()
            found = get_fp32_state_dict_from_zero_checkpoint(where)
            assert {name: found[name].shape for name in wanted} == wanted, f"stage {stage}"
    return every


def plain_losses(folder: Path, bf16: bool, world: int) -> list[list[float]]:
    """The package's own losses on each rank's batch, with plain SGD on their mean."""
    model = CausalQwenForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if bf16 else torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses: list[list[float]] = [[] for _ in range(world)]
    for _ in range(STEPS):
        for rank in range(world):
            loss = model(**batch_of(rank, model)).loss
            losses[rank].append(float(loss.detach()))
            (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_has_the_packages_losses(pool: Pool, folder: Path, world: int, bf16: bool) -> None:
    """In bf16 DeepSpeed rounds the heads' weights too; they still compute in fp32."""
    wanted = plain_losses(folder, bf16, world)
    for rank, stages in enumerate(pool(losses_under_deepspeed, world, str(folder), bf16)):
        for stage, losses in enumerate(stages):
            assert losses == pytest.approx(wanted[rank], rel=2e-3 if bf16 else 1e-5), f"stage {stage}"


def trained_by_trainer(folder: str, port: int) -> list[float]:
    """The losses of transformers' Trainer with a ds_config, as its users write one."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    join_deepspeed()
    settings = {
        **SETTINGS,
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    arguments = TrainingArguments(
        f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-6, logging_steps=1,
        optim="sgd", lr_scheduler_type="constant", use_cpu=True, report_to=[], deepspeed=settings,
        disable_tqdm=True, max_grad_norm=1e9,
    )  # fmt: skip
    model = CausalQwenForCausalLM.from_pretrained(folder)
    batch = batch_of(0, model)
    rows = [{name: values[row] for name, values in batch.items()} for row in range(2)]
    trainer = Trainer(model, arguments, default_data_collator, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_with_deepspeed_has_the_packages_losses(folder: Path) -> None:
    with held_port() as port:
        ((*losses,),) = run_ranks(trained_by_trainer, 1, str(folder), port)
    assert losses == pytest.approx(plain_losses(folder, False, 1)[0], rel=1e-4), "the Trainer's log has four decimals"
