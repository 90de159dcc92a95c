"""Speed of a run: tokens/s, seconds per step, wait for data, FLOP/s relative to the peak, peak memory.

No synchronisation here: a step waits for its gradient norm anyway, so the times only miss the last optimizer kernels.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cqwen_dist.batch import Batch


class Clock:
    """Times the steps of this rank: call `data` when a step asks for its batches, and `work` when they are here."""

    def __init__(self, flops: Callable[..., Any], device: torch.device, world: int, peak: float | None = None) -> None:
        """flops: operations per token (`Work.flops`). peak: of the device, in TFLOP/s; None: unknown."""
        self.flops, self.device, self.world, self.peak = flops, device, world, peak
        self._began = self._ready = time.perf_counter()
        self._shape = (0.0, 0)

    def data(self) -> None:
        """Call when a step starts and asks for its batches."""
        self._began = time.perf_counter()

    def work(self, micro_batches: Sequence[Batch]) -> None:
        """Call when the batches are here, still on the CPU."""
        self._ready = time.perf_counter()
        # Of texts whose positions are split over ranks, this rank's share
        texts = sum(b.begun_texts * b.input_ids.numel() / sum(b.texts.lengths) for b in micro_batches)
        self._shape = (texts, sum(int(batch.label_mask.sum()) for batch in micro_batches))

    def metrics(self, tokens: int, groups: frozenset[str], cached: bool = False) -> dict[str, float]:
        """perf/... of the last step. tokens: over all ranks. groups: trained groups. cached: z came from a cache.

        FLOPs are this rank's share of the useful FLOPs, with attention at the mean text length.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        texts, labels = self._shape
        share = tokens // self.world
        each = self.flops(share / (texts or 1), groups, cached=cached)
        tflops = (share * each.backbone + labels * each.heads) / seconds / 1e12
        # Of this rank so far: torch's allocator on a GPU, else resident memory, which Linux counts in KiB
        on_gpu, resident = self.device.type == "cuda", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else resident
        metrics = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/step_s": seconds,
            "perf/data_wait_s": self._ready - self._began,
            "perf/tflops": tflops,
            "perf/peak_memory_gib": peak / 2**30,
        }
        if self.peak is not None:
            metrics["perf/mfu"] = tflops / self.peak
        return metrics
