"""SIGKILL at any moment loses nothing but the steps since the last checkpoint.

`make soak` deals 200 blows (SOAK=500 for more, SOAK_SEED to draw others), SIGTERM and SIGHUP among them, over drawn
ranks, ZeRO stages and vocabulary groups, on texts that are packed or not.
"""

import os
import random
import shutil
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
from crash.harness import POINTS, STOPPED, Blow, command, crash_config, result_of

from cqwen_dist.checkpoint.manifest import list_checkpoints, verify
from cqwen_dist.run.status import read_status

BLOWS_A_RUN = 3
Layout = tuple[int, tuple[str, ...]]  # ranks, overrides
LAYOUTS: list[Layout] = [
    (1, ("data.pack=true",)),
    (2, ("parallel.zero_stage=1", "data.pack=true")),
    (2, ("parallel.zero_stage=2", "parallel.vocab_group_size=2")),
    (2, ("parallel.zero_stage=3", "parallel.vocab_group_size=2")),
    (3, ("parallel.zero_stage=2",)),
]


def harass(config: Path, run: Path, layout: Layout, blows: Iterable[Blow]) -> list[Blow]:
    """A run that is struck by each of the blows and gone on with; those that fell."""
    (world, spread), fallen = layout, []
    for blow in (replace(blow, rank=blow.rank % world) for blow in blows):
        ended = command(config, *spread, f"run.dir={run}", blow=blow, world=world)
        if not ended.struck:
            assert ended.codes == [0] * world, ended.said
            return fallen
        fallen.append(blow)
        in_order = {0, 1, -signal.SIGKILL} if blow.number == signal.SIGKILL else {0, STOPPED}
        assert set(ended.codes) <= in_order, (blow, ended.codes, ended.said)
        allowed = ("running", "unknown") if ended.killed else ("preempted", "done", "running", "unknown")
        assert read_status(run)["status"] in allowed, f"lost, not {read_status(run)} after {blow}"
        for folder in list_checkpoints(run):
            assert verify(folder) == [], f"{folder} is damaged after {blow}"
    ended = command(config, *spread, f"run.dir={run}", world=world)
    assert ended.codes == [0] * world, ended.said
    return fallen


def strike_until(blows: int, folder: Path, draw: random.Random, layouts: list[Layout], drawn: Iterator[Blow]) -> None:
    """Runs struck and gone on with, each compared with the one of its layout that was left alone."""
    config, alone, fallen, runs = crash_config(folder, stages__0__train=["heads"]), {}, 0, 0
    while fallen < blows:
        world, spread = layout = draw.choice(layouts)
        if layout not in alone:
            run = folder / f"alone-{len(alone)}"
            assert command(config, *spread, f"run.dir={run}", world=world).codes == [0] * world
            alone[layout] = result_of(run)
        run = folder / f"struck-{runs}"
        dealt = harass(config, run, layout, islice(drawn, min(BLOWS_A_RUN, blows - fallen)))
        fallen += len(dealt)
        assert result_of(run) == alone[layout], f"run {runs} differs after {dealt}"
        shutil.rmtree(run)
        runs += 1
        assert runs < 4 * blows, "blows miss: the points are never reached"


def test_a_run_killed_many_times_equals_the_undisturbed_run(tmp_path: Path) -> None:
    draw = random.Random(0)
    strike_until(4, tmp_path, draw, [LAYOUTS[2]], (Blow.drawn(draw, number) for number in count()))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_struck_at_drawn_moments_equal_the_undisturbed_run(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"\nSOAK_SEED={seed}")
    draw = random.Random(seed)

    def drawn() -> Iterator[Blow]:
        while True:
            blow = Blow.drawn_at(draw, draw.choice([*POINTS, "figures", "start", "prune"]), 6)
            yield replace(blow, number=draw.choice([signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGHUP]))

    strike_until(int(os.environ.get("SOAK", "200")), tmp_path, draw, LAYOUTS, drawn())


@pytest.mark.slow
def test_a_rank_that_dies_between_two_groups_is_found_out_at_once(tmp_path: Path) -> None:
    """Making the next group would wait for it until the timeout, half an hour."""
    ended = command(crash_config(tmp_path), blow=Blow(1, "setup", 1, 0.0))
    assert ended.codes == [1, -9], ended.said
