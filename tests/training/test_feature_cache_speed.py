"""What the feature cache saves: whole steps of real runs side by side, beside what counted operations predict.

`pytest tests/training/test_feature_cache_speed.py -m slow -s` prints the figures; nothing is asserted of the clock but
that the cached step is the shorter one where it has less than half to do.
"""

import os
import statistics
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.runs import as_rank, write_config, write_texts
from torch.utils.flop_counter import FlopCounterMode

from cqwen_dist.config import load_config

SHAPES = {
    "wide head (V 8,192, 2 layers)": (8192, 2),
    "between (V 2,048, 6 layers)": (2048, 6),
    "deep backbone (V 512, 12 layers)": (512, 12),
}
STEPS = 14  # of which the first, and one in ten, look at the accuracy: a median does not mind


def step_times(path: str) -> dict[str, float]:
    """Medians over paired steps of a run with and one without a cache, and their operations."""
    from cqwen_dist.run.folder import open_run
    from cqwen_dist.training.assembly import build_run, groups_of
    from cqwen_dist.training.start import begin

    trainers = {}
    for mode in ("never", "require"):
        config = load_config(path, [f"train.feature_cache.mode={mode}", f"run.dir={os.path.dirname(path)}/{mode}"])
        open_run(config)
        dist.barrier()
        trainer = build_run(config, as_rank(), groups_of(config, as_rank()))
        begin(trainer)
        plan = trainer.schedule.plans[0]
        trainer.enter_stage(plan, fresh=True)
        batches = trainer.loaders.enter(plan)
        trainer.cache.enter(plan, 0, trainer.loaders.current)
        trainers[mode] = (trainer, plan, batches)
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    operations: dict[str, int] = {}
    for step in range(STEPS):
        for mode, (trainer, plan, batches) in trainers.items():
            trainer.engine.set_lr(plan, step)
            trainer.cache.fill()
            began = time.perf_counter()
            cached = trainer.cache.next()  # before the loader moves on
            assert (cached is None) == (mode == "never")
            if step == 1:
                with FlopCounterMode(display=False) as counter:
                    trainer.stepper(next(batches), plan, step, cached)
                operations[mode] = counter.get_total_flops()
                continue
            trainer.stepper(next(batches), plan, step, cached)
            if step > 3:
                seconds[mode].append(time.perf_counter() - began)
    pairs = [a / b for a, b in zip(seconds["never"], seconds["require"], strict=True)]
    return {
        "uncached_s": statistics.median(seconds["never"]),
        "cached_s": statistics.median(seconds["require"]),
        "ratio": statistics.median(pairs),
        "predicted": operations["never"] / operations["require"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_steps_are_faster_as_operations_predict(tmp_path: Path, shape: str) -> None:
    vocab, layers = SHAPES[shape]
    write_texts(tmp_path / "texts.jsonl", 64)
    config = write_config(
        tmp_path,
        model__architecture__vocab_size=vocab,
        model__architecture__hidden_size=256,
        model__architecture__intermediate_size=768,
        model__architecture__num_hidden_layers=layers,
        model__architecture__num_attention_heads=4,
        data__eval_fraction=0.0,
        data__sequence_length=64,
        data__pack=True,
        stages=[{"name": "heads", "train": ["heads"], "steps": 40}],
        train__global_batch_size=8,
        train__micro_batch_size=8,
        loss__constraint={"mode": "off"},
    )
    (found,) = run_ranks(step_times, 1, str(config))
    print(f"\n{shape}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    assert found["predicted"] > 1.0
    if found["predicted"] > 2.0:
        assert found["ratio"] > 1.0
