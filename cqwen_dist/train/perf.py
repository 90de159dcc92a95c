"""How fast a run is: tokens/s, seconds a step, waiting for data, FLOP/s against the device's peak, peak memory.

No synchronisation of its own: a step already waits for its gradient norm, so the clock after it is right but for the
optimizer's last kernels.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cqwen_dist.batch import Batch

# Dense bf16 peaks of one device in TFLOP/s, from the vendors' data sheets, by what torch calls the device. Longest
# match wins.
PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A40": 150.0,
}


def device_peak(device: torch.device) -> float | None:
    """Peak in TFLOP/s of a known GPU, None of others and of CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_TFLOPS if key in name]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


@dataclass(frozen=True)
class Work:
    """What a model's arithmetic depends on. Products alone, two FLOPs a multiply-add."""

    backbone: int  # parameters of the transformer's matrices, token table left out
    adapters: int  # of LoRA
    layers: int
    attention: int  # heads times their width
    hidden: int  # H
    causal: int  # C
    words: int  # what of C words see
    vocab: int  # V

    @classmethod
    def of(cls, model: Any) -> Work:
        """Of a `CausalQwenModel`."""
        base = model.transformer.config
        matrices = {name: p for name, p in model.transformer.named_parameters() if len(_shape(p)) == 2}
        adapters = sum(math.prod(_shape(p)) for name, p in matrices.items() if ".lora_" in name)
        table = sum(math.prod(_shape(p)) for name, p in matrices.items() if "embed_tokens" in name)
        width = getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads
        return cls(
            backbone=sum(math.prod(_shape(p)) for p in matrices.values()) - adapters - table,
            adapters=adapters,
            layers=base.num_hidden_layers,
            attention=base.num_attention_heads * width,
            hidden=base.hidden_size,
            causal=model.action.reg_weight.shape[0],
            words=model.action.word_size,
            vocab=model.action.vocab_size,
        )

    def flops(self, tokens: int, rows: int, kept: int, gradients: bool, cached: bool = False) -> float:
        """Of a step with `tokens` real tokens in `rows` sequences, `kept` of them with a label.

        gradients: whether they pass through the backbone (its weights are frozen: the activations' alone, and the
        adapters' weights). cached: z was computed before. Attention: causal, over the mean length. Recomputed
        activations do not count. The word head's six products, and three each of the abduction's two.
        """
        backbone = 0.0
        if not cached:
            products = 2.0 * (self.backbone + self.adapters)
            attention = 2.0 * self.layers * self.attention * tokens / max(rows, 1)
            # backward: a frozen matrix passes gradients on, an adapter also learns, attention's factors both have one
            backward = products + 2.0 * self.adapters + 2.0 * attention if gradients else 0.0
            backbone = tokens * (products + attention + backward)
        heads = 12.0 * self.words * self.vocab + 12.0 * self.hidden * self.causal
        return backbone + kept * heads


def _shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The whole one, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Clock:
    """Times the steps of this rank. Call `data` when a step's batches are wanted, `work` when they are there."""

    def __init__(self, work: Work, device: torch.device, world: int, peak_tflops: float | None) -> None:
        self.of, self.device, self.world = work, device, world
        self.peak = peak_tflops if peak_tflops is not None else device_peak(device)
        self._began = self._ready = time.perf_counter()
        self._shape = (0, 0)

    def data(self) -> None:
        """A step begins: its batches are asked for."""
        self._began = time.perf_counter()

    def work(self, micro_batches: Sequence[Batch]) -> None:
        """They are there (on the CPU yet)."""
        self._ready = time.perf_counter()
        rows = sum(int(batch.attention_mask.any(1).sum()) for batch in micro_batches)
        self._shape = (rows, sum(int(batch.label_mask.sum()) for batch in micro_batches))

    def figures(self, tokens: int, gradients: bool, cached: bool = False) -> dict[str, float]:
        """perf/... of the step just taken; tokens: of all ranks. The FLOPs are this rank's share of them."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        rows, kept = self._shape
        tflops = self.of.flops(tokens // self.world, rows, kept, gradients, cached) / seconds / 1e12
        figures = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/step_s": seconds,
            "perf/data_wait_s": self._ready - self._began,
            "perf/tflops": tflops,
            "perf/peak_memory_gib": peak_memory_gib(self.device),
        }
        if self.peak is not None:
            figures["perf/mfu"] = tflops / self.peak
        return figures


def peak_memory_gib(device: torch.device) -> float:
    """Of the allocator on a GPU, of the process's resident memory on a CPU; since the process began, this rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
