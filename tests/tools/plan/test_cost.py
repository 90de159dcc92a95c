"""Operations by hand (torch counts them in train/test_perf.py); what time and layouts must do, not their figures."""

import json
from typing import Any

import pytest

from cqwen_dist.config import Config, UserError
from cqwen_dist.sizes.architecture import Architecture, known_architecture
from cqwen_dist.sizes.flops import peak_tflops
from cqwen_dist.tools.plan.command import search, with_layout
from cqwen_dist.tools.plan.cost import machine, stage_cost
from cqwen_dist.tools.plan.make import plan
from cqwen_dist.tools.plan.stage_sizes import Sizes, flops, stage_sizes

ALL = {"name": "all", "train": ["heads", "embedding", "lora"], "steps": 100}
HEADS = {"name": "heads", "train": ["heads"], "steps": 100}


def config(name: str = "Qwen/Qwen2.5-7B", **sections: Any) -> Config:
    sections = {
        "train": {"precision": "bf16", "global_batch_size": 64, "micro_batch_size": 4},
        "stages": [HEADS, ALL],
        **sections,
    }
    return Config.model_validate(
        {"model": {"name_or_path": name}, "data": {"train": "unused", "sequence_length": 1024}, **sections}
    )


def sizes(settings: Config, world: int = 1, architecture: dict[str, Any] | None = None) -> list[Sizes]:
    found = architecture or known_architecture(str(settings.model.name_or_path))
    assert found is not None
    return stage_sizes(settings, Architecture.of(found), world=world, kind="cuda")


def options(settings: Config, nodes: int = 1, gpus: int = 8, gib: float = 80.0) -> dict[str, Any]:
    found = known_architecture(str(settings.model.name_or_path))
    return {"nodes": nodes, "gpus_per_node": gpus, "gpu_memory_gib": gib, "architecture": found}


def test_operations_of_the_heads_by_hand():
    for s in sizes(config()):
        each = flops(s)
        assert each.word_head == 14 * 3584 * 152_064  # six products, and one for the normaliser of the softmax term
        assert each.abduction == 2 * 2 * 3592 * 3584 * (3 if s.graph else 2)


def test_recomputed_operations_do_not_count_as_useful():
    plain, saved = (
        flops(sizes(config(model={"name_or_path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": again}))[1])
        for again in (False, True)
    )
    assert saved.useful == plain.useful
    assert saved.recomputed - plain.recomputed == plain.backbone_forward
    assert plain.recomputed == 28 * 3584 * 1024, "the scores once more, in attention's backward"
    assert flops(sizes(config())[0]).recomputed == 0


def test_hours_follow_the_schedule():
    settings = config(stages=[{**ALL, "steps": None, "epochs": 2.0}])
    unknown = plan(settings, **options(settings))
    assert (unknown.stages[0].steps, unknown.hours, unknown.gpu_hours) == (None, None, None)
    known = plan(settings, **options(settings), sequences=6400)
    assert known.stages[0].steps == 200
    assert known.hours is not None
    assert known.gpu_hours == pytest.approx(8 * known.hours)


def test_calibration_scales_each_part(tmp_path):
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"calibration": {"machine": "h100", "factors": {"heads": 2.0}}}))
    s = sizes(config())[1]
    stated = stage_cost(s, machine("h100", "ib400"), 8).time
    measured = stage_cost(s, machine("h100", "ib400", file), 8).time
    assert measured["heads"] == pytest.approx(2 * stated["heads"])
    assert measured["backbone_forward"] == stated["backbone_forward"]
    file.write_text("{}")
    for arguments, key in (
        (("h100", "ib400", file), "--calibrate"),
        (("h1", "ib400"), "--gpu"),
        (("h100", "x"), "--int"),
    ):
        with pytest.raises(UserError, match=f"^{key}"):
            machine(*arguments)


def test_the_search_finds_layouts_that_fit_and_keeps_other_settings():
    settings = config("Qwen/Qwen2.5-72B", parallel={"zero_stage": 1, "vocab_group_size": 1})
    assert not plan(settings, **options(settings)).fits
    found = search(settings, **options(settings))
    assert found
    assert all(choice.plan.fits and choice.layout.zero_stage == 3 for choice in found)
    rates = [choice.plan.tokens_per_s for choice in found]
    assert rates[0] >= 0.98 * max(rates)
    best = with_layout(settings, found[0].layout)
    changed = {
        key for key in ("model", "data", "loss", "stages", "train") if getattr(best, key) != getattr(settings, key)
    }
    assert changed <= {"model", "train"}
    assert best.train.global_batch_size == settings.train.global_batch_size
    assert not search(settings, **options(settings, gib=8.0))


@pytest.mark.parametrize(
    ("name", "tflops"), [("NVIDIA L4", 121), ("NVIDIA RTX A4000", None), ("NVIDIA H100 PCIe", 756)]
)
def test_a_gpus_peak_is_found_by_its_full_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops
