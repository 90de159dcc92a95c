"""A rank that dies or stalls in mid-step: the others stop, say where, and nothing has stepped."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from matrix.sharded_training import Case, begin, config_of, enter, forward_and_backward
from support.ranks import run_ranks
from torch import Tensor

from cqwen_dist.parallel.groups import build_groups, limit_wait
from cqwen_dist.training.stages import Schedule
from cqwen_dist.training.zero import zero_state
from cqwen_dist.training.zero.engine import Engine

WORLD = 3
TIMEOUT_S = 8.0  # where a rank stalls
LOST = 1  # the rank with the fault
HEADS = Case(WORLD, 3, 1, "fp32", 1, "heads")
FEATURES = Case(WORLD, 3, 2, "fp32", 1, "heads+lora")


def everything(engine: Engine) -> list[Tensor]:
    """Parameters as this rank holds them: the heads, its pieces of the features; and the heads' moments."""
    own = [m.parameter for m in engine.heads.members] + [flat for *_, flat in zero_state.masters(engine.engine)]
    own += [moment for share in engine.heads.shares for moment in share.moments.values()]
    return [tensor.detach().clone() for tensor in own]


def take_steps(case: Case, fault: str, where: str) -> tuple[str, str, bool]:
    """One good step, then one with the fault: (error's class, its text, whether nothing moved)."""
    timeout = TIMEOUT_S if fault == "stalls" else 200.0  # a death is seen at once
    groups = build_groups(case.group, timeout)
    engine, schedule = begin(case, groups, timeout), Schedule(config_of(case).stages, 1)
    enter(engine, schedule, 0)
    dist.barrier()  # in the world, which still waits for long: ranks begin together
    forward_and_backward(case, groups, engine, 0)
    engine.step()
    before = everything(engine)
    dist.barrier()
    limit_wait(dist.group.WORLD, timeout)

    def trouble() -> None:
        if fault == "dies":
            os._exit(0)
        if fault == "stalls":
            time.sleep(60)

    try:
        if dist.get_rank() == LOST and where == "forward":
            trouble()
        forward_and_backward(case, groups, engine, 1)
        if dist.get_rank() == LOST and where == "step":
            trouble()
        engine.step()
    except RuntimeError as error:
        still = all(torch.equal(a, b) for a, b in zip(everything(engine), before, strict=True))
        return type(error).__name__, str(error), still
    return "", "the step was taken", False


GATHER, SUM = "all-gather in the vocabulary group failed", "all-reduce in the world group failed"


@pytest.mark.parametrize(
    ("case", "fault", "where", "says"),
    [
        (HEADS, "dies", "forward", GATHER),
        (FEATURES, "stalls", "step", SUM),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                (HEADS, "stalls", "forward", GATHER),
                (HEADS, "dies", "step", SUM),
                (FEATURES, "dies", "step", SUM),
            )
        ),
    ],
)
def test_a_lost_rank_stops_the_others(case: Case, fault: str, where: str, says: str) -> None:
    first, _, last = run_ranks(take_steps, WORLD, case, fault, where, lost=LOST)
    for kind, text, still in (first, last):
        assert kind == "CollectiveError", text
        assert re.match(rf"{says} \(ranks \[0, 1, 2\], seen by rank [02]\): a rank died or does not answer", text), text
        assert still, "a parameter moved in a step that failed"
