"""Pretraining a small base: it learns, and the same config makes the same base."""

from pathlib import Path

import torch
from support.runs import write_config

from cqwen_dist.config import load_config
from cqwen_dist.model.backbone import load_base
from cqwen_dist.training.base import build_run_base


def built(folder: Path, *overrides: str) -> tuple[torch.nn.Module, list[str]]:
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    config = load_config(write_config(folder), [*overrides])
    build_run_base(config, said.append, torch.device("cpu"))
    return load_base(config.base_folder, torch.float32), said


def test_pretraining_learns_and_is_reproducible(tmp_path: Path) -> None:
    first, said = built(tmp_path / "a", "model.pretrain.steps=24")
    again, _ = built(tmp_path / "b", "model.pretrain.steps=24")
    other, _ = built(tmp_path / "c", "model.pretrain.steps=23")
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    losses = [float(line.rsplit(" ", 1)[1]) for line in said if "loss" in line]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4
