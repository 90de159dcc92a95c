"""A bit that flips on one rank is found by name before it is saved, and a resume takes the steps again."""

import errno
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from support.ranks import run_ranks
from support.runs import as_rank, losses, train_run, weights, write_config

from cqwen_dist import api
from cqwen_dist.checkpoint.manifest import latest_checkpoint
from cqwen_dist.cli import runs
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.errors import DiskError
from cqwen_dist.parallel.collectives import CollectiveError, Stopped, cause_of
from cqwen_dist.parallel.runtime import Runtime
from cqwen_dist.run.folder import open_run, refuse_changes
from cqwen_dist.run.status import RunStatus, end_status, read_status, write_status
from cqwen_dist.training import train
from cqwen_dist.training.callbacks import CallbackError
from cqwen_dist.training.replicas import RanksDiffer, bit_hash
from cqwen_dist.training.train import open_session, train_on
from cqwen_dist.training.trainer import Trainer


def test_one_flipped_bit_or_swapped_values_change_the_hash() -> None:
    def hashed(value: torch.Tensor) -> int:
        return int(bit_hash(value))

    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        value = torch.randn(7, 300).to(dtype)
        usual = hashed(value)
        assert hashed(value.clone()) == usual
        width = torch.iinfo(bits).bits
        for place, bit in ((0, 0), (2099, width - 1), (1000, 3)):
            changed = value.clone()
            changed.view(bits).view(-1)[place] ^= -(2 ** (width - 1)) if bit == width - 1 else 1 << bit
            assert hashed(changed) != usual, (dtype, place, bit)
        exchanged = value.clone()
        exchanged[0, 0], exchanged[6, 299] = value[6, 299], value[0, 0]
        assert hashed(exchanged) != usual
    assert hashed(torch.tensor(3.0)) != hashed(torch.tensor(4.0)), "a step count"
    assert isinstance(hashed(torch.empty(0)), int)


