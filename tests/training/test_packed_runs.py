"""Runs on packed texts without a mask, and on texts split over ranks: the losses of the run with a mask on one rank."""

from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import losses, metrics, set_back, train_and_say, train_run, write_config

from cqwen_dist.checkpoint.manifest import checkpoint_folder
from cqwen_dist.config import UserError, load_config
from cqwen_dist.model import varlen
from cqwen_dist.sizes.architecture import known_architecture
from cqwen_dist.tools.export.export import export

VARLEN = "model.attention=varlen"
SPLIT = (VARLEN, "parallel.sequence_group_size=2")
OF_FOUR = (VARLEN, "parallel.sequence_group_size=4", "parallel.vocab_group_size=2")
FAR = "parallel.zero_stage=3", "parallel.vocab_group_size=2", "model.gradient_checkpointing=true"


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank on packed texts with a mask."""
    folder = tmp_path_factory.mktemp("packed")
    shape = {"model__architecture__num_attention_heads": 4, "data__pack": True}
    train_run(write_config(folder, train__checkpoint_every=1, train__keep_checkpoints=9, **shape))
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


def test_a_varlen_run_resumes_to_the_bit_and_exports_a_standard_attention(masked: Path, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    config, own = masked.parent / "config.yaml", "model.attention=varlen"
    said = run_ranks(train_and_say, 1, str(config), [own, f"run.dir={run}"])[0]
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


def same(run: Path, other: Path) -> None:
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    names = ["train/grad_norm", "eval/cls_loss_mean", "eval/reg_mdae", "eval/base_accuracy", "eval/coverage_90_cal"]
    for name in (name for name in names if name in metrics(other)[-1]):
        assert metrics(run)[-1][name] == pytest.approx(metrics(other)[-1][name], rel=1e-4), name


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (4, (*OF_FOUR, "model.gradient_checkpointing=true")),
        pytest.param(2, (*SPLIT, "parallel.zero_stage=2"), marks=pytest.mark.slow),
        pytest.param(4, (*SPLIT, "parallel.vocab_group_size=4"), marks=pytest.mark.slow),
    ],
)
def test_runs_on_split_texts_have_the_losses_and_evaluations_of_one_rank(
    masked: Path, tmp_path: Path, world: int, options: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    train_run(masked.parent / "config.yaml", *options, f"run.dir={run}", world=world)
    same(run, masked)


def test_a_run_resumes_with_a_sequence_group_under_zero_3(masked: Path, tmp_path: Path) -> None:
    config = set_back(masked, tmp_path / "run", 2)
    train_run(config, *SPLIT, *FAR[:2], f"run.dir={tmp_path / 'run'}", world=2)
    same(tmp_path / "run", masked)


@pytest.mark.slow
def test_a_run_with_a_sequence_group_resumes_on_one_rank(masked: Path, tmp_path: Path) -> None:
    options = (*OF_FOUR, "train.checkpoint_every=1", "train.keep_checkpoints=9")
    train_run(masked.parent / "config.yaml", *options, f"run.dir={tmp_path / 'split'}", world=4)
    set_back(tmp_path / "split", tmp_path / "run", 4)
    train_run(masked.parent / "config.yaml", f"run.dir={tmp_path / 'run'}")
    same(tmp_path / "run", masked)


@pytest.mark.slow
def test_a_feature_cache_is_refused_for_split_texts(tmp_path: Path) -> None:
    config = write_config(tmp_path, stages__0__train=["heads"])
    said = (
        r"UserError: .*train\.feature_cache\.mode: found 'require', allowed: auto: stages\.0: z of a text is on several"
    )
    with pytest.raises(AssertionError, match=said):
        train_run(config, *SPLIT, "train.feature_cache.mode=require", world=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["model.attention=mask"],
            r"model\.attention: found 'mask', allowed: varlen under parallel\.sequence_group_si",
        ),
        (["model.compile_layers=true"], r"model\.compile_layers: found True, allowed: false under parallel\.sequence"),
        (["model.wide=64"], r"model\.wide: found 64, allowed: its default under parallel\.sequence_group_size above 1"),
        (["model.copies=2"], r"model\.copies: found 2, allowed: its default under parallel\.sequence_group_size"),
        (["parallel.sequence_group_size=0"], r"parallel\.sequence_group_size: found 0, allowed: greater than 0"),
        (["parallel.sequence_group_size=3"], r"sequence_group_size: found 3, allowed: a divisor of the base's 2 att"),
        (
            ["model.architecture.num_attention_heads=12", "model.architecture.num_key_value_heads=3", OF_FOUR[1]],
            r"found 4, allowed: a divisor or a multiple of the base's 3 key-value",
        ),
    ],
)
def test_what_a_part_of_a_text_cannot_do_is_refused_by_key(tmp_path: Path, options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(write_config(tmp_path), [*SPLIT, *options])


def test_bases_without_plain_attention_and_too_few_ranks_are_refused(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), SPLIT)
    mixed = {"num_attention_heads": 4, "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(UserError, match=r"group_size: found 2, allowed: 1: the base has layers of linear_attention"):
        config.parallel.fit_heads(mixed)
    config.parallel.fit_heads(known_architecture("Qwen/Qwen2.5-0.5B") or {})
    with pytest.raises(UserError, match=r"sequence_group_size: found 2, allowed: a divisor of the 3 ranks: 1, 3"):
        config.parallel.refuse_ranks(3)
