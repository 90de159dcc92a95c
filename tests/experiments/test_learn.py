"""experiments.learn: its texts, its measures, its list of trainings; every arm once on a tiny base."""

import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.ranks import fork_server
from support.runs import write_texts
from support.tiny import tiny_base

from cqwen_dist.config import Config, UserError
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.parallel.runtime import distributed
from experiments.learn import arms, compare
from experiments.learn.answers import Predictions, answer_batches, number_metrics, numbers_after_prompts
from experiments.learn.arms import BASE, OURS, PLAIN, SCALES, Scale, tasks
from experiments.learn.corpora import Item, read_items, write_corpora
from experiments.learn.lanes import Task, run_tasks
from experiments.learn.plain import plain_arm
from experiments.learn.words import shared_words

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


def test_corpora_are_of_two_kinds_and_split_by_content(tmp_path: Path, library: Path) -> None:
    asked = [f"Ann has {n} apples and buys 3 more. How many has she?" for n in range(30)]
    lines = [
        json.dumps({"question": q, "answer": f"{n}+3 = <<{n}+3={n + 3}>>{n + 3}\n#### {n + 3}"})
        for n, q in enumerate(asked)
    ]
    (tmp_path / "gsm.jsonl").write_text("\n".join(lines))
    sizes = {"texts": 20, "held_out": 10, "problems": 8, "pieces": 5}
    counts = write_corpora(tmp_path / "out", str(tmp_path / "gsm.jsonl"), **sizes)
    assert counts == {"train": 20, "words": 8, "prose": 5, "code": 5}
    train, test = (read_items(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "words"))
    assert not set(train) & set(test)
    item = test[0]
    assert item.text.startswith(item.prompt)
    assert item.prompt.endswith("?\n")
    assert "<<" not in item.text
    code = read_items(tmp_path / "out" / "code.jsonl")[0].text
    assert code.startswith("def area_")
    assert "Documented" not in code
    assert "comment" not in code
    (tmp_path / "gsm.jsonl").unlink()
    assert write_corpora(tmp_path / "out", str(tmp_path / "gsm.jsonl"), **sizes) == counts  # not read again


def test_only_numbers_after_the_prompt_are_scored() -> None:
    items = [Item("2 and 3 make 5, then 6", "2 and 3 make "), Item("no number", ""), Item("7 is 8", "")]
    tokenizer = NumericalAwareTokenizer(train_tokenizer([item.text for item in items], 300), vocab_size=301)
    (batch,) = answer_batches(items, tokenizer)
    values = [batch.numeric_labels[row][batch.numeric_mask[row]].tolist() for row in range(3)]
    assert values == [[5.0, 6.0], [], [8.0]]  # a number that opens a text has nothing before it
    assert numbers_after_prompts(items, tokenizer.policy) == [
        (0, 13, 5.0, False),
        (0, 21, 6.0, False),
        (2, 5, 8.0, False),
    ]
    again = numbers_after_prompts([Item("Is 4 more? 4 is. 9", "Is 4 more? ")], tokenizer.policy)
    assert again == [(0, 11, 4.0, True), (0, 17, 9.0, False)]


def test_number_metrics_equal_values_by_hand() -> None:
    truth = np.arange(2000.0)
    repeated = truth >= 500
    predictions = Predictions(
        truth, np.where(repeated, truth + 2.0, truth), np.where(repeated, 0.9, 1.1) * Intervals().half_width(0.9), truth
    )
    found = number_metrics(predictions, 0.0, repeated)
    assert (found["numbers"], found["mdae"], found["mae"], found["exact"]) == (2000, 2.0, 1.5, 0.25)
    assert (found["mdae_repeated"], found["mdae_new"], found["median_mdae"]) == (2.0, 0.0, 999.5)
    assert (found["coverage"], found["crps"]) == (0.75, 999.5)
    assert "crps" not in number_metrics(predictions._replace(crps=np.full(2000, np.nan)), 0.0, repeated)


@pytest.mark.parametrize("scale", sorted(SCALES))
def test_every_arm_is_a_valid_config_with_equal_steps(scale: str) -> None:
    found = tasks(Path("out"), SCALES[scale], "a-base", hidden=576, median=1.0)
    steps = set()
    for task in found:
        if task.kind == "ours":
            steps.add(sum(stage.steps or 0 for stage in Config.model_validate(task.options["config"]).stages))
        elif task.name != BASE:
            steps.add(task.options["stage"]["steps"])
    assert len(steps) == 1, steps
    assert len({task.name for task in found}) == len(found) == 1 + 3 * (len(OURS) + len(PLAIN))


