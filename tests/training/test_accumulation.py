"""Ranks and micro-batches are two ways to spread one optimizer step: every spread gives the same run."""

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.runs import losses, train_run, write_config, write_texts
from test_step_waits import rig_of

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import load_checkpoint

STEPS = 10
BATCH = 16  # two sequences a micro-batch: ranks x accumulation = 8


def spread(folder: Path, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last parameters of 10 steps, LoRA and all heads training, on so many ranks of 8 / ranks batches."""
    config = folder / "config.yaml"
    run = folder / f"run{ranks}"
    train_run(config, f"run.dir={run}", world=ranks)
    saved = load_checkpoint(checkpoint_folder(run, STEPS), (0, 2**62))
    return losses(run), {**saved.features, **saved.heads, **saved.rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    write_texts(folder / "texts.jsonl", 200)
    stage = {"name": "both", "train": ["heads", "embedding", "lora"], "steps": STEPS, "lr": 1e-2}
    write_config(
        folder,
        stages=[stage],
        train__global_batch_size=BATCH,
        train__micro_batch_size=2,
        loss__constraint={"mode": "dual", "eps": 0.01},
    )
    return folder


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_only_ranks_times_accumulation_matters(folder: Path, ranks: int) -> None:
    """1x8 = 2x4 = 4x2 = 8x1 to 1e-4, in every loss of 10 steps and in every parameter at the end."""
    alone, parameters = spread(folder, 1) if not (folder / "run1").exists() else _again(folder)
    found, theirs = spread(folder, ranks)
    assert len(found) == STEPS
    assert found == pytest.approx(alone, rel=1e-4)
    # up or down: the start of a base that knows nothing is P = 1/V, and these rates leave it by a detour
    assert abs(alone[-1] - alone[0]) > 0.2, "nothing moved: nothing is tested"
    for name, value in parameters.items():
        if name.startswith(("embedding", "backbone")):
            assert value.any(), f"{name} did not train"
        assert float((theirs[name] - value).abs().max()) <= 1e-4 * max(float(value.abs().max()), 1.0), name


def _again(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    saved = load_checkpoint(checkpoint_folder(folder / "run1", STEPS), (0, 2**62))
    return losses(folder / "run1"), {**saved.features, **saved.heads, **saved.rows}


MICRO_BATCHES = 300


def gradients_in_bf16(one_step: bool) -> torch.Tensor:
    """This rank's part of the features' gradients of 300 micro-batches under ZeRO-1, fp32.

    one_step: as one step takes them; else each is reduced by itself, and the results are added up in fp32.
    """
    rig = rig_of(1, "bf16", pack=False)
    plan = rig.enter(1)
    engine, batch = rig.engine, rig.batches(plan)[0]
    keep = torch.arange(batch.labels.numel())
    direction = torch.randn(len(keep), 16, generator=torch.Generator().manual_seed(3))
    for i in range(MICRO_BATCHES):
        z = engine.forward(batch, keep)
        engine.backward((z.float() * direction).sum() * (1 + i / 700), not one_step or i == MICRO_BATCHES - 1)
    assert engine.flat is not None
    return torch.cat(list(engine.flat.parts.values()))


@pytest.mark.parametrize("world", [1, 2])
def test_many_micro_batches_in_bf16_add_up_in_fp32(world: int) -> None:
    """Up to a rounding. Added up in bf16, where one below 1/512 of the sum is lost, they would be off by 7 %."""
    for whole, each in zip(*(run_ranks(gradients_in_bf16, world, way) for way in (True, False)), strict=True):
        assert float(each.norm()) > 0
        assert float((whole - each).norm() / each.norm()) < 2**-8
        assert float(whole.norm() / each.norm()) == pytest.approx(1.0, abs=1e-3)
