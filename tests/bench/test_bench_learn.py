"""bench learn: its texts, its measures, its list of runs and its sums; one toy run of everything (slow)."""

import json
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from support.runs import write_texts
from support.tiny import tiny_base

from cqwen_dist.bench import learn, learn_data, learn_plan
from cqwen_dist.bench.learn_data import Item, read_items, tables, write_corpora
from cqwen_dist.bench.learn_lanes import Task, run_tasks
from cqwen_dist.bench.learn_measure import Told, binomial_interval, errors, intervals, numbers_to_tell, to_tell
from cqwen_dist.bench.learn_plan import (
    EXPERIMENTS,
    REAL_OURS,
    REAL_PLAIN,
    SCALES,
    Planner,
    RealScale,
    Scale,
    with_seeds,
)
from cqwen_dist.bench.learn_real import real_rows
from cqwen_dist.bench.learn_words import shared_words
from cqwen_dist.config import Config, UserError
from cqwen_dist.data.tokenizer import DigitTokenizer, NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.train.evaluation.conformal import half_width

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
    counts = write_corpora(tmp_path / "out", str(tmp_path / "gsm.jsonl"), texts=20, held_out=8)
    assert counts["words"] == {"train": 20, "test": 8}
    assert counts["code"] == {"train": 20, "test": 8}
    train, test = (read_items(tmp_path / "out" / f"words-{part}.jsonl") for part in ("train", "test"))
    assert not set(train) & set(test)
    item = test[0]
    assert item.text.startswith(item.prompt)
    assert item.prompt.endswith("?\n")
    assert "<<" not in item.text
    code = read_items(tmp_path / "out" / "code-train.jsonl")[0].text
    assert code.startswith("def area_")
    assert "Documented" not in code
    assert "comment" not in code
    (tmp_path / "gsm.jsonl").unlink()
    assert write_corpora(tmp_path / "out", str(tmp_path / "gsm.jsonl"), 20, 8) == counts  # not read again


def test_without_data_the_words_are_docstrings(tmp_path: Path, library: Path) -> None:
    assert write_corpora(tmp_path / "out", None, 20, 8)["words"] == {"train": 20, "test": 8}
    assert all("Documented" in item.text for item in read_items(tmp_path / "out" / "words-train.jsonl"))
    with pytest.raises(UserError, match=r"--data: found 0 texts to train on, 40 held out, allowed: 8 or more of each"):
        write_corpora(tmp_path / "less", None, 20, 50)


def test_rows_end_with_the_number_to_tell() -> None:
    for name, table in tables().items():
        for part, target in ((table.train, table.y_train), (table.test, table.y_test)):
            assert len(part) == len(target), name
            for item, value in zip(part[:20], target, strict=False):
                assert float(item.text[len(item.prompt) :].rstrip(".")) == pytest.approx(value)
        assert 0 < learn_data.ridge_error(table) < np.median(np.abs(table.y_test - np.median(table.y_train)))


def test_only_numbers_behind_the_prompt_are_told() -> None:
    items = [Item("2 and 3 make 5, then 6", "2 and 3 make "), Item("no number", ""), Item("7 is 8", "")]
    tokenizer = NumericalAwareTokenizer(train_tokenizer([item.text for item in items], 300), vocab_size=301)
    (batch,) = to_tell(items, tokenizer)
    told = [batch.numeric_labels[row][batch.numeric_mask[row]].tolist() for row in range(3)]
    assert told == [[5.0, 6.0], [], [8.0]]  # a number that opens a text has nothing before it
    assert numbers_to_tell(items, tokenizer.policy) == [(0, 13, 5.0, False), (0, 21, 6.0, False), (2, 5, 8.0, False)]
    again = numbers_to_tell([Item("Is 4 more? 4 is. 9", "Is 4 more? ")], tokenizer.policy)
    assert again == [(0, 11, 4.0, True), (0, 17, 9.0, False)]


def test_number_figures_by_hand() -> None:
    texts = np.arange(2000) % 50
    truth = np.arange(2000.0)
    scores = np.random.default_rng(0).uniform(0, 2, 2000)  # far inside a Cauchy's own interval
    repeated = truth >= 500
    found = errors(truth, np.where(repeated, truth + 2.0, truth), 0.0, repeated)
    assert (found["numbers"], found["mdae"], found["mae"], found["exact"]) == (2000, 2.0, 1.5, 0.25)
    assert (found["mdae_repeated"], found["mdae_new"], found["median_mdae"]) == (2.0, 0.0, 999.5)
    figures = intervals(Told(texts, truth, truth, scores))
    assert figures["coverage_raw"] == 1.0
    assert figures["coverage_conformal"] == pytest.approx(0.9, abs=0.03)
    assert figures["factor"] * half_width(0.9) == pytest.approx(1.8, abs=0.06)  # 0.9 of the way to 2
    low, high = figures["binomial"]
    assert low < 0.9 < high


