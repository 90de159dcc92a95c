"""What a run says of settings that are valid and known to work badly."""

from pathlib import Path

from support.ranks import run_ranks
from support.runs import train_and_say, write_config

from cqwen_dist.ops import products

CASES = [("bf16", False), ("bf16", True), ("fp32", False)]  # precision, and whether the CPU has instructions for bf16


def _notes(config: Path) -> list[list[str]]:
    """The notes of a run on this rank, for each of `CASES`."""
    found = []
    for number, (precision, has) in enumerate(CASES):
        products._bf16_cpu = lambda has=has: has  # type: ignore[assignment, misc]
        run = f"run.dir={config.parent / str(number)}"
        said = train_and_say(str(config), [run, "start=seed-100", f"train.precision={precision}"])
        found.append([line for line in said if line.startswith("note: ")])
    return found


def test_a_run_in_bf16_on_a_cpu_without_it_is_told_the_faster_precision(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages__0__steps=1, stages__1__steps=1, train__checkpoint_every=100)
    found = run_ranks(_notes, 1, config)[0]
    assert [sum("train.precision=fp32" in line for line in lines) for lines in found] == [1, 0, 0]
    assert all("C = 100" in lines[0] for lines in found), "the other notes are still there"
