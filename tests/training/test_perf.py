"""FLOPs against torch's own counter, the clock against a slow loader, MFU against both."""

import time
from dataclasses import replace

import pytest
import torch
from support.tiny import random_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from cqwen_dist.config import Config
from cqwen_dist.plan import Architecture
from cqwen_dist.plan.flops import of_stage
from cqwen_dist.plan.sizes import stage_sizes
from cqwen_dist.training.telemetry.perf import Clock, device_peak, of_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("gradients", [True, False])
def test_the_backbones_flops_are_torchs_count(gradients: bool) -> None:
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
    work = of_model(model)
    square = replace(work, attention=2 * work.attention)
    trainable = frozenset(["embedding"] if gradients else [])
    each = square.flops(24, trainable, cached=False)
    assert keep.numel() * each.backbone == pytest.approx(counter.get_total_flops(), rel=0.005)


def test_the_run_counts_what_the_plan_counts() -> None:
    """By the one function of both; here, that the numbers it takes are the same from a model and from a config."""
    for lora in (None, {"r": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]}):
        model = tiny_model(lora=lora)
        stage = {"name": "all", "train": ["heads", "embedding", *["lora"] * (lora is not None)], "steps": 1}
        own = model.transformer.config.to_dict()
        config = Config.model_validate(
            {
                "model": {"architecture": own, "tokenizer": "x", "lora": lora or {}, "number_dims": 0},
                "data": {"train": "x", "sequence_length": 64},
                "stages": [stage],
            }
        )
        (sizes,) = stage_sizes(config, Architecture.of(own), world=1, kind="cpu")
        assert of_model(model) == of_stage(sizes)


def test_adapters_learn_where_frozen_matrices_only_pass_gradients_on() -> None:
    plain, adapted = (of_model(tiny_model(lora=lora)) for lora in (None, {"r": 2, "alpha": 4}))
    assert adapted.matrices == plain.matrices
    for groups, products in ((["lora"], 6), (["embedding"], 4), (["noise"], 2)):
        each = [work.flops(25, frozenset(groups), cached=False).backbone for work in (plain, adapted)]
        assert each[1] - each[0] == products * adapted.adapters > 0


def test_the_clock_tells_waiting_from_working() -> None:
    model = tiny_model()
    clock = Clock(of_model(model), CPU, world=2, peak=0.5)
    batch = random_batch(4, 24)
    clock.data()
    time.sleep(0.05)
    clock.work([batch])
    time.sleep(0.1)
    groups = frozenset(["embedding", "classifier"])
    figures = clock.metrics(tokens=400, groups=groups)
    assert 0.05 <= figures["perf/data_wait_s"] < 0.09
    assert 0.15 <= figures["perf/step_s"] < 0.3
    assert figures["perf/tokens_per_s"] == pytest.approx(400 / figures["perf/step_s"])
    each = clock.of.flops(200 / 4, groups, cached=False)
    flops = 200 * each.backbone + int(batch.label_mask.sum()) * each.heads
    assert figures["perf/tflops"] == pytest.approx(flops / figures["perf/step_s"] / 1e12)
    assert figures["perf/mfu"] == pytest.approx(figures["perf/tflops"] / 0.5)
    assert 0.05 < figures["perf/peak_memory_gib"] < 64


def test_mfu_needs_a_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak(CPU) is None
    clock = Clock(of_model(tiny_model()), CPU, 1, None)
    clock.work([random_batch()])
    assert "perf/mfu" not in clock.metrics(10, frozenset())
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("X", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert device_peak(torch.device("cuda")) == peak, name
