"""The byte formula by itself; that the ranks say exactly this is tests/matrix/test_step_traffic.py."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cqwen_dist.config import Config
from cqwen_dist.tools.plan.comm import Message, head_messages
from cqwen_dist.tools.plan.make import plan


def stage(kind: str) -> Any:
    """The sizes that the formula reads: 22 words, W_cls and the thresholds trained, C 10, two matrices, 7 numbers."""
    trained = {"row_columns": lambda groups: [10, 1], "matrices": lambda groups: [(9, 5), (3, 2)]}
    config = SimpleNamespace(word_terms={"softmax_weight": 0.0}, learns_words=True)
    sizes = {
        "world": 4,
        "group": 2,
        "words": 10,
        "width": 2,
        "kind": kind,
        "trainable": frozenset(),
        "vectors": lambda groups: 7,
    }
    return SimpleNamespace(**sizes, **trained, config=config, base=SimpleNamespace(vocab=22))


def test_message_sizes_equal_values_by_hand() -> None:
    found = head_messages(stage("cuda"), [[3, 5]])
    assert [(m.operation, m.group, m.bytes) for m in found] == [
        ("all-gather", "vocabulary", 2 * 5 * 10 * 2),
        ("all-gather", "vocabulary", 2 * 5 * 10 * 2),
        ("all-gather", "vocabulary", 2 * 5 * 8),
        ("all-gather", "vocabulary", 2 * 5 * 4),
        ("reduce-scatter", "vocabulary", 2 * 5 * 3 * 4),
        ("all-reduce", "vocabulary", 4),
        ("reduce-scatter", "vocabulary", 2 * 5 * 10 * 2),
        ("reduce-scatter", "vocabulary", 2 * 5 * 10 * 2),
        ("reduce-scatter", "world", 8 * 5 * 4),  # of 9 rows each of four ranks owns two
        ("all-gather", "world", 8 * 5 * 4),
        ("all-reduce", "world", (5 + 3 * 2 + 7) * 4),  # one row; three that are fewer than the ranks; the vectors
        ("reduce-scatter", "replica", 10 * 10 * 4),
        ("all-gather", "replica", 10 * 10 * 4),
        ("reduce-scatter", "replica", 10 * 4),
        ("all-gather", "replica", 10 * 4),
        ("all-reduce", "replica", 11 * 4),
        ("all-reduce", "world", 4),
    ]
    on_a_cpu = head_messages(stage("cpu"), [[3, 5]])
    of_step = [m for m in found if m.operation == "reduce-scatter" and m.group != "vocabulary"]
    assert on_a_cpu == [replace(m, operation="all-reduce") if m in of_step else m for m in found]
    assert Message("all-gather", "vocabulary", 4, 400).wire_bytes == 300
    assert Message("all-reduce", "world", 4, 400).wire_bytes == 600


def test_the_plan_reports_the_bytes_that_sharding_the_head_saves() -> None:
    sizes = {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "num_attention_heads": 28}

    def sent(group: int) -> int:
        config = Config.model_validate(
            {
                "model": {"name_or_path": "unused", "candidates": "none"},
                "data": {"train": "unused", "sequence_length": 1024},
                "parallel": {"vocab_group_size": group},
                "train": {"global_batch_size": 16, "micro_batch_size": 2, "precision": "bf16"},
            }
        )
        found = plan(config, nodes=1, gpus_per_node=8, gpu_memory_gib=80.0, architecture=sizes)
        return found.head_bytes_sent

    c, u, n = 3584, 3592, 2 * 1024
    replicated = 7 / 8 * 2 * 4 * (2 * (u * c + u) + 2 * u + 1)  # a reduce-scatter and an all-gather send as much
    tokens = 7 * n * (4 * c * 2 + 8 + 4 + 4 * 4 + 8 * 4)  # the last: each rank's normalisers of all 8 n tokens
    assert sent(8) == round(tokens + replicated + 2 * 7 / 8 * 2 * 4)
    assert sent(1) == round(7 / 8 * 2 * 4 * 152_064 * (c + 1) + replicated + 2 * 7 / 8 * 4)  # and the norm
    assert sent(8) < sent(1) / 4
