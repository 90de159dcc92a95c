"""What the heads say to each other in one optimizer step, in bytes: the one place where it is written out.

g ranks of a vocabulary group, r replicas of a rank's rows, R = g r ranks of the world; C columns of W_cls, v rows of
it on a rank. Of each micro-batch the group's ranks keep n_1, ..., n_g tokens; on the wire all are padded to the
largest, n. Nothing but the replicas' sum of the rows' gradients depends on V:

    vocabulary group   all-gather       loc_u, scale_u [n, C], labels [n] (8 bytes), weights [n] (4 bytes)
                       reduce-scatter   loss, sum of P and P of <NUM> [g n, 3] (4 bytes)
                       all-reduce       the group's loss (4 bytes)
                       reduce-scatter   gradients of loc_u, scale_u [g n, C]
                       all-gather       with loss.gate_grad full: gradients of the three numbers [n, 3]
    world              all-reduce       gradients of what every rank holds whole (abduction, b_noise, regression)
    replica group      all-reduce       gradients of the rows
    vocabulary group   all-reduce       the rows' squared gradient norm (4 bytes)

A group of one says nothing. Not in it: what DeepSpeed says for the features, whatever V is, and the trainer's few
numbers a step (counts, figures, now and then the best words of some tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FP32, INT64 = 4, 8
Operation = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Message:
    """One collective of one rank: `bytes` of its whole buffer (gathered, or before it is scattered)."""

    operation: Operation
    group: Literal["world", "vocabulary", "replica"]
    ranks: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """What a rank sends (and receives) in a ring."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) / self.ranks


def head_messages(
    tokens: Sequence[Sequence[int]],
    *,
    world: int,
    columns: int,
    gemm_bytes: int,
    row_tensors: Sequence[int],
    replicated: int,
    full_gate_grad: bool = False,
) -> list[Message]:
    """Every message of one optimizer step of one rank, in the order of the micro-batches, then the step's own.

    tokens: [micro-batch][rank of the vocabulary group], kept tokens. columns: C. gemm_bytes: width of a number of
    loc_u (2 in bf16). row_tensors: trained numbers of this rank's rows, by tensor (W_cls v C, thresholds v, ...).
    replicated: trained numbers of the heads that every rank holds whole.
    """
    group = len(tokens[0])
    replicas = world // group
    found: list[Message] = []

    def say(operation: Operation, name: Literal["world", "vocabulary", "replica"], ranks: int, size: int) -> None:
        if ranks > 1:
            found.append(Message(operation, name, ranks, size))

    for counts in tokens:
        padded = group * max(counts)
        for width in (columns * gemm_bytes, columns * gemm_bytes, INT64, FP32):
            say("all-gather", "vocabulary", group, padded * width)
        say("reduce-scatter", "vocabulary", group, padded * 3 * FP32)
        say("all-reduce", "vocabulary", group, FP32)
        for _ in ("loc_u", "scale_u"):
            say("reduce-scatter", "vocabulary", group, padded * columns * gemm_bytes)
        if full_gate_grad:
            say("all-gather", "vocabulary", group, padded * 3 * FP32)
    if replicated:
        say("all-reduce", "world", world, replicated * FP32)
    for size in row_tensors:
        say("all-reduce", "replica", replicas, size * FP32)
    say("all-reduce", "vocabulary", group, FP32)
    return found


def transfer_share(vocab: int, group: int, *, flops: float, bytes_per_s: float, gemm_bytes: int = 2) -> float:
    """Time of the token transfers over time of the loss's products, whatever N and C are.

    A rank receives 2 N C (g-1) numbers and sends as many gradients back; its six products are 12 (g N) C (V/g) flops.
    flops, bytes_per_s: what a rank sustains.
    """
    return (4 * (group - 1) * gemm_bytes / bytes_per_s) / (12 * vocab / flops)
