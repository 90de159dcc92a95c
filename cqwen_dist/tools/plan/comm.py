"""Lists every message in one optimizer step, with sizes in bytes.

docs/planner.md describes the messages. The trainer's few numbers per step (counts, metrics, sometimes the best words
for some tokens) are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cqwen_dist.tools.plan.stage_sizes import FP32, MAX_LIVE, PERSISTENT_BELOW, Sizes, ceil_div

INT64 = 8
Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
GroupName = Literal["world", "vocabulary", "replica", "sequence"]


@dataclass(frozen=True)
class Message:
    """One collective on one rank. bytes: the full buffer, gathered or before it is scattered."""

    operation: Operation
    group: GroupName
    ranks: int
    bytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends (and receives), in a ring or to each rank its part."""
        rounds = 2 if self.operation == "all-reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) / self.ranks


def bytes_sent(messages: Sequence[Message]) -> int:
    """Total bytes that one rank sends for these messages."""
    return round(sum(message.wire_bytes for message in messages))


def head_messages(s: Sizes, tokens: Sequence[Sequence[int]] | None = None) -> list[Message]:
    """The head messages on one rank in one optimizer step: first for each micro-batch in order, then for the step.

    tokens: label positions by [micro-batch][rank in the vocabulary group]; default: every
    position has a label, if words are learnt. On a CPU, gradients are all-reduced instead of scattered
    (`collectives.sum_to_owners`).
    """
    group = s.group
    tokens = [[s.tokens] * group] * (s.accumulation * s.config.learns_words) if tokens is None else tokens
    replicas, columns, gemm_bytes = s.world // group, s.words, s.width
    rows, softmax, gloo = ceil_div(s.base.vocab, group), s.config.word_terms["softmax_weight"] > 0, s.kind == "cpu"
    found: list[Message] = []

    def send(operation: Operation, name: GroupName, ranks: int, size: int) -> None:
        if ranks > 1:
            found.append(Message(operation, name, ranks, size))

    for counts in tokens:
        # The ranks in a group pad to the longest micro-batch. They exchange loc_u, scale_u, label ids and weights.
        padded = group * max(counts)
        for width in (columns * gemm_bytes, columns * gemm_bytes, INT64, FP32):
            send("all-gather", "vocabulary", group, padded * width)
        if softmax:  # the ranks' normalisers, of all tokens
            send("all-gather", "vocabulary", group, group * sum(counts) * FP32)
        send("reduce-scatter", "vocabulary", group, padded * (3 + softmax) * FP32)
        send("all-reduce", "vocabulary", group, FP32)
        for _ in ("loc_u", "scale_u"):
            send("reduce-scatter", "vocabulary", group, padded * columns * gemm_bytes)
    spread: list[tuple[GroupName, int, Sequence[tuple[int, int]], int]] = [
        ("world", s.world, s.matrices(s.trainable), s.vectors(s.trainable)),
        ("replica", replicas, [(rows, columns) for columns in s.row_columns(s.trainable)], 0),
    ]
    for name, ranks, shapes, whole in spread:
        for height, columns in shapes if ranks > 1 else ():
            if owned := height // ranks * ranks * columns * FP32:
                send("all-reduce" if gloo else "reduce-scatter", name, ranks, owned)
                send("all-gather", name, ranks, owned)
        if rest := (whole + sum(height % ranks * columns for height, columns in shapes)) * FP32:
            send("all-reduce", name, ranks, rest)
    send("all-reduce", "world", s.world, FP32)
    return found


def step_messages(s: Sizes) -> list[Message]:
    """All messages on one rank in one optimizer step."""
    return head_messages(s) + feature_messages(s) + attention_messages(s)


def attention_messages(s: Sizes) -> list[Message]:
    """The exchanges of a sequence group in one optimizer step: q, k, v and the output of every layer.

    The gradients are exchanged too, and with recomputation the tensors a second time.
    """
    if s.sequence == 1:
        return []
    a = s.base
    heads = (a.heads, max(a.kv_heads, s.sequence), max(a.kv_heads, s.sequence), a.heads)
    layer = [Message("all-to-all", "sequence", s.sequence, s.tokens * n * a.head_dim * s.width) for n in heads]
    return layer * (a.layers * s.accumulation * (1 + s.graph * (1 + s.checkpointing)))


def feature_messages(s: Sizes) -> list[Message]:
    """The engine messages in one optimizer step. ZeRO 1 and 2 send none while no feature trains."""
    if s.world == 1 or (not s.graph and s.zero < 3):
        return []
    found: list[Message] = []

    def send(operation: Operation, size: int, times: int = 1) -> None:
        found.extend([Message(operation, "world", s.world, size)] * (times if size else 0))

    if s.zero == 3:
        gathered, persistent = _zero3_numbers(s)
        send("all-gather", gathered * s.width, s.accumulation)
        send("all-gather", persistent * s.width)
        if s.graph:
            send("reduce-scatter", ceil_div(s.trained_features, s.world) * s.world * s.width, s.accumulation)
            send("all-reduce", 2 * FP32, len(s.engine_parameters))
        return found
    trained = [count for group, count in s.engine_parameters.items() if group in s.trainable]
    send("all-reduce", sum(trained) * s.width, s.accumulation if s.zero == 2 else 1)
    send("all-reduce", FP32)
    for count in trained:
        send("all-gather", ceil_div(count, 2 * s.world) * 2 * s.world * s.width)
    return found


def _zero3_numbers(s: Sizes) -> tuple[int, int]:
    """(numbers that ZeRO-3 gathers per micro-batch, numbers in small parameters that it gathers once per step).

    A micro-batch gathers the embedding and the last norm once. It gathers the layers once if all of them may stay
    gathered, else separately for forward, backward, and recomputation under checkpointing.
    """
    a, below = s.base, s.zero_setting("stage3_param_persistence_threshold", PERSISTENT_BELOW)

    def partitioned(*sizes: int) -> int:
        return sum(size for size in sizes if size >= below)

    frozen = sum(count * partitioned(*a.tensors(layer)) for count, layer in a.stack)
    r = s.config.model.lora.r
    adapters = sum(count * partitioned(r * each.rows, r * each.columns) for count, each in a.all_maps(s.adapters))
    of_numbers = s.engine_parameters["embedding"] - a.hidden, a.hidden  # w_num and the <NUM> row
    ends = partitioned(a.embedding_parameters, a.hidden, *of_numbers)
    every = a.backbone_parameters + a.embedding_parameters + s.trained_features
    persistent = s.graph * (every - frozen - adapters - ends)

    window = min(s.zero_setting(f"stage3_max_{key}", MAX_LIVE) for key in ("live_parameters", "reuse_distance"))
    again = s.graph and s.checkpointing
    if a.backbone_parameters + a.embedding_parameters + s.trained_features <= window:
        return ends + frozen * (1 + again) + adapters, persistent
    passes = 1 + s.graph + again
    numbers = partitioned(*of_numbers) * s.graph  # gathered again for backward
    return ends + numbers + passes * (frozen + adapters), persistent
