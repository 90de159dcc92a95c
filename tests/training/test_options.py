"""Options of the config that change how a run trains: each alone, a few steps of both stages, in one process.

An option is told from one that nothing reads by the losses: they differ from the run without it, or are known to be
the same (recomputed activations, a gate that comes to the default's).
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
    "model.wide=[4096, 64]",
    "model.number_head=laplace",
    "model.lora.target_modules=[q_proj] + model.lora.dropout=0.5",
    "model.lora.dora=true",
    "data.numeric_targets=last",
    "data.numbers=all",
    "start=seed",
    "loss.gate=soft",
    "loss.class_weights={101: 3.0}",
    "loss.class_weights=frequency",
    "loss.constraint.mode=dual + loss.constraint.eps=1e-5",
    "loss.target_transform=signed_log",
    "stages.0.reg_weight={start: 0.0, end: 2.0}",
    "stages.0.sequence_length=16",
    "stages.1.global_batch_size=6",
    "stages.0.lr_groups={scales: 0.1}",
    "train.weight_decay=10.0",
    "train.max_grad_norm=0.001",
]
SAME = [
    "model.gradient_checkpointing=true",
    "loss.gate=hard",
    "stages.1.micro_batch_size=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float] | str]:
    """Losses by option, or the traceback of what failed; "" is the run without any."""
    folder = tmp_path_factory.mktemp("options")
    records = [json.loads(line) for line in write_texts(folder / "texts.jsonl", 24).read_text().splitlines()]
    lines = [json.dumps({"text": record["text"] + " on 2024-01-31"}) for record in records]
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


@pytest.mark.parametrize("option", [*CHANGES, *SAME])
def test_each_option_changes_the_losses(trained: dict[str, list[float] | str], option: str) -> None:
    """Or changes none, where it says the same in other words."""
    plain, found = trained[""], trained[option]
    assert not isinstance(found, str), found
    assert len(found) == len(plain) == 4
    assert all(map(math.isfinite, found))
    if option in SAME:
        assert found == pytest.approx(plain, rel=1e-5)
    else:
        assert found != pytest.approx(plain, rel=1e-6), f"{option} changes no loss: does anything read it?"
