"""A run that was stopped goes on over any number of ranks, any vocabulary group, any ZeRO stage: the same losses."""

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from crash.harness import Blow, command, crash_config

TOLERANCE = 1e-5


class Spread(NamedTuple):
    ranks: int
    group: int
    zero: int

    def overrides(self) -> tuple[str, str]:
        return f"parallel.vocab_group_size={self.group}", f"parallel.zero_stage={self.zero}"


PAIRS = [
    (Spread(2, 1, 2), Spread(2, 1, 3)),
    (Spread(2, 1, 3), Spread(2, 2, 2)),
    (Spread(2, 2, 3), Spread(1, 1, 1)),
    (Spread(1, 1, 3), Spread(3, 3, 1)),
    (Spread(3, 3, 3), Spread(2, 2, 1)),
    (Spread(3, 1, 1), Spread(4, 4, 3)),
    (Spread(4, 4, 2), Spread(1, 1, 3)),
    (Spread(4, 2, 3), Spread(3, 1, 2)),
    (Spread(2, 2, 2), Spread(4, 2, 1)),
    (Spread(4, 2, 1), Spread(3, 3, 3)),
]


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(11))
    lines = lines[1:]  # without the start's
    return [line["train/total_loss"] for line in lines] + [lines[-1]["eval/cls_loss_mean"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The config (no dropout: its masks are drawn by rank), and the losses of one rank."""
    config = crash_config(tmp_path_factory.mktemp("spreads"), model__lora__dropout=0.0)
    assert command(config, world=1).codes == [0]
    return config, losses_of(config.parent / "run")


def difference(alone: tuple[Path, list[float]], run: Path, before: Spread, after: Spread, call: int) -> float:
    """Stopped in its `call`-th step, gone on with otherwise; the largest relative difference of a loss."""
    config, expected = alone
    stop = Blow(0, "step", call, 0.0, signal.SIGTERM)
    stopped = command(config, *before.overrides(), f"run.dir={run}", blow=stop, world=before.ranks)
    assert stopped.codes == [75] * before.ranks, stopped.said
    ended = command(config, *after.overrides(), f"run.dir={run}", world=after.ranks)
    assert ended.codes == [0] * after.ranks, ended.said
    found = losses_of(run)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_change_of_ranks_groups_and_zero_resumes_equal(alone: tuple[Path, list[float]], tmp_path: Path) -> None:
    found = {
        (before, after): difference(alone, tmp_path / str(number), before, after, 3 + number % 6)
        for number, (before, after) in enumerate(PAIRS)  # within a stage, at its end (5), in the next
    }
    assert {pair: off for pair, off in found.items() if off >= TOLERANCE} == {}
