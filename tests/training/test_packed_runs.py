"""Runs on packed texts without a mask: the losses of the run with one, on one rank and two; gone on with to the bit."""

from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import as_rank, losses, metrics, set_back, train_run, write_config

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.config import load_config
from cqwen_dist.model import varlen
from cqwen_dist.tools.export.export import export
from cqwen_dist.training.telemetry.progress import Progress
from cqwen_dist.training.train import train_on

FAR = "parallel.zero_stage=3", "parallel.vocab_group_size=2", "model.gradient_checkpointing=true"


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank on packed texts with a mask."""
    folder = tmp_path_factory.mktemp("packed")
    train_run(write_config(folder, data__pack=True, train__checkpoint_every=1, train__keep_checkpoints=9))
    return folder / "run"


@pytest.mark.parametrize(("world", "options"), [(1, ()), (2, ("parallel.zero_stage=2",)), (2, FAR)])
def test_varlen_runs_have_the_masks_losses_and_evaluations(
    masked: Path, tmp_path: Path, world: int, options: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    train_run(masked.parent / "config.yaml", "model.attention=varlen", *options, f"run.dir={run}", world=world)
    assert losses(run) == pytest.approx(losses(masked), rel=1e-5)
    for name in ("eval/cls_loss_mean", "eval/reg_mdae", "eval/base_accuracy"):
        assert metrics(run)[-1][name] == pytest.approx(metrics(masked)[-1][name], rel=1e-5)


def _train_and_say(config: str, overrides: list[str]) -> list[str]:
    """As `train_run`, on this rank; the lines of its console."""
    said: list[str] = []
    Progress.say = lambda self, text: said.append(text)  # type: ignore[method-assign]
    train_on(load_config(config, overrides), as_rank())
    return said


def test_a_varlen_run_resumes_to_the_bit_and_exports_a_standard_attention(masked: Path, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    config, own = masked.parent / "config.yaml", "model.attention=varlen"
    said = run_ranks(_train_and_say, 1, str(config), [own, f"run.dir={run}"])[0]
    assert any(
        line.startswith("note: model.attention: varlen with qwen2 is experimental: slower than") for line in said
    )
    set_back(run, copy, 3)
    train_run(config, own, f"run.dir={copy}")
    assert losses(copy) == losses(run)
    name = "heads.safetensors"
    assert len({(checkpoint_folder(folder, 6) / name).read_bytes() for folder in (run, copy)}) == 1
    out = export(run, tmp_path / "out", merge=True)
    assert not [file for file in out.rglob("*.json") if varlen.WITHIN_TEXTS in file.read_text()]
