"""SIGKILL at any moment loses nothing but the steps since the last checkpoint.

`make soak` deals hundreds of blows, of other kinds too (test_soak.py).
"""

import random
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path

import pytest
from crash.harness import Blow, Ended, command, crash_config, result_of

from cqwen_dist.checkpoint.manifest import list_checkpoints, verify
from cqwen_dist.run.status import read_status

BLOWS_A_RUN = 3
SPREADS = {
    "ZeRO-1": (),
    "ZeRO-2, vocabulary over 2": ("parallel.zero_stage=2", "parallel.vocab_group_size=2"),
    "ZeRO-3, vocabulary over 2": ("parallel.zero_stage=3", "parallel.vocab_group_size=2"),
}


def reference(folder: Path, spread: tuple[str, ...]) -> tuple[Path, dict]:
    config = crash_config(folder)
    assert command(config, *spread).codes == [0, 0]
    return config, result_of(folder / "run")


def harass(config: Path, run: Path, spread: tuple[str, ...], blows: Iterable[Blow]) -> list[tuple[Blow, Ended]]:
    """A run that is killed by each of the blows and gone on with; those that fell."""
    fallen = []
    for blow in blows:
        ended = command(config, *spread, f"run.dir={run}", blow=blow)
        if not ended.killed:
            assert ended.codes == [0, 0], ended.said
            return fallen
        fallen.append((blow, ended))
        assert read_status(run)["status"] in ("running", "unknown"), f"lost, not {read_status(run)} after {blow}"
        for folder in list_checkpoints(run):
            assert verify(folder) == [], f"{folder} is damaged after {blow}"
    ended = command(config, *spread, f"run.dir={run}")
    assert ended.codes == [0, 0], ended.said
    return fallen


def kill_until(blows: int, tmp_path: Path, spread: tuple[str, ...], seed: int) -> int:
    """Runs killed and gone on with, each compared with the one that was left alone, until so many blows have fallen."""
    config, expected = reference(tmp_path, spread)
    draw, drawn, fallen, runs = random.Random(f"{seed} {spread}"), count(), 0, 0
    while fallen < blows:
        run = tmp_path / f"killed-{runs}"
        next_ones = (Blow.drawn(draw, number) for number in islice(drawn, min(BLOWS_A_RUN, blows - fallen)))
        dealt = harass(config, run, spread, next_ones)
        for blow, ended in dealt:
            fallen += 1
            print(
                f"  {fallen:3} of seed {seed}: rank {blow.rank}, {blow.after_ms:4.1f} ms after {blow.point} {blow.call}"
                f"; the other rank ended {ended.survived_s:.2f} s later"
            )
        found = result_of(run)
        assert found == expected, f"run {runs} of seed {seed} differs after {[blow for blow, _ in dealt]}"
        runs += 1
        assert runs < 4 * blows, "blows miss: the points are never reached"
    return runs


def test_a_run_killed_many_times_equals_the_undisturbed_run(tmp_path: Path) -> None:
    kill_until(4, tmp_path, SPREADS["ZeRO-2, vocabulary over 2"], seed=0)


@pytest.mark.slow
def test_a_rank_that_dies_between_two_groups_is_found_out_at_once(tmp_path: Path) -> None:
    """Making the next group would wait for it until the timeout, half an hour."""
    ended = command(crash_config(tmp_path), blow=Blow(1, "setup", 1, 0.0))
    assert ended.codes == [1, -9], ended.said
