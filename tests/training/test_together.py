"""Several runs in one job equal the same runs alone, to the bit, and each may fail, stop or be done by itself."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, cqwen_forked, losses, train_run, weights, write_config

from cqwen_dist import train
from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.one_job import refuse_apart
from cqwen_dist.run.status import read_status
from cqwen_dist.training import together as module
from cqwen_dist.training.train import train_on

OTHERS = {  # what each run changes
    "usual": [],
    "seed": ["train.seed=1"],
    "rate": ["stages.0.lr=3e-3", "loss.reg_weight=2"],
    "target": ["loss.target_transform=signed_log", "model.number_head=laplace"],
}
OWN = {f"model.features.embedding.{name}" for name in ("w_num", "num_row")}
LAYOUTS = {
    "one rank": (1, []),
    "ZeRO-1": (2, ["parallel.zero_stage=1"]),
    "ZeRO-2": (2, ["parallel.zero_stage=2", "parallel.vocab_group_size=2"]),
    "ZeRO-3": (2, ["parallel.zero_stage=3", "deepspeed.zero_optimization.stage3_param_persistence_threshold=100"]),
}


def together(path: str, folders: list[str], options: list[str], judge: Any = None) -> list[dict[str, Any]]:
    configs = [load_config(path, [f"run.dir={f}", *OTHERS[Path(f).name], *options]) for f in folders]
    return module.together_on(configs, as_rank(), judge)


def alone(path: str, folders: list[str], options: list[str]) -> None:
    for folder in folders:
        train_on(load_config(path, [f"run.dir={folder}", *OTHERS[Path(folder).name], *options]), as_rank())


def stopping_at(step: int, path: str, folders: list[str], options: list[str]) -> str:
    """A signal before a run's step; also how the second run ends."""

    def judge(runs: Any) -> None:
        if all(trainer.place.step >= step for trainer in runs.values()):
            next(iter(runs.values())).run.runtime.stop._job.ask("SIGTERM")

    try:
        together(path, folders, options, judge)
    except module.Stopped as stopped:
        return str(stopped)
    raise AssertionError("not stopped")


