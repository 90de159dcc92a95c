"""A run that has begun may grow: longer, by further stages, with other rates for what lies ahead; the past stays."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.runs import cqwen_forked, losses, metrics, set_back, train_run, write_config
from torch import Tensor

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.checkpoint.resume import TrainState, load_checkpoint
from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.folder import is_done, refuse_changes, starts_over


def grown(config: Path, there: Path, *stages: dict[str, object]) -> Path:
    """The config with further stages."""
    tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    tree["stages"] += stages
    path = there / "grown.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_a_finished_run_continues_with_more_steps(one_rank: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = set_back(one_rank, run, 6)
    longer = [f"run.dir={run}", "stages.1.steps=5"]
    assert is_done(load_config(config, longer[:1]))
    assert not is_done(load_config(config, longer)), "cqwen launch does not call it done"
    done = cqwen_forked("train", config, *longer)
    assert done.returncode == 0, done.stderr
    assert "changed: stages.1.steps: 3 -> 5" in done.stdout
    assert [record["step"] for record in metrics(run)] == list(range(1, 9))
    assert losses(run)[:6] == losses(one_rank)
    (entry,) = (json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines())
    assert entry["changes"] == [["stages.1.steps", 3, 5]]
    state = json.loads((run / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert state["head_steps"]["action.b_noise"] == 8, "Adam goes on, too"


def test_an_appended_stage_may_add_adapters(tmp_path: Path) -> None:
    heads = {"name": "heads", "train": ["heads"], "steps": 2, "lr": 1e-2}
    config = write_config(tmp_path, stages=[heads])
    train_run(config)
    before = losses(tmp_path / "run")
    lora = {"name": "lora", "train": ["heads", "lora"], "steps": 2, "lr": 1e-2}
    train_run(grown(config, tmp_path, lora), world=2)
    records = metrics(tmp_path / "run")
    assert [record["stage"] for record in records] == ["heads"] * 2 + ["lora"] * 2
    assert losses(tmp_path / "run")[:2] == before
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((folder / "state.json").read_text())["feature_steps"]["lora"] == 2
    train_run(tmp_path / "grown.yaml")  # a checkpoint of it loads


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        (5, ["stages.0.lr=1"], r"stages\.0\.lr: found 1\.0, allowed: 0\.01, as stage heads is over"),
        (5, ["stages.0.steps=9"], r"stages\.0\.steps: found 9, allowed: 3, as stage heads is over"),
        (5, ["stages.1.schedule=linear"], r"stages\.1\.schedule: .*lora has begun: only its steps, .*lr, .* may"),
        (5, ["stages.1.warmup_steps=9"], r"stages\.1\.warmup_steps: .*another run\.dir with model\.warm_start=.*/run"),
        (5, ["stages.1.steps=1"], r"stages\.1\.steps: found 1, allowed: 2 or more, which stage lora has taken"),
        (3, ["loss.reg_weight=7"], r"loss\.reg_weight: .*model\.warm_start=.*/run takes its weights along"),
    ],
)
def test_settings_of_past_stages_may_not_change(one_rank, tmp_path, step, changes, said) -> None:
    config = set_back(one_rank, tmp_path / "run", step)
    with pytest.raises(UserError, match=said):
        refuse_changes(load_config(config, [f"run.dir={tmp_path / 'run'}", *changes]))


def test_the_rates_of_a_running_stage_may_change_and_are_recorded(one_rank: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = set_back(one_rank, run, 5)
    train_run(config, f"run.dir={run}", "stages.1.lr=1e-5", "stages.1.lr_groups.lora=0.5")
    (line,) = (run / "changes.jsonl").read_text().splitlines()
    assert [(key, now) for key, _, now in json.loads(line)["changes"]] == [
        ("stages.1.lr", 1e-5),
        ("stages.1.lr_groups.lora", 0.5),
    ]
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))


def test_a_run_folder_resumes_with_the_overrides_of_its_last_command(one_rank: Path, tmp_path: Path) -> None:
    run = tmp_path / "moved run"
    config = set_back(one_rank, tmp_path / "run", 5)
    train_run(config, f"run.dir={tmp_path / 'run'}", "train.eval_every=6", "run.accept=[data]", "run.stop_after=heads")
    (tmp_path / "run").rename(run)
    again = load_config(run)
    assert (again.run.dir, again.train.eval_every) == (str(run), 6)
    assert (again.run.accept, again.run.stop_after, again.run.resume) == ([], None, "auto")
    refuse_changes(again)
    train_run(run)
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))


def test_starting_over_archives_old_run_once(one_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    config = set_back(one_rank, run, 3)
    again = [f"run.dir={run}", "run.resume=restart", "loss.reg_weight=0.5"]
    train_run(config, *again)
    (archive,) = run.glob("archived-*")
    assert (archive / "checkpoints" / "step-00000003").is_dir()
    assert (archive / "metrics.jsonl").is_file()
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))
    assert starts_over(load_config(config, again))
    with monkeypatch.context() as under:
        under.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert not starts_over(load_config(config, again)), "nor ranks that torchrun starts again"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train_run(config, *again)
    assert len(list(run.glob("archived-*"))) == 1, "a requeued job resumes"


B1, B2 = 0.9, 0.999
ENDS = 6  # evaluations after 2, 4 and 6 steps; the base's accuracy does not change
STAGES = [
    {"name": "heads", "train": ["heads", "embedding"], "lr": 1e-2, "schedule": "constant",
     "until": {"max_steps": 40, "patience": 2, "metric": "eval/base_accuracy"}},
    {"name": "both", "train": ["heads", "embedding", "lora"], "steps": 4, "lr": 1e-2,
     "sequence_length": 24, "global_batch_size": 8, "micro_batch_size": 4,
     "reg_weight": {"start": 0.1, "end": 1.0}},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks over such a boundary, with a checkpoint at each step."""
    folder = tmp_path_factory.mktemp("boundary")
    often = {"train__checkpoint_every": 1, "train__keep_checkpoints": 30, "train__eval_every": 2}
    config = write_config(folder, stages=STAGES, train__max_grad_norm="usual", **often)
    train_run(config, world=2)
    return folder / "run"


