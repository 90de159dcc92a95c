"""FLOPs against torch's own counter, the clock against a slow loader, MFU against both."""

import time

import pytest
import torch
from support.tiny import random_batch, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from cqwen_dist.train.perf import Clock, Work, device_peak

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
    work = Work.of(model)
    square = Work(**{**vars(work), "attention": 2 * work.attention})
    assert square.flops(keep.numel(), 4, 0, gradients) == pytest.approx(counter.get_total_flops(), rel=0.005)
    heads = 12 * (work.words * work.vocab + work.hidden * work.causal)
    assert work.flops(96, 4, 7, gradients, cached=True) == 7 * heads, "six and twice three products"


def test_adapters_learn_where_frozen_matrices_only_pass_gradients_on() -> None:
    plain, adapted = (Work.of(tiny_model(lora=lora)) for lora in (None, {"r": 2, "alpha": 4}))
    assert adapted.backbone == plain.backbone
    more = adapted.flops(100, 4, 0, True) - plain.flops(100, 4, 0, True)
    assert more == 100 * 6 * adapted.adapters > 0


def test_the_clock_tells_waiting_from_working() -> None:
    model = tiny_model()
    clock = Clock(Work.of(model), CPU, world=2, peak_tflops=0.5)
    batch = random_batch(4, 24)
    clock.data()
    time.sleep(0.05)
    clock.work([batch])
    time.sleep(0.1)
    figures = clock.figures(tokens=400, gradients=True)
    assert 0.05 <= figures["perf/data_wait_s"] < 0.09
    assert 0.15 <= figures["perf/step_s"] < 0.3
    assert figures["perf/tokens_per_s"] == pytest.approx(400 / figures["perf/step_s"])
    flops = clock.of.flops(200, 4, int(batch.label_mask.sum()), True)
    assert figures["perf/tflops"] == pytest.approx(flops / figures["perf/step_s"] / 1e12)
    assert figures["perf/mfu"] == pytest.approx(figures["perf/tflops"] / 0.5)
    assert 0.05 < figures["perf/peak_memory_gib"] < 64


def test_mfu_needs_a_known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_peak(CPU) is None
    clock = Clock(Work.of(tiny_model()), CPU, 1, None)
    clock.work([random_batch()])
    assert "perf/mfu" not in clock.figures(10, True)
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("X", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert device_peak(torch.device("cuda")) == peak, name
