"""A bit that flips on one rank is found by name before it is saved, and a resume takes the steps again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, losses, train_run, weights, write_config

from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.config import load_config
from cqwen_dist.run.status import read_status
from cqwen_dist.training.replicas import RanksDiffer, bit_hash
from cqwen_dist.training.train import train_on
from cqwen_dist.training.trainer import Trainer


def test_one_flipped_bit_or_swapped_values_change_the_hash() -> None:
    def hashed(value: torch.Tensor) -> int:
        return int(bit_hash(value))

    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        value = torch.randn(7, 300).to(dtype)
        usual = hashed(value)
        assert hashed(value.clone()) == usual
        width = torch.iinfo(bits).bits
        for place, bit in ((0, 0), (2099, width - 1), (1000, 3)):
            changed = value.clone()
            changed.view(bits).view(-1)[place] ^= -(2 ** (width - 1)) if bit == width - 1 else 1 << bit
            assert hashed(changed) != usual, (dtype, place, bit)
        exchanged = value.clone()
        exchanged[0, 0], exchanged[6, 299] = value[6, 299], value[0, 0]
        assert hashed(exchanged) != usual
    assert hashed(torch.tensor(3.0)) != hashed(torch.tensor(4.0)), "a step count"
    assert isinstance(hashed(torch.empty(0)), int)


def flipped(config: str, overrides: list[str], rank: int, part: str, at: int, every: int = 1) -> str:
    """Train; on one rank the lowest bit of a parameter flips after step `at`. The error."""
    runtime, plain = as_rank(), Trainer._take_step

    def struck(self: Trainer, plan: Any, step: int, batches: Any) -> dict[str, Any]:
        record = plain(self, plan, step, batches)
        self.run.replicas.EVERY = every  # type: ignore[misc]
        if runtime.rank == rank and step + 1 == at:
            members = [*self.run.engine.heads.members, *self.run.engine.feature_members]
            parameter = next(m.parameter for m in members if part in m.name)
            parameter.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        return record

    Trainer._take_step = struck  # type: ignore[method-assign]
    try:
        train_on(load_config(config, overrides), runtime)
    except RanksDiffer as error:
        return str(error)
    finally:
        Trainer._take_step = plain  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(
    ("world", "rank", "part"), [(2, 0, "lora_A"), pytest.param(4, 3, "action.cls_weight", marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_found_and_the_resumed_run_equals_the_undisturbed_one(
    two_ranks: Path, tmp_path: Path, world: int, rank: int, part: str
) -> None:
    """Of an adapter; and of a row, in vocabulary groups of two."""
    undisturbed, config, spread, run = two_ranks, two_ranks.parent / "config.yaml", [], tmp_path / "struck"
    if world == 4:
        undisturbed, config = tmp_path / "run", write_config(tmp_path, train__micro_batch_size=3)
        spread = ["parallel.zero_stage=2", "parallel.vocab_group_size=2"]
        train_run(config, *spread, world=world)
    said = run_ranks(flipped, world, str(config), [*spread, f"run.dir={run}"], rank, part, 5)
    assert len(set(said)) == 1
    assert part in said[0]
    assert "after step 5 " in said[0]
    assert "all ranks were equal after step 4" in said[0]
    good = latest_checkpoint(run)
    assert good is not None
    assert good.name == "step-00000004", "what differs is never saved"
    assert read_status(run)["status"] == "running", "the same command may go on"
    train_run(config, *spread, f"run.dir={run}", world=world)
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)
    assert read_status(run)["status"] == "done"


def test_between_two_checks_a_fault_is_found_at_a_save(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__checkpoint_every=100)
    said = run_ranks(flipped, 2, str(config), [], 1, "b_noise", 2, 100)
    assert "all ranks were equal after step 0" in said[0]
