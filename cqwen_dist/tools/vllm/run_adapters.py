"""Adapters of several runs on vLLM's linear maps: each token goes through those of its own run.

    h = x A^T    A [K,in]: the adapters of all runs, and of all parts of a fused map, one below the other
    h = h * g    g [N,K]: 1 in the columns of the token's run, else 0
    y = y + h B  B [K,out]: alpha / r times PEFT's, transposed; 0 outside the columns of its part

Attention stays joint, as a text attends only to itself. No shape depends on which runs are in a batch, so layers are
compiled once, and a CUDA graph reads g where the last step wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ADAPTERS, LORA_A, LORA_B = "run_adapters", ".lora_A.", ".lora_B."


class RunAdapters(nn.Module):
    """The adapters on one linear map. Shape letters: N tokens of a step, M runs, K ranks of all adapters here."""

    gate: Tensor
    a: Tensor
    b: Tensor
    runs: Tensor  # [K], the run of each rank

    def __init__(self, linear: Any, gate: Tensor) -> None:
        """gate [most N,M]: 1 for the run of each token of a step, else 0. It is written before each step."""
        super().__init__()
        self.register_buffer("gate", gate, persistent=False)
        self.register_buffer("a", gate.new_zeros(0, linear.input_size), persistent=False)
        self.register_buffer("b", gate.new_zeros(0, linear.output_size), persistent=False)
        self.register_buffer("runs", torch.zeros(0, dtype=torch.int64, device=gate.device), persistent=False)

    def add(self, run: int, a: Tensor, b: Tensor, start: int) -> None:
        """Add one adapter: a [r,in], b [r,part] for the columns of the output from `start` on."""
        whole = self.b.new_zeros(len(b), self.b.shape[1])
        whole[:, start : start + b.shape[1]] = b
        self.a, self.b = torch.cat([self.a, a.to(self.a)]), torch.cat([self.b, whole])
        self.runs = torch.cat([self.runs, self.runs.new_full((len(a),), run)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [N,in], y [N,out] of the base -> y with adapters."""
        gate = self.gate[: x.shape[0]].index_select(1, self.runs)
        return y + ((x @ self.a.T) * gate) @ self.b


def add_adapters(
    transformer: nn.Module,
    packed: Mapping[str, Sequence[str]],
    run: int,
    scale: float,
    tensors: Mapping[str, Tensor],
    gate: Tensor,
) -> None:
    """Put a run's adapters onto vLLM's transformer, in place.

    packed: the parts of vLLM's fused maps, by name. scale: alpha / r. tensors: by PEFT's names inside of the
    transformer, A [r,in] and B [part,r]. gate: as in `RunAdapters`.
    """
    for name, a in tensors.items():
        if LORA_A not in name:
            continue
        owner, _, own = name.partition(LORA_A)[0].rpartition(".")
        fused = next((whole for whole, parts in packed.items() if own in parts), own)
        linear: Any = transformer.get_submodule(f"{owner}.{fused}")
        before = packed[fused].index(own) if fused in packed else 0
        start = sum(linear.output_sizes[:before]) if before else 0
        if not hasattr(linear, ADAPTERS):
            linear.add_module(ADAPTERS, RunAdapters(linear, gate))
            linear.register_forward_hook(lambda its, x, y: (getattr(its, ADAPTERS)(x[0], y[0]), y[1]))
        getattr(linear, ADAPTERS).add(run, a, scale * tensors[name.replace(LORA_A, LORA_B)].T, start)
