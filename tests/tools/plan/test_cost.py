"""Operations by hand (torch counts them in train/test_perf.py); what time and layouts must do, not their figures."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cqwen_dist.config import Config, UserError
from cqwen_dist.sizes.architecture import Architecture, known_architecture
from cqwen_dist.sizes.flops import peak_tflops
from cqwen_dist.tools.plan import command
from cqwen_dist.tools.plan.cost import stage_cost
from cqwen_dist.tools.plan.machine import MACHINES, machine
from cqwen_dist.tools.plan.make import plan
from cqwen_dist.tools.plan.question import Question
from cqwen_dist.tools.plan.search import layouts, search, with_layout
from cqwen_dist.tools.plan.show import render
from cqwen_dist.tools.plan.stage_sizes import Sizes, flops, stage_sizes, work_of

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


def test_attention_cost_of_packed_texts_depends_on_their_lengths():
    """Texts of 100, 300 and 624 tokens in rows of 1,024: their squares over their sum. A mask makes all of [T, T]."""
    texts, own = (100, 300, 624), {"precision": "bf16", "micro_batch_size": 32}
    text = sum(n * n for n in texts) / sum(texts)
    base = Architecture.of(known_architecture("Qwen/Qwen2.5-0.5B") or {})
    data = {"train": "x", "sequence_length": 1024, "pack": True}

    def each(attention: str) -> Sizes:
        model = {"name_or_path": "Qwen/Qwen2.5-0.5B", "attention": attention}
        settings = config(model=model, data=data, train=own, stages=[ALL])
        return stage_sizes(settings, base, world=1, kind="cuda", text=text)[0]

    mask, within = each("mask"), each("varlen")
    scores = 24 * 2 * 14 * 64  # twice A D in each of 24 layers: half of [n, n], for q k and for p v
    assert flops(mask).useful == flops(within).useful
    forward = sum(n * scores * n for n in texts) / sum(texts)
    work = work_of(within)
    assert flops(within).backbone_forward == pytest.approx(2 * (work.matrices + work.adapters) + forward)
    assert flops(within).between_texts == 0
    assert flops(mask).between_texts == pytest.approx(2 * scores * 1024 - forward)
    seconds = [stage_cost(s, MACHINES["h100"], 1).seconds for s in (within, mask)]
    assert seconds[0] < seconds[1]
    assert not any(layout.gradient_checkpointing for layout in layouts(compiled(), 8, 8))


def compiled() -> Config:
    """Compiled layers, whose attention has no mask: recomputing them is refused, so no layout has it."""
    return config(model={"name_or_path": "Qwen/Qwen2.5-7B", "attention": "varlen", "compile_layers": True})


def test_hours_follow_the_schedule():
    settings = config(stages=[{**ALL, "steps": None, "epochs": 2.0}])
    unknown = plan(settings, **options(settings))
    assert (unknown.stages[0].steps, unknown.hours, unknown.gpu_hours) == (None, None, None)
    known = plan(settings, **options(settings), sequences=6400)
    assert known.stages[0].steps == 200
    assert known.hours is not None
    assert known.gpu_hours == pytest.approx(8 * known.hours)
    out = io.StringIO()
    Console(file=out, width=80).print(render(known))
    assert re.search(r"│ steps +│ +200 │", out.getvalue())
    assert f"{60 * known.hours:.0f} minutes, 0.3 GPU-hours" in out.getvalue()


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
    rates = [choice.plan.slowest.tokens_per_s for choice in found]
    assert rates[0] >= 0.98 * max(rates)
    best = with_layout(settings, found[0].layout)
    changed = {
        key for key in ("model", "data", "loss", "stages", "train") if getattr(best, key) != getattr(settings, key)
    }
    assert changed <= {"model", "train"}
    assert best.train.global_batch_size == settings.train.global_batch_size
    assert not search(settings, **options(settings, gib=8.0))


def test_the_search_tries_every_layout_that_is_allowed():
    tried = list(layouts(config(), 8, 8))
    assert {layout.micro_batch_size for layout in tried} == {1, 2, 4, 8}
    assert {layout.vocab_group_size for layout in tried} == {1, 2, 4, 8}
    assert {layout.zero_stage for layout in tried} == {1, 2, 3}
    assert len(tried) == len(set(tried)) == 4 * 4 * 3 * (2 + 3)


def test_the_search_keeps_a_sequence_group():
    """Groups of 4 among 8 ranks take two texts at a time, so a rank's share of 64 texts is 32."""
    model = {"name_or_path": "Qwen/Qwen2.5-7B", "attention": "varlen"}
    split = config(model=model, parallel={"sequence_group_size": 4})
    assert {layout.micro_batch_size for layout in layouts(split, 8, 8)} == {1, 2, 4, 8, 16, 32}
    found = search(split, **options(split))
    assert all(with_layout(split, choice.layout).parallel.sequence_group_size == 4 for choice in found)


def test_among_equally_fast_micro_batches_the_smallest_is_chosen():
    settings = config("Qwen/Qwen2.5-0.5B")
    found = search(settings, **options(settings, gpus=1))
    best = found[0]
    for micro in (1, 2, 4, 8, 16, 32, 64):
        other = plan(with_layout(settings, replace(best.layout, micro_batch_size=micro)), **options(settings, gpus=1))
        if other.fits and other.slowest.tokens_per_s >= best.plan.slowest.tokens_per_s:
            assert other.device_gib >= best.plan.device_gib
    assert [choice.layout.plainness for choice in found] == list(dict.fromkeys(c.layout.plainness for c in found))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
    ],
)
def test_a_gpus_peak_is_found_by_its_full_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops


def asked(settings: Config, **how: Any) -> tuple[dict[str, Any], str]:
    """`cqwen plan`'s document and what it shows, 100 columns wide."""
    found, shown = command.run(settings, Question(**how))
    out = io.StringIO()
    Console(file=out, width=100).print(shown)
    return found, out.getvalue()


def test_the_search_uses_the_ranks_that_are_there() -> None:
    settings = config(parallel={"vocab_group_size": 8})
    with pytest.raises(UserError, match=r"parallel\.vocab_group_size: found 8"):
        asked(settings)
    found, said = asked(settings, search=True)
    assert "the config cannot run here (parallel.vocab_group_size: found 8" in said
    assert sum(line.startswith("│") for line in said.split("Layouts that fit")[1].splitlines()) == len(found["choices"])
    assert "parallel.vocab_group_size=1" in found["choices"][0]["overrides"]
    assert "parallel.vocab_group_size=1" in said
    with pytest.raises(UserError, match="--search: found no layout that fits"):
        asked(settings, search=True, gpu_memory_gib=4.0)
    with pytest.raises(UserError, match="--nodes: found 0"):
        asked(settings, search=True, nodes=0)