def state_at(run: Path, step: int) -> TrainState:
    return load_checkpoint(checkpoint_folder(run, step), (0, 2**62))


def everything(state: TrainState) -> dict[str, Tensor]:
    moments = {**state.feature_moments, **state.head_moments, **state.row_moments}
    return {**state.features, **state.heads, **state.rows, **moments}


def test_the_stage_ends_when_evaluation_stops_improving(run: Path) -> None:
    records = metrics(run)
    assert [record["stage"] for record in records] == ["heads"] * ENDS + ["both"] * 4
    assert [record["step"] for record in records if "eval/accuracy" in record] == [2, 4, 6, 8, 10]
    assert [record["train/reg_weight"] for record in records[ENDS:]] == pytest.approx([0.1, 0.4, 0.7, 1.0])
    saved = state_at(run, ENDS).state
    assert saved["stage"] == "heads"
    assert saved["schedule"]["stops"] == [ENDS, ENDS + 4]
    assert state_at(run, ENDS - 1).state["schedule"]["stops"] == [40, 44]


@pytest.mark.parametrize("step", [3, ENDS])
def test_resumes_before_at_and_after_a_stage_boundary(run: Path, tmp_path: Path, step: int) -> None:
    """Before the decision and at the boundary: to the bit what the run without a stop is."""
    copy = tmp_path / "run"
    train_run(set_back(run, copy, step), f"run.dir={copy}", world=2)
    assert losses(copy) == losses(run)
    norms = [state_at(folder, ENDS + 4).state["norms"] for folder in (copy, run)]
    assert norms[0] == norms[1], "by which the next step would be clipped"
    mine, theirs = everything(state_at(copy, ENDS + 4)), everything(state_at(run, ENDS + 4))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not mine[name].equal(theirs[name])] == []


def test_moments_of_groups_that_keep_training_are_kept(run: Path) -> None:
    """One Adam step over the boundary: both moments give one and the same gradient only if both were carried."""
    before, after = state_at(run, ENDS), state_at(run, ENDS + 1)
    assert (before.state["loader"]["stage"], after.state["loader"]["stage"]) == (0, 1), "an epoch of its own"
    old, new = everything(before), everything(after)
    carried = [name.removesuffix(".exp_avg") for name in old if name.endswith(".exp_avg") and ".lora_" not in name]
    assert len(carried) > 8
    for name in carried:
        gradient = (new[f"{name}.exp_avg"] - B1 * old[f"{name}.exp_avg"]) / (1 - B1)
        squared = (new[f"{name}.exp_avg_sq"] - B2 * old[f"{name}.exp_avg_sq"]) / (1 - B2)
        scale = float(squared.abs().max().clamp(min=1e-12))
        assert float((gradient.square() - squared).abs().max()) < 2e-3 * scale, name
        assert old[f"{name}.exp_avg"].any(), f"{name} had no moment to carry"
    assert before.state["feature_steps"] == {"embedding": ENDS, "lora": 0}
    assert after.state["feature_steps"] == {"embedding": ENDS + 1, "lora": 1}
    assert set(after.state["head_steps"].values()) == {ENDS + 1}


def test_a_stages_micro_batch_size_may_change_on_resume_its_batch_size_not(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    train_run(run.parent / "config.yaml", f"run.dir={copy}", "stages.1.micro_batch_size=2")
    done = cqwen_forked("train", run.parent / "config.yaml", f"run.dir={copy}", "stages.1.global_batch_size=16")
    assert done.returncode == 2
    assert "stages.1.global_batch_size" in done.stderr
