"""z computed once: the losses of the run that computes it anew, by any ranks, and why there is none where there is."""

import errno
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.numerics import assert_close
from support.ranks import run_ranks
from support.runs import as_rank, losses, metrics, set_back, train_run, write_config
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config import load_config
from cqwen_dist.parallel.collectives import Stopped
from cqwen_dist.run.files import file_record
from cqwen_dist.training import start, train
from cqwen_dist.training.features.cache import FeatureCache
from cqwen_dist.training.features.shards import FeatureShards
from cqwen_dist.training.zero.engine import Engine

WIDTH = 16  # of z
TEXTS = 32  # of training
CLOSE = 1e-5  # fp32, up to 16 steps: a cached z was multiplied in another batch's shape, and Adam carries that on
EPOCHS_OF_HEADS = [
    {"name": "heads", "train": ["heads"], "steps": 8, "lr": 1e-2},  # 32 texts, 12 a step: 3 steps an epoch
    {"name": "lora", "train": ["heads", "embedding", "lora"], "steps": 2, "lr": 1e-2},
    {"name": "again", "train": ["classifier", "thresholds"], "steps": 6, "lr": 1e-2},  # LoRA has moved and is fixed
]

SHORT = "stages.0.steps=4"  # one more step than an epoch has: z is kept