@pytest.mark.parametrize("n", [1, 50, 1307])
def test_binomial_interval_is_scipys(n: int) -> None:
    low, high = stats.binom.interval(0.99, n, 0.9)
    assert binomial_interval(n, 0.9) == pytest.approx((low / n, high / n))


@pytest.mark.parametrize("scale", sorted(SCALES))
@pytest.mark.parametrize("tokenizer", [None, "somewhere"])
def test_every_arm_is_a_valid_config_and_rivals_take_equal_steps(scale: str, tokenizer: str | None) -> None:
    medians = {"words": 1.0, "diabetes": 1.0, "cancer": 1.0}
    planner = Planner(Path("out"), SCALES[scale], tokenizer, medians, "a-base")
    for experiment in EXPERIMENTS.values():
        experiment(planner)
    steps: dict[tuple[str, ...], set[int]] = {}
    for name, task in planner.tasks.items():
        assert all(need in planner.tasks for need in task.needs)
        key = tuple(name.split()[:2]) if name.startswith("numbers") else (name.split()[0],)
        if task.kind == "causal":
            config = Config.model_validate(task.options["config"])
            steps.setdefault(key, set()).add(sum(s.steps or 0 for s in config.stages))
        elif task.kind == "plain":
            steps.setdefault(key, set()).add(task.options["steps"])
    assert {key[0] for key in steps} == set(EXPERIMENTS)
    assert all(len(found) == 1 for found in steps.values()), steps


def test_words_are_the_same_for_digits_and_for_numbers() -> None:
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


