"""A fact observed, then changed: numbers by the closed form, words by draws; from Python and the command line."""

import csv
import io
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exported import tiny_pair, write_folder
from support.tiny import NUM, number_writing_lm
from support.words import Words

from cqwen_dist import api
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.columns import columns_for
from cqwen_dist.generate import facts
from cqwen_dist.generate.continuation import encoded, padded
from cqwen_dist.generate.facts import NumberFact, WordFact, counterfactual, number_laws
from cqwen_dist.heads.intervals import WORD_TAILS, Intervals
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.prediction.learnt_table import LearntTable
from cqwen_dist.prediction.table import predict_numbers

FACT, OTHER = "w3 w8 99.9 w41", "w60 w2"
FACTORS = {"levels": {"0.5": [0.8, 1.0], "0.9": [0.4, 0.5], "0.95": [0.3, 0.4]}, "edges": [0.0], "n": 200}


def speaker(share: float) -> CausalQwenForCausalLM:
    """A model that writes a number next. share: of the noise in a dimension's scale. Scales differ by dimension."""
    lm = number_writing_lm()
    with torch.no_grad():
        torch.manual_seed(3)
        lm.model.abduction.scale_net.weight.normal_(std=0.2)
        lm.model.action.b_noise.fill_(share * 0.05)
        lm.model.action.threshold[NUM] = -1e4
    return lm


@pytest.fixture(scope="module")
def model() -> CausalQwenForCausalLM:
    return speaker(1.0)


def test_a_number_is_that_of_the_individuals_who_had_the_fact(model: CausalQwenForCausalLM) -> None:
    """200,000 individuals, each weighted by the density of the noise that the fact leaves over."""
    found = counterfactual(model, Words(), FACT, 163.0, OTHER)
    assert isinstance(found, NumberFact)
    net = model.model
    u = [facts.at_end(model, padded(model, Words(), [encoded(Words(), text)])) for text in (FACT, OTHER)]
    (loc, scale), (loc_2, scale_2) = (tuple(part[0].detach().double().numpy() for part in law) for law in u)
    w, b = net.action.reg_weight.detach().double().numpy(), float(net.action.reg_bias.detach())
    noise = np.abs(w) @ net.action.b_noise.detach().double().numpy()
    tau = np.random.default_rng(0).standard_cauchy((200_000, len(w)))
    y = (163.0 - 150.0) / 40.0
    left = y - (loc + scale * tau) @ w - b
    weight = 1 / (noise**2 + left**2)
    y_2 = (loc_2 + scale_2 * tau) @ w + b
    for level, at in (("0.5", 0), ("0.5", 1), ("0.9", 0), ("0.9", 1)):
        end = (found.intervals[level][at] - 150.0) / 40.0
        below = np.average(0.5 + np.arctan((end - y_2) / noise) / math.pi, weights=weight)
        assert below == pytest.approx((1 + (2 * at - 1) * float(level)) / 2, abs=1e-2)
    assert np.ptp(scale_2 / scale) > 0.5, "their scales change differently"
    assert found.effect == found.value - found.observed == found.value - 163.0


@pytest.mark.parametrize("target", ["standardise", "standardise_log", "laplace"])
def test_nothing_changes_where_nothing_is_changed_and_there_is_no_noise(target: str) -> None:
    lm = speaker(0.0)
    lm.config.calibration = FACTORS
    lm.config.target |= {"law": target} if target == "laplace" else {"name": target}
    lm.config.target |= {"median": 5.0, "scale": 1.0} if target == "standardise_log" else {}
    for y in (-20.0, 148.0, 163.0, 900.0):
        found = counterfactual(lm, Words(), FACT, y, FACT)
        assert [found.value, *found.intervals["0.9"]] == pytest.approx([y] * 3, rel=1e-4)


def test_the_law_without_a_fact_is_that_of_predictions(model: CausalQwenForCausalLM) -> None:
    """And the fact's place is told by the same intervals."""
    model.config.calibration = FACTORS
    try:
        (wanted,) = predict_numbers(model, Words(), [OTHER], within=0, digits=17)
        law = number_laws(model, Words(), [encoded(Words(), OTHER)])
        names = ["low_95", "low_90", "low_50", "predicted", "high_50", "high_90", "high_95"]
        assert law.ends[0].tolist() == pytest.approx([wanted[name] for name in names], rel=1e-6)
        found = counterfactual(model, Words(), FACT, 150.0, OTHER)
        assert found.predicted == pytest.approx(wanted["predicted"], rel=1e-6)
        ends = [float(wanted[f"{end}_90"]) for end in ("low", "high")]
        for y, within in ((ends[0] + 0.01, 0.9), (ends[1] - 0.01, 0.9), (wanted["predicted"], 0.5), (1e6, None)):
            assert counterfactual(model, Words(), OTHER, y, FACT).within == within
    finally:
        model.config.calibration = None