def killed_at(step: int, path: str, folders: list[str], options: list[str]) -> None:
    """SIGKILL before a step, where the last run was stopped by itself a step earlier."""

    def judge(runs: Any) -> None:
        if len(folders) - 1 in runs and runs[len(folders) - 1].place.step == step - 1:
            runs[len(folders) - 1].callbacks.ask("enough")
        if all(trainer.place.step >= step for trainer in runs.values()):
            os.kill(os.getpid(), signal.SIGKILL)

    together(path, folders, options, judge)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs that share a base on the disk."""
    folder = tmp_path_factory.mktemp("together")
    one = [{"name": "heads", "train": ["heads"], "steps": 1}]
    train_run(write_config(folder, stages=one))
    shutil.copytree(folder / "run" / "base", folder / "base")
    named = {"name_or_path": str(folder / "base"), "lora": {"r": 2, "alpha": 4, "dropout": 0.1}}
    return write_config(folder, model=named, train__checkpoint_every=2, train__eval_every=2)


@pytest.mark.parametrize(
    "layout", ["one rank", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LAYOUTS][1:])]
)
def test_runs_in_one_job_equal_runs_alone_also_after_a_kill(config: Path, layout: str, tmp_path: Path) -> None:
    """Heads and LoRA stages, with dropout; stopped in the middle, where one of them has one step less, then killed."""
    world, options = LAYOUTS[layout]
    folders = [str(tmp_path / name) for name in OTHERS]
    assert "SIGTERM" in run_ranks(stopping_at, world, 3, str(config), folders, options)[0]
    for folder in folders:
        status = read_status(Path(folder))
        assert (status["status"], status["step"]) == ("preempted", 3)
    with pytest.raises(AssertionError, match=r"a rank died|lost"):
        run_ranks(killed_at, world, 5, str(config), folders, options)
    ends = [read_status(Path(folder)) for folder in folders]
    assert [(status["status"], status.get("reason")) for status in ends] == [("running", None)] * 3 + [
        ("paused", "enough")
    ]
    run_ranks(together, world, str(config), folders, options)
    run_ranks(alone, world, str(config), [str(tmp_path / "alone" / name) for name in OTHERS], options)
    found = [weights(tmp_path / name) for name in OTHERS]
    for name, own in zip(OTHERS, found, strict=True):
        assert own == weights(tmp_path / "alone" / name), name
        assert losses(tmp_path / name) == losses(tmp_path / "alone" / name), name
    assert len({repr(own) for own in found}) == len(OTHERS)
    served_with_one_base([tmp_path / "usual", tmp_path / "rate"])


def served_with_one_base(runs: list[Path]) -> None:
    """As `cqwen serve --adapter` loads them: the frozen weights once, all else a run's own."""
    bases: dict[Any, Any] = {}
    models = [load_trained(run, bases=bases)[0] for run in runs]
    places = [{name: p.data_ptr() for name, p in model.named_parameters()} for model in models]
    common = {name for name, place in places[0].items() if places[1][name] == place}
    assert common == {name for name in places[0] if "features" in name and "lora" not in name} - OWN
    ids = torch.arange(12).view(2, 6)
    for run, model in zip(runs, models, strict=True):
        assert torch.equal(model(ids).logits, load_trained(run)[0](ids).logits)
    assert not torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_heads_share_the_features(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """z of a text, of training or held-out, is computed once for all runs, and the base is measured once: the adapters
    of a later stage, each run's own, add nothing before it."""
    passes = tmp_path / "passes"
    later = "{name: lora, train: [lora], steps: 1, lr: 1e-2}"
    options = [f"stages=[{{name: heads, train: [heads], steps: 6, lr: 1e-2}}, {later}]", "run.stop_after=heads"]
    counts = {}
    for name, folders in {"one": ["usual"], "all": [*OTHERS]}.items():
        passes.unlink(missing_ok=True)
        given = [str(tmp_path / name / folder) for folder in folders]
        run_ranks(counted, 1, str(passes), str(config), given, options)
        counts[name] = json.loads(passes.read_text())
    assert counts["all"] == counts["one"] > 0
    run_ranks(alone, 1, str(config), [str(tmp_path / "alone" / name) for name in ("seed", "rate")], options)
    for name in ("seed", "rate"):
        assert weights(tmp_path / "all" / name) == weights(tmp_path / "alone" / name)
    assert not list(tmp_path.glob("all/*/feature_cache")), "no run reads it any more"


def counted(passes: str, path: str, folders: list[str], options: list[str]) -> None:
    """`together`, with the number of the base's forward passes in the file `passes`."""
    from cqwen_dist.model.modules import CausalModules

    seen, real = [], CausalModules.kept_features
    CausalModules.kept_features = lambda *given: seen.append(1) or real(*given)  # type: ignore[method-assign,func-returns-value]
    together(path, folders, options)
    Path(passes).write_text(str(len(seen)))


def one_with_bad_rates(path: str, folders: list[str], options: list[str]) -> None:
    def judge(runs: Any) -> None:
        if 1 in runs and runs[1].place.step == 4:
            with torch.no_grad():
                runs[1].run.model.action.b_noise.fill_(math.nan)

    together(path, folders, options, judge)


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_others(config: Path, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("usual", "rate", "target")]
    run_ranks(one_with_bad_rates, 1, str(config), folders, [])
    ended = [read_status(Path(folder)) for folder in folders]
    assert [status["status"] for status in ended] == ["done", "fatal", "done"]
    assert "a loss that is not finite" in str(ended[1]["reason"])
    # The done ones are skipped, and the other goes on from its checkpoint; here by their folders
    before = [weights(Path(folders[i])) for i in (0, 2)]
    done = cqwen_forked("train", *folders, "train.keep_checkpoints=9")
    assert (done.returncode, done.stdout.count("already ended: ")) == (0, 2), done.stderr
    assert [read_status(Path(folder))["status"] for folder in folders] == ["done"] * 3
    assert [weights(Path(folders[i])) for i in (0, 2)] == before
    run_ranks(alone, 1, str(config), [str(tmp_path / "alone" / "rate")], [])
    assert weights(tmp_path / "rate") == weights(tmp_path / "alone" / "rate")


def test_runs_that_cannot_share_are_refused_by_key(config: Path) -> None:
    first = load_config(config, ["run.dir=a"])
    refused = {
        "train.precision=bf16": "b: train.precision: found 'bf16', allowed: 'fp32', as in a: the runs of a job share",
        "model.num_token_id=280": "b: model.num_token_id: found 280, allowed: None, as in a",
        "parallel.vocab_group_size=2": "b: parallel.vocab_group_size: found 2, allowed: 1",
        "run.dir=./a": "run.dir: found './a', allowed: a folder of its own",
    }
    for option, said in refused.items():
        with pytest.raises(UserError) as error:
            refuse_apart([first, load_config(config, ["run.dir=b", option])])
        assert said in str(error.value)
    with pytest.raises(UserError, match=r"data.train: found with 2 runs in one job, allowed: one run"):
        train([first, first], train_dataset="x", overrides={})  # type: ignore[call-overload]
