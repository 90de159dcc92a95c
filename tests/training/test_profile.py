"""`train.profile`: a trace that opens, the costliest operators by name, and the same losses to the bit."""

import json
from pathlib import Path

import pytest
from support.runs import cqwen_forked, losses, train_run, write_config

from cqwen_dist.config import UserError, load_config

WINDOW = "train.profile={start: 3, steps: 2}"  # the last step of the heads' stage, and the first with adapters


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_traced_run_has_the_losses_of_the_run_without(tmp_path: Path, world: int) -> None:
    config, plain, run = write_config(tmp_path, stages__0__train=["heads"]), tmp_path / "plain", tmp_path / "run"
    said: list[str] = []
    for folder, window in ((plain, "train.profile=null"), (run, WINDOW)):
        if world > 1:  # the ranks have a console of their own
            train_run(config, f"run.dir={folder}", window, world=world)
        else:
            done = cqwen_forked("train", config, f"run.dir={folder}", window)
            assert done.returncode == 0, done.stderr
            said = done.stdout.splitlines()
            assert any(line.startswith("profile: ") for line in said) == (folder == run)
    assert losses(run) == losses(plain)
    assert not (plain / "profile").exists()
    trace = json.loads((run / "profile" / "trace.json").read_text(encoding="utf-8"))
    assert {"aten::mm", "aten::embedding"} <= {e["name"] for e in trace["traceEvents"] if e.get("cat") == "cpu_op"}
    if world == 1:
        (at,) = [index for index, line in enumerate(said) if line.startswith("profile: ")]
        named = [line.strip().rpartition(": ") for line in said[at + 1 : at + 6]]
        assert {name for name, _, _ in named} <= {event["name"] for event in trace["traceEvents"]}
        shares = [float(rest.partition("%")[0]) for _, _, rest in named]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) > 20


def test_a_window_beyond_the_end_is_cut_and_one_that_began_before_is_left_out(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    train_run(config, "run.stop_after=heads", "train.profile={start: 3, steps: 9}")
    trace = tmp_path / "run" / "profile" / "trace.json"
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    trace.unlink()
    train_run(config, "train.profile={start: 3, steps: 9}")  # resumed at step 4
    assert not trace.exists()
    with pytest.raises(UserError, match=r"train\.profile\.start: found 0"):
        load_config(config, ["train.profile={start: 0}"])
