"""Operations by hand (torch counts them in training/test_metrics.py); what time and layouts must do, not figures."""

import io
from typing import Any

import pytest
from rich.console import Console

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.reading import given_config
from cqwen_dist.sizes.architecture import Architecture, known_architecture
from cqwen_dist.sizes.flops import peak_tflops
from cqwen_dist.tools.plan.command import remedy, render, run
from cqwen_dist.tools.plan.cost import machine
from cqwen_dist.tools.plan.make import plan
from cqwen_dist.tools.plan.question import Question
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


def test_a_price_adds_money_wherever_time_is_told():
    settings = config()
    for nodes in (1, 2):
        found = plan(settings, **options(settings, nodes), price=2.5)
        hours = [stage.steps * stage.seconds / 3600 for stage in found.stages]
        assert found.to_dict()["cost"] == pytest.approx(2.5 * 8 * nodes * sum(hours))
        console = Console(width=200, file=io.StringIO())
        console.print(render(found))
        shown = console.file.getvalue()
        for part in (*hours, sum(hours)):
            assert f" for {part * 8 * nodes * 2.5:,.2f}" in shown
    assert plan(settings, **options(settings)).to_dict()["cost"] is None
    with pytest.raises(UserError, match=r"--price: found 2\.5, allowed: with --gpus-per-node 1 or more"):
        plan(settings, **options(settings, gpus=0), price=2.5)


@pytest.mark.parametrize(("arguments", "key"), [(("h1", "ib400"), "--gpu"), (("h100", "x"), "--interconnect")])
def test_an_unknown_machine_or_link_is_refused(arguments, key):
    with pytest.raises(UserError, match=f"^{key}"):
        machine(*arguments)


def test_a_run_that_does_not_fit_gets_the_first_changes_that_make_it_fit():
    settings = config("Qwen/Qwen2.5-72B", parallel={"zero_stage": 1, "vocab_group_size": 1})
    assert not plan(settings, **options(settings)).fits
    changes, planned = remedy(settings, **options(settings))  # type: ignore[misc]
    assert planned.fits
    assert planned == plan(given_config(settings, changes), **options(settings))
    assert changes["parallel.zero_stage"] == 3, "2 x 72 GB of weights need it"
    for key in changes:
        fewer = {name: value for name, value in changes.items() if name != key}
        assert not plan(given_config(settings, fewer), **options(settings)).fits, f"{key} is needed"
    assert remedy(settings, **options(settings, gib=8.0)) is None

    def shown(gib: float) -> tuple[dict[str, Any], str]:
        question = Question(gpus_per_node=8, gpu_memory_gib=gib)
        document, tables = run([config(parallel={"zero_stage": 1})], question)
        console = Console(width=300, file=io.StringIO())
        console.print(tables)
        return document, console.file.getvalue()  # type: ignore[attr-defined]

    assert "remedy" not in shown(80.0)[0]
    document, said = shown(30.0)
    assert f"with {' '.join(document['remedy']['overrides'])} it fits: " in said
    document, said = shown(2.0)
    assert document["remedy"] is None
    assert "nothing that was tried makes it fit: more ranks" in said


@pytest.mark.parametrize(
    ("name", "tflops"), [("NVIDIA L4", 121), ("NVIDIA RTX A4000", None), ("NVIDIA H100 PCIe", 756)]
)
def test_a_gpus_peak_is_found_by_its_full_name(name: str, tflops: float | None) -> None:
    assert peak_tflops(name) == tflops