def config_in(folder: Path, stages: list[dict[str, object]] = EPOCHS_OF_HEADS, every: int = 100) -> Path:
    """every: steps from one checkpoint and evaluation to the next."""
    at = {"train__checkpoint_every": every, "train__keep_checkpoints": 30, "train__eval_every": every}
    return write_config(folder, stages=stages, model__wide=[1024, 16, 2], **at)


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a cache; its folder."""
    folder = tmp_path_factory.mktemp("uncached")
    train_run(config_in(folder, every=2), "train.feature_cache.mode=never")
    return folder / "run"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, uncached: Path) -> Path:
    """The same on two ranks with a cache that is kept; the folder that holds both."""
    folder = tmp_path_factory.mktemp("kept")
    options = f"train.feature_cache.dir={folder}/cache", *same_data(uncached)
    train_run(config_in(folder, every=2), *options, world=2)
    return folder


def same_data(run: Path) -> list[str]:
    return [f"data.train={run.parent}/texts.jsonl"]


def caches(folder: Path) -> list[Path]:
    return sorted({path.parent.parent for path in folder.glob("*/*/manifest.json")})


def key_of(cache: Path) -> dict[str, object]:
    (key,) = {path.read_text().partition('"files"')[0] for path in cache.glob("*/manifest.json")}
    return json.loads(key.rstrip().rstrip(",") + "}")["key"]


def opened(cache: Path, dtype: torch.dtype = torch.float32) -> FeatureShards:
    parts = list(cache.glob("*/manifest.json"))
    shards = FeatureShards(cache.parent, key_of(cache), WIDTH, dtype, 2 * TEXTS)  # long texts may be cut
    for part in parts:
        shards.add(part.parent)
    return shards


def test_losses_and_evaluations_equal_the_uncached_ones(uncached: Path, kept: Path) -> None:
    assert losses(kept / "run") == pytest.approx(losses(uncached), rel=CLOSE)
    assert len(caches(kept / "cache")) == 2, "one of the untrained features, one of those that LoRA has moved"
    assert losses(uncached)[7] < 0.9 * losses(uncached)[0]
    for run in (kept / "run", uncached):
        assert metrics(run)[0]["train/kl"] < 1e-6, "KL's reference has what the start fits beside z"

    # Evaluations too: at the start, whose fits read the cache, and while the heads train
    ours, without = ([r for r in metrics(run) if "eval/perplexity" in r] for run in (kept / "run", uncached))
    assert [record["step"] for record in ours] == [2, 4, 6, 8, 10, 12, 14, 16]
    for one, other in zip(ours, without, strict=True):
        for name in ("eval/perplexity", "eval/crps", "eval/reg_mdae", "dist/U_scale_median"):
            assert one[name] == pytest.approx(other[name], rel=1e-3), f"{name} at step {one['step']}"
    start, other = (json.loads((run / "start.json").read_text()) for run in (kept / "run", uncached))
    for name in ("loss", "gamma", "reg_mdae"):
        assert start["calibration"][name] == pytest.approx(other["calibration"][name], rel=1e-3)


def _passes(config: str, overrides: list[str]) -> tuple[int, int]:
    """How many batches go through the backbone in a run: all, and those for which a graph is kept."""
    counted, forward = [0, 0], Engine.forward

    def count(engine: Engine, batch: Batch, keep: Tensor) -> Tensor:
        counted[0] += 1
        counted[1] += torch.is_grad_enabled()
        return forward(engine, batch, keep)

    Engine.forward = count  # type: ignore[method-assign]  # of this process alone
    train.train_on(load_config(config, overrides), as_rank())
    return counted[0], counted[1]


def test_a_heads_stage_passes_once_over_training_and_evaluation_texts(uncached: Path, tmp_path: Path) -> None:
    config = str(config_in(tmp_path, [EPOCHS_OF_HEADS[0]], every=2))
    passes = {
        mode: run_ranks(
            _passes, 1, config, [f"run.dir={tmp_path}/{mode}", f"train.feature_cache.mode={mode}", *same_data(uncached)]
        )[0]
        for mode in ("never", "auto")
    }
    # The fits of the start pass over all texts without a cache too. 8 steps of 2 batches, 4 evaluations of 2, and once
    # the sample that C, gamma and KL's spread come from: here all 32 texts, 6 a batch.
    assert passes["auto"][0] == passes["never"][0] - 8 * 2 - 4 * 2 - 6
    assert (passes["auto"][1], passes["never"][1]) == (0, 8 * 2), "only a step keeps a graph"


def test_ranks_read_each_others_shards(uncached: Path, kept: Path, tmp_path: Path) -> None:
    """A run of one rank on the cache of two; it makes none."""
    before = {path: path.stat().st_mtime_ns for path in (kept / "cache").rglob("*")}
    config = config_in(tmp_path, EPOCHS_OF_HEADS[:2])  # what LoRA makes of it differs in last bits: another key
    train_run(config, f"train.feature_cache.dir={kept}/cache", *same_data(uncached))
    assert losses(tmp_path / "run")[:7] == pytest.approx(losses(uncached)[:7], rel=CLOSE)
    assert {path: path.stat().st_mtime_ns for path in (kept / "cache").rglob("*")} == before


def test_a_cached_stage_resumes_on_other_ranks(uncached: Path, kept: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    set_back(kept / "run", copy, 2)
    own = ["train.feature_cache.dir=null", "train.micro_batch_size=3"]
    train_run(kept / "config.yaml", f"run.dir={copy}", *own, *same_data(uncached))
    assert losses(copy) == pytest.approx(losses(uncached), rel=CLOSE)
    assert not (copy / "feature_cache").exists(), "the run's own cache goes when its stage does"


@pytest.mark.slow
def test_a_damaged_cache_file_is_computed_again(uncached: Path, kept: Path, tmp_path: Path) -> None:
    """Of what no stage has trained: LoRA's last bits are another key on two ranks, and that cache is not looked for."""
    shutil.copytree(kept / "cache", tmp_path / "cache")
    untrained = min(
        caches(tmp_path / "cache"), key=lambda made: min(part.stat().st_mtime_ns for part in made.iterdir())
    )
    damaged = sorted(untrained.glob("*/z-*.arrow"))[0]
    block = bytearray(damaged.read_bytes())
    block[103] ^= 0x40  # an exponent
    damaged.write_bytes(block)
    spread = ["parallel.zero_stage=2", "parallel.vocab_group_size=2"]
    train_run(config_in(tmp_path), f"train.feature_cache.dir={tmp_path}/cache", *same_data(uncached), *spread, world=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(uncached), rel=CLOSE), "with rows shared and ZeRO-2"
    manifest = json.loads((damaged.parent / "manifest.json").read_text())
    assert file_record(damaged) == manifest["files"][damaged.name], "it was not made again"
    z, before = (opened(folder).read([3, 0]) for folder in (untrained, kept / "cache" / untrained.name))
    assert_close(z, before, 1e-5, "z")  # fp32 through two layers, in products of other shapes


def test_the_cache_key_depends_on_data_and_dtype(uncached: Path, kept: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, [EPOCHS_OF_HEADS[0]])
    own = ["data.sequence_length=20", "train.precision=bf16", f"train.feature_cache.dir={tmp_path}/cache"]
    train_run(config, f"run.dir={tmp_path}/run", *own, *same_data(uncached))
    made = caches(tmp_path / "cache")
    assert len(made) == 1
    for known in caches(kept / "cache"):
        same = {name for name, value in key_of(made[0]).items() if value == key_of(known)[name]}
        assert "tokenizer" in same
        assert not {"data", "dtype"} & same
    z = opened(made[0], torch.bfloat16).read([3, 0])
    assert z.dtype == torch.bfloat16, "in the run's own dtype"
    assert bool(z.float().std() > 0.1)