@pytest.mark.parametrize("heat", [1.0, 4.0])
def test_every_individual_of_a_word_says_it_and_these_are_the_ones_that_rejection_finds(heat: float) -> None:
    """heat: the model's word temperature, with which the tails of eps are cut."""
    lm = number_writing_lm()
    lm.config.calibration = None if heat == 1.0 else Intervals(word_temperature=heat).to_dict()
    cut = 0.0 if heat == 1.0 else WORD_TAILS
    words, texts = Words(), (FACT, OTHER)
    with torch.no_grad():
        lm.model.action.b_noise.fill_(0.02)
        u = [facts.at_end(lm, padded(lm, words, [encoded(words, text)])) for text in texts]
        draw = torch.Generator().manual_seed(1)
        tau = Cauchy(*torch.tensor([0.0, 1.0])).sample(
            torch.rand(40_000, u[0].loc.shape[1], generator=draw).clamp(cut, 1 - cut)
        )
        noise = lm.model.action.b_noise.expand_as(tau)
        said = [facts._best(lm, law.loc + heat * law.scale * tau, noise) for law in u]
    counted = [pair for pair in Counter(said[0].tolist()).most_common() if pair[0] != NUM]
    usual, rare = counted[0][0], next(word for word, count in counted if count < 400)
    for word in (usual, rare):
        found = counterfactual(lm, words, FACT, f"w{word}", OTHER)
        assert isinstance(found, WordFact)
        assert found.p == pytest.approx(float((said[0] == word).double().mean()), rel=0.2)
        assert sum(found.words.values()) == pytest.approx(1.0)
        of_these = said[1][said[0] == word]
        for text, share in [*found.words.items()][:3]:
            assert share == pytest.approx(float((of_these == words.encode(text)[0][0]).double().mean()), abs=0.08)
        assert counterfactual(lm, words, FACT, f"w{word}", FACT).words == {f" w{word}": pytest.approx(1.0)}
    assert found.draws > 80, "truncated draws: plain ones would find some ten"


def test_what_is_observed_wrongly_is_said_in_a_sentence(model: CausalQwenForCausalLM) -> None:
    lm = number_writing_lm()
    for args, said in (
        ((model, "w1 w2"), "--observed: found 'w1 w2', allowed: a number such as 37.8, or one word"),
        ((model, "nan"), "--observed: found 'nan', allowed: a finite number"),
        ((lm, 3.0), f"prompt: found '{OTHER}', allowed: a text that the model goes on with a number; here ' w87'"),
    ):
        with pytest.raises(UserError) as error:
            counterfactual(args[0], Words(), FACT, args[1], OTHER)
        assert said in str(error.value)


@pytest.fixture
def learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of a run, which api takes for any model's."""
    path = tmp_path / "people.csv"
    path.write_text("dose,age,score\n1,30,150\n2,41,160\n3,52,\n4,63,999\n")
    data = DataConfig(train=str(path), target_field="score", text_template="dose {dose}, age {age}: {score}")
    known = LearntTable.model_validate({"data": data.model_dump(), "columns": columns_for(data)})
    monkeypatch.setattr(api, "_learnt_table", lambda _: known)
    return path


def test_a_tables_rows_are_changed_and_keep_their_individuals(learnt: Path) -> None:
    pair, said = tiny_pair(), list[str]()
    with torch.no_grad():
        pair[0].model.action.b_noise.fill_(1e-9)
    same = api.counterfactual_rows(pair, learnt, {"age": 41}, say=said.append)
    assert same[1]["would_be"] == pytest.approx(160.0, rel=1e-4)
    assert same[1]["effect"] == pytest.approx(0.0, abs=1e-2)
    assert said == [
        f"1 of 4 rows have no prediction, such as {learnt}:4: found nothing in the column score, allowed: the "
        "number that was observed"
    ]
    assert {same[2][name] for name in ("would_be", "effect", "fact_within")} == {None}
    assert same[3]["fact_within"] == "outside"
    (wanted,) = api.predict(pair, [{"dose": 1, "age": 41}], digits=17)
    assert same[0]["predicted"] == pytest.approx(wanted["predicted"], rel=1e-6)
    assert [row["age"] for row in same] == [41] * 4
    for change, found in (({"weight": 1}, "weight"), ({"score": 1}, "score")):
        with pytest.raises(UserError, match=f"--set: found '{found}', allowed: a column that the model reads: dose"):
            api.counterfactual_rows(pair, learnt, change)
    with pytest.raises(UserError, match="found many in the column dose"):
        api.counterfactual_rows(pair, learnt, {"dose": "many"}, say=said.append)


def test_the_pages_commands_answer(cqwen: Callable[..., Any], learnt: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", *tiny_pair())
    (folder / "table.json").write_text(json.dumps(api._learnt_table(folder).to_dict()))
    here = {"MODEL": str(folder), "people.csv": str(learnt), "changed.csv": str(tmp_path / "changed.csv")}
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("cqwen counterfactual")]
    number, word, table = ([here.get(part, part) for part in command[1:]] for command in commands)
    found = json.loads(cqwen(*number, "--json").stdout)
    assert found["effect"] == pytest.approx(found["value"] - 140)
    assert f"would be {found['value']:.6g}, with 90 % between" in cqwen(*number).stdout
    assert "of all individuals say ' and' (" in cqwen(*word).stdout
    assert "1 of 4 rows have no prediction" in cqwen(*table).stderr
    rows = list(csv.DictReader(io.StringIO((tmp_path / "changed.csv").read_text())))
    assert [row["dose"] for row in rows] == ["2"] * 4
    assert float(rows[0]["effect"]) == pytest.approx(float(rows[0]["would_be"]) - 150, abs=1e-4)  # 8 digits
    for args, said in (
        ([*number[:2], "--fact", "x"], "or a table with --set COLUMN=VALUE"),
        ([*table[:4], "--set", "dose"], "--set: found 'dose', allowed: COLUMN=VALUE"),
        (table, "--out"),
    ):
        done = cqwen(*args)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
