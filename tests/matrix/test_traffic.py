"""What the ranks say in a step, counted by wrapping torch's collectives, is the formula of `plan.comm`, exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from matrix.sharded_training import Case, begin, config_of, enter, forward_and_backward, token_counts
from support.ranks import Pool, groups_of

from cqwen_dist.tools.plan.comm import Message, head_messages
from cqwen_dist.training.stages import Schedule

# function, its operation, which argument is the whole buffer
WRAPPED = (
    ("all_gather_into_tensor", "all-gather", "output_tensor"),
    ("reduce_scatter_tensor", "reduce-scatter", "input"),
    ("all_reduce", "all-reduce", "tensor"),
)
OURS = ("vocabulary", "replica")
SILENT = (
    "all_gather",
    "all_gather_object",
    "reduce_scatter",
    "broadcast",
    "all_to_all_single",
    "send",
    "recv",
    "reduce",
)


@contextmanager
def counting(strictly: bool) -> Iterator[list[Message]]:
    """Every collective inside, as a message; strictly: other operations raise."""
    found: list[Message] = []
    originals = {name: getattr(dist, name) for name in (*(w[0] for w in WRAPPED), *SILENT)}

    def counter(original: Callable[..., Any], operation: Any, buffer: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            given = inspect.signature(original).bind(*args, **options).arguments
            group = given.get("group")
            name: Any = "world" if group is None or group == dist.group.WORLD else group.group_desc
            found.append(Message(operation, name, dist.get_world_size(group), given[buffer].nbytes))
            return original(*args, **options)

        return call

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an operation that the formula does not know")

    for name, operation, buffer in WRAPPED:
        setattr(dist, name, counter(originals[name], operation, buffer))
    for name in SILENT if strictly else ():
        setattr(dist, name, refuse)
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic(case: Case, gate_grad: str) -> list[tuple[list[Message], list[Message]]]:
    """(counted, expected) of the first two steps, on this rank."""
    results = []
    groups = groups_of(case.group)
    engine, schedule = begin(case, groups), Schedule(config_of(case).stages, 1)
    members = engine.heads.members
    for step in range(2):
        enter(engine, schedule, step)
        with counting(case.kind == "heads") as counted:
            forward_and_backward(case, groups, engine, step, gate_grad)
            engine.step()
        expected = head_messages(
            token_counts(case, groups, step),
            world=case.world,
            columns=engine.model.action.cls_weight.shape[1],
            gemm_bytes=2 if case.precision == "bf16" else 4,
            rows=engine.model.action.rows,
            row_columns=[m.parameter[0].numel() for m in members if m.has_rows],
            matrices=[tuple(m.parameter.shape) for m in members if m.spread and not m.has_rows],
            vectors=sum(m.parameter.numel() for m in members if not m.spread),
            full_gate_grad=gate_grad == "full",
            gloo=True,
        )
        if case.kind != "heads":  # DeepSpeed speaks in the world, and in groups of its own
            counted, expected = ([m for m in found if m.group in OURS] for found in (counted, expected))
        results.append((counted, expected))
    return results


SIZES = [(2, 2), (4, 2), (1, 1), (2, 1), (3, 3), (4, 4)]
CASES = [
    pytest.param(
        Case(world, group, zero, precision, accumulation, kind),
        gate_grad,
        id=f"{world} ranks, groups of {group}, ZeRO {zero}, {precision}, {kind}, gate {gate_grad}",
        marks=() if (world, group) in SIZES[:2] else pytest.mark.slow,
    )
    for world, group in SIZES
    for zero, precision, accumulation, kind, gate_grad in (
        (1, "fp32", 2, "heads", "stop"),
        (1, "bf16", 1, "heads", "full"),
        *((zero, "fp32", 1, "heads+lora", "stop") for zero in (1, 2, 3)),
    )
]


@pytest.mark.parametrize(("case", "gate_grad"), CASES)
def test_counted_messages_equal_the_formula(pool: Pool, case: Case, gate_grad: str) -> None:
    for results in pool(traffic, case.world, case, gate_grad):
        assert len(results) == 2
        for counted, expected in results:
            assert sorted(counted, key=repr) == sorted(expected, key=repr)
