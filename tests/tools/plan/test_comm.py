"""The byte formula by itself; that the ranks say exactly this is tests/matrix/test_step_traffic.py."""

from dataclasses import replace

from cqwen_dist.config import Config
from cqwen_dist.tools.plan.comm import Message, head_messages
from cqwen_dist.tools.plan.make import plan

SHAPE = {"world": 4, "columns": 10, "gemm_bytes": 2, "matrices": [(9, 5), (3, 2)], "vectors": 7}


def test_message_sizes_equal_values_by_hand() -> None:
    found = head_messages([[3, 5]], rows=11, row_columns=[10, 1], **SHAPE)
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
    on_a_cpu = head_messages([[3, 5]], rows=11, row_columns=[10, 1], gloo=True, **SHAPE)
    of_step = [m for m in found if m.operation == "reduce-scatter" and m.group != "vocabulary"]
    assert on_a_cpu == [replace(m, operation="all-reduce") if m in of_step else m for m in found]
    assert Message("all-gather", "vocabulary", 4, 400).wire_bytes == 300
    assert Message("all-reduce", "world", 4, 400).wire_bytes == 600


def test_the_plan_reports_the_bytes_that_sharding_the_head_saves() -> None:
    config = Config.model_validate(
        {
            "model": {"name_or_path": "unused", "candidates": "none"},
            "data": {"train": "unused", "sequence_length": 1024},
            "parallel": {"vocab_group_size": 8},
            "train": {"global_batch_size": 16, "micro_batch_size": 2, "precision": "bf16"},
        }
    )
    sizes = {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "num_attention_heads": 28}
    found = plan(config, nodes=1, gpus_per_node=8, gpu_memory_gib=80.0, architecture=sizes)
    c, u, n = 3584, 3592, 2 * 1024
    replicated = 7 / 8 * 2 * 4 * (2 * (u * c + u) + 2 * u + 1)  # a reduce-scatter and an all-gather send as much
    tokens = 7 * n * (4 * c * 2 + 8 + 4 + 4 * 4 + 8 * 4)  # the last: each rank's normalisers of all 8 n tokens
    assert found.head_bytes_sent == round(tokens + replicated + 2 * 7 / 8 * 2 * 4)
    assert found.head_bytes_sent_unsharded == round(
        7 / 8 * 2 * 4 * 152_064 * (c + 1) + replicated + 2 * 7 / 8 * 4
    )  # and the norm
    assert found.head_bytes_sent < found.head_bytes_sent_unsharded / 4
