"""Which checkpoints stay."""

import math

from hypothesis import given
from hypothesis import strategies as st

from cqwen_dist.checkpoint.manifest import Retention

LOSS = "eval/cls_loss_mean"


def figures(*losses: float | None) -> dict[int, dict[str, float]]:
    """Checkpoints of steps 10, 20, ...; None: not evaluated at that step."""
    return {10 * n: {} if loss is None else {LOSS: loss} for n, loss in enumerate(losses, 1)}


def kept(rule: Retention, found: dict[int, dict[str, float]]) -> list[int]:
    newest = max(found)
    return sorted(set(found) - set(rule.outdated(found, newest)))


def test_keeps_the_newest_and_the_best() -> None:
    found = figures(3.0, 1.0, None, 2.0, 2.5, 2.6)
    assert kept(Retention(newest=2), found) == [50, 60]
    assert kept(Retention(newest=1, best=2), found) == [20, 40, 60]
    assert kept(Retention(newest=1, best=1, higher=True), found) == [10, 60]


def test_ties_keep_the_later_checkpoint_and_nan_is_never_best() -> None:
    assert Retention(best=2).best_of(figures(1.0, math.nan, 1.0, 5.0)) == [30, 10]


def test_checkpoints_beyond_the_current_step_do_not_count() -> None:
    """A run set back to step 20 writes step 30: 40 and 50, of before, neither count nor go."""
    assert Retention(newest=1).outdated(figures(1, 1, 1, 1, 1), 30) == [10, 20]


@given(
    st.dictionaries(st.integers(1, 50), st.one_of(st.none(), st.floats()), min_size=1),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_checkpoint_just_written_is_kept(found: dict[int, float | None], newest: int, best: int) -> None:
    known = {step: {} if loss is None else {LOSS: loss} for step, loss in found.items()}
    rule = Retention(newest=newest, best=best)
    for step in known:
        assert step not in rule.outdated(known, step)
