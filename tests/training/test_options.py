"""Options of the config that change how a run trains: each alone, a few steps of both stages, in one process.

An option is told from one that nothing reads by the losses: they differ from the run without it, or are known to be
the same (recomputed activations, another implementation of the loss, a gate that comes to the default's).
"""

import json
import math
import traceback
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.runs import as_rank, losses, write_config, write_texts

from cqwen_dist.config import load_config

CHANGES = [
    "model.causal_size=12",
    "model.number_dims=0",
    "model.wide=4096",
    "model.wide=4096 + model.random_features=64",
    "model.value_periods=[10,100]",
    "model.scale_activation=exp",
    "model.w_num_scale=0.0",
    "model.b_noise_init=0.001",
    "model.num_row_init=mean",
    "model.num_row_init=small",
    "model.num_bias_init=-1.0",
    "model.lora.target_modules=[q_proj] + model.lora.dropout=0.5",
    "model.lora.rslora=true",
    "model.lora.dora=true",
    "data.pack=true",
    "data.numeric_targets=last",
    "data.numbers.signs=false",
    "data.labels_field=labels",
    "start=seed",
    "start=seed-100",
    "loss.gate=soft",
    "loss.gate_grad=full",
    "loss.class_weights={101: 3.0}",
    "loss.class_weights=frequency",
    "loss.constraint.mode=hinge + loss.constraint.eps=1e-5",
    "loss.constraint.mode=dual + loss.constraint.eps=1e-4",
    "loss.constraint.mode=dual + loss.constraint.eps=1e-4 + loss.constraint.unit=scale",
    "loss.constraint.mode=dual + loss.constraint.eps=1e-4 + loss.constraint.unit=0.5",
    "loss.target_transform=signed_log",
    "loss.cls_denominator=attention",
    "loss.vocab_reduction=mean",
    "loss.negatives=used",
    "stages.0.reg_weight=0.1",
    "stages.0.reg_weight={start: 0.0, end: 2.0}",
    "stages.0.sequence_length=16",
    "stages.1.global_batch_size=6",
    "stages.0.lr_groups={scales: 0.1}",
    "stages.0.min_lr_ratio=1.0",
    "stages.0.warmup_steps=1",
    "train.thresholds=scalar",
    "train.thresholds=fixed",
    "train.train_class_bias=true",
    "train.weight_decay=10.0",
    "train.max_grad_norm=0.001",
    "train.precision=bf16",
]
SAME = [
    "model.gradient_checkpointing=true",
    "model.gradient_checkpointing=true + parallel.offload=activations",
    "loss.impl=reference",
    "loss.gate=hard + loss.alpha=0.3",
    "loss.constraint.mode=off",
    "stages.1.micro_batch_size=3",
    "train.feature_cache.mode=never",
    "train.micro_batch_size=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float] | str]:
    """Losses by option, or the traceback of what failed; "" is the run without any."""
    folder = tmp_path_factory.mktemp("options")
    records = [json.loads(line) for line in write_texts(folder / "texts.jsonl").read_text().splitlines()]
    known = [{"labels": {" and": False, " costs": bool(i % 2)}} if i % 3 else {} for i in range(len(records))]
    lines = [json.dumps(record | labels) for record, labels in zip(records, known, strict=True)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    config = write_config(
        folder,
        model__architecture__vocab_size=361,  # more rows than the texts give words
        data__eval_fraction=0.0,
        stages__0__steps=2,
        stages__1__steps=2,
        train__checkpoint_every=100,
    )
    return run_ranks(_train_all, 1, config)[0]


def _train_all(config: Path) -> dict[str, list[float] | str]:
    from cqwen_dist.training.train import train_on

    found: dict[str, list[float] | str] = {}
    for number, options in enumerate(["", *CHANGES, *SAME]):
        run = config.parent / f"run{number}"
        try:
            train_on(load_config(config, [f"run.dir={run}", *filter(None, options.split(" + "))]), as_rank())
            found[options] = losses(run)
        except Exception:
            found[options] = traceback.format_exc()
    return found


@pytest.mark.parametrize("option", CHANGES)
def test_each_option_changes_the_losses(trained: dict[str, list[float] | str], option: str) -> None:
    plain, found = trained[""], trained[option]
    assert not isinstance(found, str), found
    assert len(found) == len(plain) == 4
    assert all(map(math.isfinite, found))
    assert found != pytest.approx(plain, rel=1e-6), f"{option} changes no loss: does anything read it?"


@pytest.mark.parametrize("option", SAME)
def test_each_equivalent_option_gives_the_same_losses(trained: dict[str, list[float] | str], option: str) -> None:
    found = trained[option]
    assert not isinstance(found, str), found
    assert found == pytest.approx(trained[""], rel=1e-5)
