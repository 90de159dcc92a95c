"""A run's speed: tokens/s, seconds per step, waiting for data, FLOP/s relative to the device's peak, peak memory.

Nothing synchronises here: a step waits for its gradient norm anyway, so only the optimizer's last kernels are missed.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from cqwen_dist.batch import Batch
from cqwen_dist.plan.flops import Work
from cqwen_dist.plan.machine import peak_tflops
from cqwen_dist.training.zero.zero_state import whole_shape


def device_peak(device: torch.device) -> float | None:
    """Peak in TFLOP/s of a known GPU; None for others and for CPUs."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def of_model(model: Any) -> Work:
    """The sizes that the operations of a `CausalQwenModel` depend on."""
    base = model.transformer.config
    matrices = {name: p for name, p in model.transformer.named_parameters() if len(whole_shape(p)) == 2}
    adapters = sum(math.prod(whole_shape(p)) for name, p in matrices.items() if ".lora_" in name)
    table = sum(math.prod(whole_shape(p)) for name, p in matrices.items() if "embed_tokens" in name)
    width = getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads
    return Work(
        matrices=sum(math.prod(whole_shape(p)) for p in matrices.values()) - adapters - table,
        adapters=adapters,
        layers=base.num_hidden_layers,
        attention=base.num_attention_heads * width,
        hidden=base.hidden_size,
        causal=model.action.reg_weight.shape[-1],
        words=model.action.word_size,
        vocab=model.action.vocab_size,
    )


class Clock:
    """Times the steps of this rank: call `data` when a step asks for its batches, `work` when it has them."""

    def __init__(self, work: Work, device: torch.device, world: int, peak: float | None) -> None:
        """peak: in TFLOP/s; None: the device's own, if known."""
        self.of, self.device, self.world = work, device, world
        self.peak = device_peak(device) if peak is None else peak
        self._began = self._ready = time.perf_counter()
        self._shape = (0, 0)

    def data(self) -> None:
        """A step begins and asks for its batches."""
        self._began = time.perf_counter()

    def work(self, micro_batches: Sequence[Batch]) -> None:
        """The batches, still on the CPU, are here."""
        self._ready = time.perf_counter()
        texts = sum(int(batch.attention_mask[batch.position_ids == 0].sum()) for batch in micro_batches)
        self._shape = (texts, sum(int(batch.label_mask.sum()) for batch in micro_batches))

    def metrics(self, tokens: int, groups: frozenset[str], cached: bool = False) -> dict[str, float]:
        """perf/... of the last step. tokens: of all ranks. groups: those that train. cached: z was read from a cache.

        The FLOPs are this rank's share of the useful ones, with attention at the mean length of a text.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        texts, labels = self._shape
        share = tokens // self.world
        each = self.of.flops(share / max(texts, 1), groups, cached=cached)
        tflops = (share * each.backbone + labels * each.heads) / seconds / 1e12
        metrics = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/step_s": seconds,
            "perf/data_wait_s": self._ready - self._began,
            "perf/tflops": tflops,
            "perf/peak_memory_gib": peak_memory_gib(self.device),
        }
        if self.peak is not None:
            metrics["perf/mfu"] = tflops / self.peak
        return metrics


def peak_memory_gib(device: torch.device) -> float:
    """This rank's peak so far: of the allocator on a GPU, of resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
