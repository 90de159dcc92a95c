"""Sections of DeepSpeed's keys, drawn at random: each trains with effect, or is refused before training.

As a script it tells how each of many ends:  PYTHONPATH=.:tests python tests/training/test_deepspeed_sections.py 50 SEED
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.deepspeed_keys import drawn_section, keys
from support.runs import losses, train_run, write_config

from cqwen_dist.config import UserError, load_config
from cqwen_dist.config.deepspeed_section import PASSED, _nested
from cqwen_dist.config.yaml_text import leaves

Layout = tuple[int, int, str, str]  # ranks, ZeRO stage, offload, precision


def trained(folder: Path, layout: Layout, section: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """What DeepSpeed was told, and the losses, of a run of 2 + 2 steps. Raises `UserError` if the config is refused."""
    world, stage, offload, precision = layout
    folder.mkdir()
    path = write_config(
        folder,
        deepspeed=_nested(section),
        parallel={"zero_stage": stage, "offload": offload},
        train__precision=precision,
        stages__0__steps=2,
        stages__1__steps=2,
        train__checkpoint_every=4,
    )
    told = dict(leaves(load_config(path).deepspeed))
    train_run(path, world=world)
    environment = json.loads((folder / "run" / "environment.json").read_text())
    seen = dict(leaves(environment["deepspeed_config"]))
    if (even := "zero_optimization.allgather_bucket_size") in told:
        told[even] += told[even] % 2  # DeepSpeed asserts an even one
    assert told.items() <= seen.items(), (told, seen)
    return told, losses(folder / "run")


def end_of_section(folder: Path, layout: Layout, section: dict[str, Any], plain: dict[Layout, list[float]]) -> str:
    """How a drawn section ends: refused with a sentence, or trained to the losses of the layout without a section."""
    try:
        _, found = trained(folder, layout, section)
    except UserError as error:
        return f"refused: {error}"
    if layout not in plain:
        plain[layout] = trained(folder.with_name(f"{folder.name}-plain"), layout, {})[1]
    other = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16.enabled"} & set(section)
    near = 0.02 if layout[3] == "bf16" or section.get("communication_data_type") == "bf16" else 1e-4
    assert other or found == pytest.approx(plain[layout], rel=near), (section, found, plain[layout])
    return "trained"


def drawn(count: int, seed: int) -> list[tuple[Layout, dict[str, Any]]]:
    draw, all_keys = random.Random(seed), keys()
    found = []
    for _ in range(count):
        stage, offload = draw.choice([1, 2, 3, 3]), draw.choice(["none", "none", "optimizer"])
        layout = draw.choice([1, 2]), stage, offload, draw.choice(["fp32", "bf16"])
        acting = {
            str(stage),
            "all",
            "flops",
            *(["own"] if stage == 3 else ["own", "offload"] if offload != "none" else []),
        }
        here = [key for key, (_, where, _) in PASSED.items() if acting & {*where.split()}]
        found.append((layout, drawn_section(draw, all_keys, here if draw.random() < 0.9 else list(PASSED))))
    return found


def test_stage_1_with_deepspeeds_buckets_or_hooks_takes_the_same_steps(tmp_path: Path) -> None:
    plain: dict[Layout, list[float]] = {}
    for key, value in (("overlap_comm", True), ("reduce_bucket_size", 51), ("allgather_bucket_size", 51)):
        section = {f"zero_optimization.{key}": value}
        assert end_of_section(tmp_path / key, (2, 1, "none", "fp32"), section, plain) == "trained"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_drawn_section_trains_with_effect_or_is_refused(tmp_path: Path) -> None:
    plain: dict[Layout, list[float]] = {}
    ends = [end_of_section(tmp_path / str(i), *case, plain) for i, case in enumerate(drawn(12, 1))]
    assert any(end == "trained" for end in ends)


if __name__ == "__main__":
    plain: dict[Layout, list[float]] = {}
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    tally = {"trained": 0, "refused": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as place:
        for i, case in enumerate(drawn(count, seed)):
            try:
                end = end_of_section(Path(place, str(i)), *case, plain)
            except Exception as error:
                end = "failed: " + str(error)[-1500:]
            tally[end.partition(":")[0]] += 1
            print(i, *case, end, flush=True)
    print(tally)
