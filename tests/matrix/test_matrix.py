"""Ranks x vocabulary group x ZeRO x precision x accumulation x what trains: the same training as one process's.

The oracle (`plain_training`) knows no ranks, no DeepSpeed and no fused loss. Every case trains 6 steps with active
clipping on rows that are spread unevenly over ranks and micro-batches, some of which hold none, some no number.
fp32: losses, norms and every parameter as the oracle's. bf16: no further from it than unsharded bf16 is.
"""

from itertools import product
from typing import Any

import pytest
import torch
from matrix.plain_training import COLUMN, KINDS, Trained, train_plainly
from matrix.sharded_training import Case, Found, run_case, train_alone
from support.devices import LINKS, WITHOUT_GPU
from support.ranks import Pool

TOLERANCE = 5e-5  # relative for losses and norms, absolute for parameters of order 1
ON_GPU = 1e-4  # the same: kernels sum in other orders, and Adam divides by the root of what may be small
SPREAD = 1.5  # bf16 on ranks, over the worst of unsharded bf16
GROUPS = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4)}
BOTH = "heads+lora"

WHOLE = {
    world: [Case(world, *rest) for rest in product(sizes, (1, 2, 3), ("fp32", "bf16"), (1, 2), COLUMN)]
    for world, sizes in GROUPS.items()
}
# Every value of every column, the pairs that differ in code, and what has no column of its own.
THIN = {
    1: [Case(1, 1, 1, "fp32", 2, BOTH), Case(1, 1, 3, "fp32", 1, BOTH, checkpointing=True)],
    2: [
        Case(2, 2, 1, "fp32", 2, BOTH),
        Case(2, 1, 2, "fp32", 1, BOTH, offload=True),
        Case(2, 2, 3, "fp32", 1, BOTH, offload=True),
        Case(2, 2, 2, "bf16", 2, BOTH, checkpointing=True),
        Case(2, 2, 1, "fp32", 2, "heads"),
        Case(2, 2, 1, "fp32", 2, "scalar C, full gate"),
    ],
    3: [Case(3, 3, 2, "fp32", 2, BOTH), Case(3, 1, 1, "bf16", 1, "heads")],
    4: [
        Case(4, 2, 1, "fp32", 1, "scalar C, full gate"),
        Case(4, 2, 3, "fp32", 1, BOTH),
        Case(4, 2, 1, "bf16", 1, BOTH),
        Case(4, 4, 3, "bf16", 1, BOTH),
    ],
}
STAGED = [Case(2, 2, 2, "bf16", 1, BOTH), Case(2, 2, 3, "fp32", 2, BOTH)]
UNSHARDED_BF16 = [Case(1, 1, 1, "bf16", accumulation, kind) for accumulation, kind in product((1, 2), COLUMN)]


def named(cases: list[Case]) -> Any:
    names = [
        f"{c.world} ranks, groups of {c.group}, ZeRO {c.zero}, {c.precision}, {c.accumulation} micro-batches, {c.kind}"
        + ", offload" * c.offload
        + ", checkpointing" * c.checkpointing
        for c in cases
    ]
    return pytest.mark.parametrize("case", cases, ids=names)


@pytest.fixture(scope="module")
def oracles() -> dict[str, Trained]:
    return {kind: train_plainly(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def bf16_spread(pool: Pool, oracles: dict[str, Trained]) -> dict[str, Found]:
    """The furthest that bf16 in one process, no vocabulary group, is from the fp32 oracle."""
    return furthest(pool, oracles)


def furthest(pool: Pool, oracles: dict[str, Trained], link: str = "gloo") -> dict[str, Found]:
    found = [(case, pool(run_case, 1, case, oracles[case.kind], link=link)[0]) for case in UNSHARDED_BF16]
    return {
        kind: Found(*(max(f[i] for case, f in found if case.kind == kind) for i in range(4)), "")  # type: ignore[arg-type]
        for kind in COLUMN
    }


def check(
    pool: Pool,
    case: Case,
    oracles: dict[str, Trained],
    spread: dict[str, Found],
    link: str = "gloo",
    tolerance: float = TOLERANCE,
) -> None:
    """Hold the case to its oracle. link: as of `run_ranks`."""
    found = pool(run_case, case.world, case, oracles[case.kind], link=link)[0]
    if case.precision == "fp32":
        good = max(found[:3]) <= tolerance
    else:
        limit = spread[case.kind]
        good = found.loss <= SPREAD * limit.loss and found.drift <= SPREAD * limit.drift
    line = f"loss {found.loss:.1e}, norm {found.norm:.1e}, parameter {found.parameter:.1e}, drift {found.drift:.1e}"
    print(f"{case}: {line}")
    assert good, f"{line} ({found.name})"


@named([case for cases in THIN.values() for case in cases])
def test_ranks_equal_one_process(pool, case, oracles, bf16_spread) -> None:
    check(pool, case, oracles, bf16_spread)


@pytest.mark.slow
@named([case for cases in WHOLE.values() for case in cases])
def test_ranks_equal_one_process_over_the_whole_matrix(pool, case, oracles, bf16_spread) -> None:
    check(pool, case, oracles, bf16_spread)


@named(STAGED)
def test_collectives_by_way_of_the_host_train_the_same(pool, case, oracles, bf16_spread) -> None:
    """DeepSpeed's ZeRO 1-3 and the heads over `support.staged`, every tensor copied to and fro."""
    check(pool, case, oracles, bf16_spread, "host")


@pytest.fixture(scope="module")
def gpu_oracles(pool: Pool, oracles: dict[str, Trained]) -> dict[str, Trained]:
    """One rank on the GPU, with the GPU's kernels."""
    found = {}
    for kind in KINDS:
        ((losses, norms, parameters),) = pool(train_alone, 1, Case(1, 1, 1, "fp32", 1, kind), link="one gpu")
        tensors = {name: torch.from_numpy(array) for name, array in parameters.items()}
        found[kind] = Trained(losses, norms, tensors, oracles[kind].start)
    return found


@pytest.fixture(scope="module")
def gpu_bf16_spread(pool: Pool, gpu_oracles: dict[str, Trained]) -> dict[str, Found]:
    return furthest(pool, gpu_oracles, "one gpu")


@pytest.mark.gpu
@WITHOUT_GPU
@named([Case(1, 1, 1, "fp32", 1, kind) for kind in KINDS])
def test_one_rank_on_a_gpu_equals_the_cpu(pool: Pool, case: Case, oracles: dict[str, Trained]) -> None:
    """As far from the plain formulas as other kernels' rounding takes it."""
    check(pool, case, oracles, {}, "one gpu", ON_GPU)


@LINKS
@named(WHOLE[2])
def test_two_ranks_on_gpus_equal_one(pool, case, gpu_oracles, gpu_bf16_spread, link) -> None:
    check(pool, case, gpu_oracles, gpu_bf16_spread, link, ON_GPU)


def test_the_quick_cases_cover_every_value() -> None:
    for column in ("world", "group", "zero", "precision", "accumulation", "kind", "offload", "checkpointing"):
        values = {getattr(case, column) for cases in THIN.values() for case in cases}
        assert values >= {getattr(case, column) for cases in WHOLE.values() for case in cases}, column