def _full_at_a_manifest(config: str, overrides: list[str], parts: int) -> str:
    """How a rank ends where rank 0's disk is full at the manifest of a part, after so many parts."""
    from cqwen_dist.training.features import cache, shards

    cache.FIRST_PART, start.CALIBRATION_TOKENS, start.LEVEL_TOKENS = 40, 40, 80
    write, written = shards.write_atomically, []

    def refuse(path: Path, text: str) -> None:
        if len(written) == parts:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        write(path, text)

    shards.write_atomically = refuse
    try:
        train.train_on(load_config(config, overrides), as_rank())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.slow
def test_a_disk_that_is_full_at_a_manifest_disables_the_cache_on_all_ranks(uncached: Path, tmp_path: Path) -> None:
    """At the first, in the start, and at the fourth, in the first epoch."""
    config = str(config_in(tmp_path, [EPOCHS_OF_HEADS[0]]))
    for parts in (0, 3):
        own = [f"run.dir={tmp_path}/{parts}", *same_data(uncached), SHORT]
        assert run_ranks(_full_at_a_manifest, 2, config, own, parts, timeout=60) == ["done", "done"]
        assert not (tmp_path / str(parts) / "feature_cache").exists()
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "0"), rel=CLOSE)


def _in_small_parts(config: str, overrides: list[str], stop_in: int, blind: bool = False) -> list[tuple[int, int]]:
    """(parts made, samples stored) before each step of a run, where a part has few samples.

    stop_in: a signal arrives while this rank computes so many parts; 0: never. blind: the run sees no part of others,
    as if they were made at the same time.
    """
    from cqwen_dist.training.features import cache

    cache.FIRST_PART, start.CALIBRATION_TOKENS, start.LEVEL_TOKENS = 40, 40, 80
    runtime, made, seen = as_rank(), [0], []
    add, read = cache.add_part, FeatureCache.next

    def count(*arguments: object) -> None:
        made[0] += 1
        if made[0] == stop_in:
            runtime.stop.ask("SIGUSR1")
        add(*arguments)

    def note(self: FeatureCache) -> list[Tensor] | None:
        seen.append((made[0], int(self._shards.stored().sum())))
        return read(self)

    cache.add_part, FeatureCache.next = count, note  # type: ignore[method-assign]  # of this process alone
    if blind:
        FeatureShards.open = lambda self, runtime: False  # type: ignore[method-assign]
    with suppress(Stopped):
        train.train_on(load_config(config, overrides), runtime)
    return seen


@pytest.mark.slow
def test_the_first_step_waits_for_a_part_and_a_stop_loses_one(uncached: Path, tmp_path: Path) -> None:
    """32 texts, 12 a step, parts of blocks of 2 texts. Resumed in the first epoch, the run is the same to the bit."""
    config = str(config_in(tmp_path, [EPOCHS_OF_HEADS[0]]))
    small = ["train.micro_batch_size=1", "model.start_numbers=0", *same_data(uncached)]  # the start reads few texts

    def run(name: str, stop_in: int = 0) -> list[tuple[int, int]]:
        own = [f"run.dir={tmp_path}/{name}", f"train.feature_cache.dir={tmp_path}/{name}-cache", *small]
        return run_ranks(_in_small_parts, 2, config, own, stop_in)[0]

    whole = run("whole")
    assert len(whole) == 8
    assert 12 <= whole[0][1] < 28, "the first step reads 12 texts, and those of their blocks"
    assert [samples for _, samples in whole[2:]] == [TEXTS] * 6, "all are read in the first epoch"
    (cache,) = caches(tmp_path / "whole-cache")
    assert len(list(cache.iterdir())) == whole[-1][0] > whole[0][0], "further steps compute further parts"

    stopped = run("stopped", stop_in=whole[0][0] + 1)
    assert 0 < len(stopped) < 3, "in the first epoch"
    after = run("stopped")
    assert after[-1][0] == whole[-1][0] - whole[0][0], "only the part that the stop ended is computed again"
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole") == pytest.approx(losses(uncached)[:8], rel=0.5), "another start"


@pytest.mark.slow
def test_parts_that_another_run_makes_meanwhile_are_kept(uncached: Path, tmp_path: Path) -> None:
    """Two runs at once, as the points of a sweep: deleting a part on a network disk would end the one that reads it."""
    config = str(config_in(tmp_path, [EPOCHS_OF_HEADS[0]]))
    own = [f"train.feature_cache.dir={tmp_path}/cache", *same_data(uncached), SHORT]
    for name, blind in (("one", False), ("other", True)):
        made = run_ranks(_in_small_parts, 2, config, [f"run.dir={tmp_path}/{name}", *own], 0, blind)[0][-1][0]
        files = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}
        if not blind:
            before = made, files
    assert (made, files) == before, "it made the same parts and left those that were there"
    assert losses(tmp_path / "one") == losses(tmp_path / "other")