def test_all_arms_are_scored_on_the_same_words() -> None:
    texts = ["Ann pays 12.50 for 3 apples on 2024-05-01, and 7 more.", "no number", "3x4 is twelve"]
    trained = train_tokenizer(texts, 300)
    numbers, digits = NumericalAwareTokenizer(trained, vocab_size=301), DigitTokenizer(trained)
    for text in texts:
        mine, theirs = shared_words(text, numbers, digits)
        ids, spelt = np.array(numbers.encode(text)[0]), np.array(digits.encode(text)[0])
        assert np.array_equal(ids[mine], spelt[theirs])
        assert numbers.num_token_id not in ids[mine]
        words = trained.decode(ids[mine].tolist())
        assert words == re.sub(r"12\.50|(?<= )3(?= )|(?<= )7(?= )|3(?=x)|(?<=x)4", "", text)


def test_each_arm_is_reported_at_its_best_rate(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny base that has no <NUM>, every arm at one rate; then a choice between rates by hand."""
    toy = Scale(16, 8, problems=8, pieces=2, numbers=3, heads_steps=1, lora_steps=1, batch=2, length=64)
    monkeypatch.setitem(SCALES, "toy", toy)
    monkeypatch.setattr(arms, "LORA_LRS", (1e-3,))
    data = write_texts(tmp_path / "texts.jsonl", 40)
    trained = train_tokenizer(data.read_text().splitlines(), 300)
    trained.save_pretrained(tmp_path / "base")
    tiny_base(vocab_size=len(trained), max_position_embeddings=512).save_pretrained(tmp_path / "base")

    def here(tasks, kinds, out, lanes, seconds, say):  # a spawned lane would import torch anew
        with distributed() as runtime:
            return {t.name: {**kinds[t.kind](t.options, runtime), "seconds": 1.0} for t in tasks}

    monkeypatch.setattr(compare, "run_tasks", here)
    summary = compare.run(str(tmp_path / "base"), str(data), out=tmp_path / "out", scale="toy")
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
    console = Console(width=200, record=True)
    console.print(compare.table(summary))
    assert "least word perplexity" in console.export_text()

    def result(perplexity: float) -> dict:
        return {"words": {"words": {"top1": 0.5, "perplexity": perplexity, "words": 9}}}

    (row,) = compare.rows({"ours 0.001": result(3.0), "ours 0.0001": result(2.0)})
    assert (row["lr"], row["words"]["words"]["perplexity"]) == ("0.0001", 2.0)


def test_an_ordinary_arm_learns_with_products_in_bf16(tmp_path: Path) -> None:
    """Autocast may keep a weight in bf16 until its context ends: all steps then see the weights of the first."""
    data = write_texts(tmp_path / "texts.jsonl", 40)
    trained = train_tokenizer(data.read_text().splitlines(), 300)
    trained.save_pretrained(tmp_path / "base")
    tiny_base(vocab_size=len(trained), max_position_embeddings=512).save_pretrained(tmp_path / "base")
    toy = Scale(16, 8, problems=8, pieces=2, numbers=3, heads_steps=4, lora_steps=8, batch=8, length=64)
    (task, *_) = (
        task
        for task in tasks(tmp_path, toy, str(tmp_path / "base"), 24, 1.0, bf16=True)
        if task.kind == "plain" and not task.options["digits"]
    )
    task.options["data"]["train"], task.options["stage"]["lr"], task.options["held_out"] = str(data), 0.05, {}
    with distributed() as runtime:
        losses = plain_arm(task.options, runtime)["losses"]
    assert losses[-1] < losses[0] - 0.2, losses


def double(options, runtime):
    if options["x"] < 0:
        raise ValueError("below zero")
    return {"twice": 2 * options["x"], "rank": runtime.rank}


def test_lanes_run_every_task_once_also_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_context", lambda _: fork_server())  # a spawned lane imports for 7 s
    tasks = [
        Task("one", "double", {"x": 1}),
        Task("bad", "double", {"x": -1}),
        Task("two", "double", {"x": 3}),
    ]
    said: list[str] = []
    results = run_tasks(tasks, {"double": double}, tmp_path, 1, 200.0, said.append)
    assert results["one"]["twice"] == 2
    assert "below zero" in results["bad"]["error"]
    assert results["two"]["twice"] == 6
    assert len(said) == 3
    assert run_tasks(tasks, {}, tmp_path, 1, 200.0, said.append) == results  # nothing is left to do
    assert len(said) == 3


def test_wrong_arguments_are_refused_by_name(library: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--scale: found 'huge', allowed: small or full"):
        compare.run("base", "data", out=tmp_path, scale="huge")
    with pytest.raises(UserError, match=r"--data: found no file"):
        compare.run("base", str(tmp_path / "nothing.jsonl"), out=tmp_path)
    few = write_texts(tmp_path / "few.jsonl", 3)
    with pytest.raises(UserError, match=r"--data: found 0 texts to train on, 3 held out, allowed: 8 or more of each"):
        compare.run("base", str(few), out=tmp_path)