def flipped(config: str, overrides: list[str], rank: int, part: str, at: int, every: int = 1) -> str:
    """Train; on one rank the lowest bit of a parameter flips after step `at`. The error."""
    runtime, plain = as_rank(), Trainer._take_step

    def struck(self: Trainer, plan: Any, step: int, batches: Any) -> dict[str, Any]:
        record = plain(self, plan, step, batches)
        self.run.replicas.EVERY = every  # type: ignore[misc]
        if runtime.rank == rank and step + 1 == at:
            members = [*self.run.engine.heads.members, *self.run.engine.feature_members]
            parameter = next(m.parameter for m in members if part in m.name)
            parameter.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        return record

    Trainer._take_step = struck  # type: ignore[method-assign]
    try:
        train_on(load_config(config, overrides), runtime)
    except RanksDiffer as error:
        return str(error)
    finally:
        Trainer._take_step = plain  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(
    ("world", "rank", "part"), [(2, 0, "lora_A"), pytest.param(4, 3, "action.cls_weight", marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_found_and_the_resumed_run_equals_the_undisturbed_one(
    two_ranks: Path, tmp_path: Path, world: int, rank: int, part: str
) -> None:
    """Of an adapter; and of a row, in vocabulary groups of two."""
    undisturbed, config, spread, run = two_ranks, two_ranks.parent / "config.yaml", [], tmp_path / "struck"
    if world == 4:
        undisturbed, config = tmp_path / "run", write_config(tmp_path, train__micro_batch_size=3)
        spread = ["parallel.zero_stage=2", "parallel.vocab_group_size=2"]
        train_run(config, *spread, world=world)
    said = run_ranks(flipped, world, str(config), [*spread, f"run.dir={run}"], rank, part, 5)
    assert len(set(said)) == 1
    assert part in said[0]
    assert "after step 5 " in said[0]
    assert "all ranks were equal after step 4" in said[0]
    good = latest_checkpoint(run)
    assert good is not None
    assert good.name == "step-00000004", "what differs is never saved"
    assert read_status(run)["status"] == "running", "the same command may go on"
    train_run(config, *spread, f"run.dir={run}", world=world)
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)
    assert read_status(run)["status"] == "done"


def test_between_two_checks_a_fault_is_found_at_a_save(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__checkpoint_every=100)
    said = run_ranks(flipped, 2, str(config), [], 1, "b_noise", 2, 100)
    assert "all ranks were equal after step 0" in said[0]


def test_a_command_that_failed_before_training_allows_config_changes(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    first = open_run(load_config(path, ["model.tokenizer=/nowhere"]))
    base = first / "base"
    base.mkdir()
    open_run(load_config(path, ["model.tokenizer=/nowhere", "stages.0.lr=0.5"]))
    assert base.is_dir(), "it does not hang on the rate"
    mended = load_config(path)
    refuse_changes(mended)
    open_run(mended)
    assert not base.is_dir(), "it was built for another tokenizer"
    assert load_config(first / "config.yaml") == mended
    (first / "start.json").write_text("{}")
    with pytest.raises(UserError, match="with which the run in"):
        open_run(load_config(path, ["train.seed=3"]))


def test_a_status_counts_starts_and_seconds_and_stays_fatal(tmp_path: Path) -> None:
    write_status(tmp_path, "preempted", step=4, seconds=100.0, restarts=1, checkpoint="step-00000004")
    status = RunStatus(tmp_path, main=True)
    found = read_status(tmp_path)
    assert found["step"] == 4, "a resumed run that fails in its start has not lost its steps"
    assert (found["status"], found["restarts"], found["checkpoint"]) == ("running", 2, "step-00000004")
    assert found["seconds"] >= 100.0
    status.at(6, 10, "heads")
    status.at(8, 10, "heads", "step-00000008", eta_s=4.04)
    found = read_status(tmp_path)
    assert (found["step"], found["total_steps"], found["checkpoint"]) == (8, 10, "step-00000008")
    assert found["eta_s"] == 4.0
    end_status(tmp_path, "fatal", "rank 1: it broke")
    end_status(tmp_path, "running", "rank 0 lost rank 1")
    assert {"status": "fatal", "reason": "rank 1: it broke", "step": 8}.items() <= read_status(tmp_path).items()


ENDS = [  # the error, its cause, whether another try may go on
    (UserError("stages.0.lr", -1, "more"), "input", False),
    (OSError(errno.ENOSPC, "No space left on device", "/full/x"), "a disk that takes no more", False),
    (OSError(errno.ESTALE, "Stale file handle", "/nfs/run"), "a file system that is away", True),
    (DiskError("run.dir", "no room", "room", away=True), "a file system that is away", True),
    (CollectiveError("all-reduce in the world group failed"), "a lost rank", True),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "a device", True),
    (torch.OutOfMemoryError("CUDA out of memory"), "memory", False),
    (RanksDiffer("x is not equal"), "ranks that differ", True),
    (ZeroDivisionError("division by zero"), "the program", False),
    (CallbackError("the callback Notify.on_step raised ReadTimeout: Read timed out."), "the program", False),
]


@pytest.mark.parametrize(("error", "name", "passing"), ENDS, ids=[f"{n}-{type(e).__name__}" for e, n, _ in ENDS])
def test_only_reproducible_failures_are_fatal(tmp_path, monkeypatch, error, name, passing) -> None:
    monkeypatch.setattr(train, "main_rank_first", lambda action: action())
    config = load_config(write_config(tmp_path))
    folder = tmp_path / "run"
    runtime = Runtime(0, 1, torch.device("cpu"), 60.0)
    with pytest.raises(Exception) as met, open_session(config, runtime):
        raise error
    assert (cause_of(met.value).name, cause_of(met.value).passing) == (name, passing)
    status = read_status(folder)
    assert status["status"] == ("running" if passing else "fatal")
    reason = str(status["reason"])
    assert reason.startswith(f"{name}: {type(met.value).__name__}: ")
    assert "\n" not in reason
    assert len(reason) < 500
    if isinstance(error, OSError) and "disk" in name:
        assert isinstance(met.value, DiskError), "one line, not a traceback"


CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_ctrl_c_prints_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise Stopped("SIGINT")

    monkeypatch.setattr(api, "train", stopped)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(typer.Exit) as ended:
        runs.train(CONFIG, ["run.dir=my runs/a", "train.eval_every=7"])
    assert ended.value.exit_code == 75
    assert capsys.readouterr().err == "to go on: cqwen train 'my runs/a'\n"
