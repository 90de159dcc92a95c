"""FLOPs against torch's own counter, the clock against a slow loader, MFU against both."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import random_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from cqwen_dist.config import Config
from cqwen_dist.sizes.flops import Work
from cqwen_dist.training.telemetry import progress as perf
from cqwen_dist.training.telemetry.progress import Clock
from cqwen_dist.training.train import work_in

CPU = torch.device("cpu")


def counted(model: Any, lora: dict[str, Any] | None = None, **config: Any) -> Work:
    """What a run of this model counts."""
    stage = {"name": "all", "train": ["heads", "embedding", *["lora"] * (lora is not None)], "steps": 1}
    given = {"name_or_path": "x", "lora": lora or {}}
    data = {"train": "x", "sequence_length": 64}
    return work_in(
        Config.model_validate({"model": given, "data": data, "stages": [stage], "start": "seed", **config}), model
    )


@pytest.mark.parametrize("gradients", [True, False])
def test_the_backbones_flops_equal_torchs_count(gradients: bool) -> None:
    """torch counts attention over the whole square, twice what is causal; so twice the attention is asked for."""
    model = tiny_model(number_dims=0)
    model.transformer.config._attn_implementation = "eager"  # torch does not count a CPU's fused attention
    batch = random_batch(4, 24)
    keep = torch.arange(batch.labels.numel())
    model.requires_grad_(False)
    model.features.embedding.w_num.requires_grad_(gradients)
    with FlopCounterMode(display=False) as counter:
        z = model.kept_features(batch, keep)
        if gradients:
            z.sum().backward()
    work = counted(model)
    square = replace(work, attention=2 * work.attention)
    trainable = frozenset(["embedding"] if gradients else [])
    each = square.flops(24, trainable, cached=False)
    assert keep.numel() * each.backbone == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_the_clock_separates_waiting_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 100.0, 100.05, 100.15))  # made, asked for data, has it, done
    monkeypatch.setattr(perf, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model = tiny_model()
    clock = Clock(counted(model).flops, CPU, world=2, peak=0.5)
    batch = random_batch(4, 24)
    clock.data()
    clock.work([batch])
    groups = frozenset(["embedding", "classifier"])
    figures = clock.metrics(tokens=400, groups=groups)
    assert figures["perf/data_wait_s"] == pytest.approx(0.05)
    assert figures["perf/step_s"] == pytest.approx(0.15)
    assert figures["perf/tokens_per_s"] == pytest.approx(400 / figures["perf/step_s"])
    each = clock.flops(200 / 4, groups, cached=False)
    flops = 200 * each.backbone + int(batch.label_mask.sum()) * each.heads
    assert figures["perf/tflops"] == pytest.approx(flops / figures["perf/step_s"] / 1e12)
    assert figures["perf/mfu"] == pytest.approx(figures["perf/tflops"] / 0.5)
    assert 0.05 < figures["perf/peak_memory_gib"] < 64
