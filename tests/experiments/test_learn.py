"""experiments.learn: its texts, its measures, its list of trainings; every arm once on a tiny base."""

import sysconfig
from pathlib import Path

import pytest
from support.runs import write_texts
from support.tiny import tiny_base

from cqwen_dist.config import Config
from cqwen_dist.data.tokenizer import train_tokenizer
from cqwen_dist.parallel.runtime import distributed
from experiments.learn import arms, compare
from experiments.learn.arms import BASE, OURS, PLAIN, SCALES, Scale, tasks
from experiments.learn.plain import plain_arm

CODE = '''
def area(width, height):
    """Documented at some length, so that it is taken: the area of a rectangle, 2 by 3,
    of the given width and of the given height.
    """
    # a comment
    total = width * height
    for name in ("rectangle", "square", "parallelogram", "another one", "and a last one"):
        print(name, total, 42)
    return total
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of some functions, in place of the real one (whose reading takes seconds)."""
    root = tmp_path / "lib"
    (root / "test").mkdir(parents=True)
    functions = [CODE.replace("area", f"area_{n}").replace("42", str(n)) for n in range(40)]
    (root / "shapes.py").write_text("\n".join(functions))
    (root / "test" / "skipped.py").write_text(CODE)
    (root / "broken.py").write_text("def (")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, Path]:
    """(a tiny base that has no <NUM>, its texts)"""
    data, folder = write_texts(tmp_path / "texts.jsonl", 40), tmp_path / "base"
    trained = train_tokenizer(data.read_text().splitlines(), 300)
    trained.save_pretrained(folder)
    tiny_base(vocab_size=len(trained), max_position_embeddings=512).save_pretrained(folder)
    return folder, data


@pytest.mark.parametrize("scale", sorted(SCALES))
def test_every_arm_is_a_valid_config_whose_adapters_take_equal_steps(scale: str) -> None:
    found = tasks(Path("out"), SCALES[scale], "a-base", hidden=576, median=1.0)
    steps = set()
    for task in found:
        if task.kind == "ours":
            stages = Config.model_validate(task.options["config"]).stages
            steps.add(sum(stage.steps or 0 for stage in stages if "lora" in stage.groups))
        elif task.name != BASE:
            steps.add(task.options["stage"]["steps"])
    assert len(steps) == 1, steps
    assert len({task.name for task in found}) == len(found) == 1 + 3 * (len(OURS) + len(PLAIN))


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_arm_is_reported_at_best_rate(tmp_path: Path, base: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm at one rate."""
    toy = Scale(16, 8, problems=8, pieces=2, numbers=3, heads_steps=1, lora_steps=1, batch=2, length=64)
    monkeypatch.setitem(SCALES, "toy", toy)
    monkeypatch.setattr(arms, "LORA_LRS", (1e-3,))

    def here(tasks, kinds, out, lanes, seconds, say):  # a spawned lane would import torch anew
        with distributed() as runtime:
            return {t.name: {**kinds[t.kind](t.options, runtime), "seconds": 1.0} for t in tasks}

    monkeypatch.setattr(compare, "run_tasks", here)
    summary = compare.run(*map(str, base), out=tmp_path / "out", scale="toy")
    rows = {row["arm"]: row for row in summary["arms"]}
    assert set(rows) == {BASE, *OURS, *PLAIN}
    for corpus in ("words", "prose", "code"):
        assert len({row["words"][corpus]["words"] for row in rows.values()}) == 1, "the same words for every arm"
        assert all(row["words"][corpus]["perplexity"] > 1 for row in rows.values())
    assert rows["ours"]["numbers"]["crps"] > 0
    assert len(rows["ours"]["evaluations"]) == 3
    assert rows["ours"]["words"]["words"]["num_f1"] == pytest.approx(0.5, abs=0.5)
    assert "num_f1" not in rows[BASE]["words"]["words"]
    assert "numbers" not in rows["LoRA + softmax, <NUM>"]


def test_an_ordinary_arm_learns_with_products_in_bf16(tmp_path: Path, base: tuple[Path, Path]) -> None:
    """Autocast may keep a weight in bf16 until its context ends: all steps then see the weights of the first."""
    toy = Scale(16, 8, problems=8, pieces=2, numbers=3, heads_steps=4, lora_steps=8, batch=8, length=64)
    (task, *_) = (
        task
        for task in tasks(tmp_path, toy, str(base[0]), 24, 1.0, bf16=True)
        if task.kind == "plain" and not task.options["digits"]
    )
    task.options["data"]["train"], task.options["stage"]["lr"], task.options["held_out"] = str(base[1]), 0.05, {}
    with distributed() as runtime:
        losses = plain_arm(task.options, runtime)["losses"]
    assert losses[-1] < losses[0] - 0.2, losses