def test_a_real_base_is_compared_at_each_arms_best_rate(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny base that has no <NUM>, every arm at one rate; then a choice between rates by hand."""
    sizes = RealScale(heads_steps=1, lora_steps=1, batch=2, length=64, held_out=8, pieces=2, told=3)
    toy = replace(SCALES["small"], texts=16, held_out=8, real=sizes)
    monkeypatch.setitem(learn.SCALES, "toy", toy)
    monkeypatch.setattr(learn_plan, "REAL_LORA_LRS", (1e-3,))
    data = write_texts(tmp_path / "texts.jsonl", 40)
    trained = train_tokenizer(data.read_text().splitlines(), 300)
    trained.save_pretrained(tmp_path / "base")
    tiny_base(vocab_size=len(trained), max_position_embeddings=512).save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")

    def here(tasks, kinds, out, lanes, seconds, say):  # a spawned lane would import torch anew
        with distributed() as runtime:
            return {t.name: {**kinds[t.kind](t.options, runtime), "seconds": 1.0} for t in tasks}

    monkeypatch.setattr(learn, "run_tasks", here)
    with pytest.raises(UserError, match="--base: found no value"):
        learn.run(["real"], out=tmp_path / "out", data=str(data), scale="toy")
    summary = learn.run(["real"], out=tmp_path / "out", data=str(data), base=base, scale="toy")
    rows = {row["arm"]: row for row in summary["real"]}
    assert set(rows) == {"base, untrained", *REAL_OURS, *REAL_PLAIN}
    for corpus in ("words", "prose", "code"):
        assert len({row[corpus]["words"] for row in rows.values()}) == 1, "arms are measured on the same words"
        assert all(row[corpus]["perplexity"] > 1 for row in rows.values())
    assert rows["ours"]["numbers"]["crps"] > 0
    assert (rows["ours"]["num_f1"], rows["base, untrained"]["num_f1"]) == (pytest.approx(0.5, abs=0.5), None)
    assert rows["LoRA + softmax, <NUM>"]["numbers"] is None
    console = Console(width=200, record=True)
    for table in learn.render(summary):
        console.print(table)
    assert "least word perplexity" in console.export_text()

    def result(perplexity: float) -> dict:
        kept = {"top1": 0.5, "perplexity": perplexity, "words": 9}
        return {"measured": {"words": kept, "prose": kept, "code": kept}}

    (row,) = real_rows({"real ours 0.001": result(3.0), "real ours 0.0001": result(2.0)})
    assert (row["lr"], row["words"]["perplexity"]) == ("0.0001", 2.0)


def double(options, runtime):
    if options["x"] < 0:
        raise ValueError("below zero")
    return {"twice": 2 * options["x"], "rank": runtime.rank}


def test_lanes_do_every_task_once_and_go_on_after_a_failure(tmp_path: Path) -> None:
    tasks = [
        Task("one", "double", {"x": 1}),
        Task("bad", "double", {"x": -1}),
        Task("after bad", "double", {"x": 2}, ("bad",)),
        Task("after one", "double", {"x": 3}, ("one",)),
    ]
    said: list[str] = []
    results = run_tasks(tasks, {"double": double}, tmp_path, 1, 200.0, said.append)
    assert results["one"]["twice"] == 2
    assert "below zero" in results["bad"]["error"]
    assert "bad failed" in results["after bad"]["error"]
    assert results["after one"]["twice"] == 6
    assert len(said) == 4
    assert run_tasks(tasks, {}, tmp_path, 1, 200.0, said.append) == results  # nothing is left to do
    assert len(said) == 4


def test_the_best_rate_is_chosen_by_words_and_numbers_together() -> None:
    def result(accuracy: float, mdae: float, loss: float) -> dict:
        stage = {"eval/accuracy": accuracy, "eval/cls_loss_mean": loss, "eval/reg_nll": 1.0, "eval/num_f1": 1.0}
        numbers = {"mdae": mdae, "median_mdae": 10.0, "coverage_raw": 1.0}
        start = {"base_accuracy": 0.5, "statistics": {"scale": 1.0}}
        return {"start": start, "unit": "standardise", "stages": [stage, stage], "numbers": numbers}

    rows = learn.start_rows(
        {
            "starts seed 0.001 0.1 0": result(0.4, 5.0, 3.0),
            "starts seed 0.001 0.1 1": result(0.5, 5.0, 3.0),
            "starts seed 0.003 0.1 0": result(0.2, 5.0, 1.0),  # a low loss does not mean a working model
            "starts calibrated 0.001 0.1 0": result(0.5, 2.5, 3.0),
        }
    )
    assert [row["start"] for row in rows] == ["calibrated", "seed"]
    assert (rows[1]["lr"], rows[1]["seeds"], rows[1]["accuracy"]) == ("0.001", 2, pytest.approx(0.45))
    assert rows[1]["score"] == pytest.approx(1.4)
    assert rows[1]["best_by_loss"]["lr"] == "0.003"


@pytest.mark.slow
def test_a_toy_run_of_everything(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(
        SCALES["small"],
        vocab=600,
        hidden=32,
        length=64,
        batch=4,
        pretrain_steps=4,
        pretrain_batch=4,
        heads_steps=2,
        lora_steps=2,
        table_steps=2,
        start_steps=2,
        texts=24,
        held_out=8,
        rates=((1e-3, 1e-2),),
    )
    monkeypatch.setitem(learn.SCALES, "toy", toy)
    data = str(write_texts(tmp_path / "texts.jsonl", 60))
    only = ["preserve (calibrated|LoRA)", "starts (calibrated|seed) ", "numbers .* (standardise|digits)"]
    experiments = [name for name in EXPERIMENTS if name != "real"]
    summary = learn.run(experiments, out=tmp_path / "out", data=data, scale="toy", lanes=2, only=only)
    assert not summary["failed"]
    assert not summary["missing"]
    assert {row["arm"] for row in summary["preserve"]} >= {"calibrated", "calibrated, KL <= 0.5", "LoRA + softmax"}
    assert {row["start"] for row in summary["starts"]} == {"calibrated", "seed"}
    assert {row["corpus"] for row in summary["numbers"]} == {"words", "diabetes", "cancer"}
    console = Console(width=200, record=True)
    for table in learn.render(summary):
        console.print(table)
    assert "Held-out numbers" in console.export_text()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bench learn: found 'sorts', allowed: preserve or starts or numbers or real"):
        learn.run(["sorts"], out=tmp_path)
    with pytest.raises(UserError, match=r"bench learn: found 'huge', allowed: small or full"):
        learn.run(["starts"], out=tmp_path, scale="huge")
    assert isinstance(with_seeds(SCALES["full"], 7), Scale)
    assert with_seeds(SCALES["full"], 7).seeds == 7
