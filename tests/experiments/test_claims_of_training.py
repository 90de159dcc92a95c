"""experiments.claims: orders and groups of training, growth of the vocabulary, laws of residuals, by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny import tiny_model

from experiments.claims import forgetting, growth, stages
from experiments.claims.growth import fitted, judged, mean_loss, prob
from experiments.claims.subject import Ask, Positions, Training, train_heads
from experiments.claims.texts import SIZES
from experiments.claims.trainings import LoraArm, _config, of_arm, of_scores
from experiments.claims.uncertainty import of_laws


def positions(count: int = 60) -> Positions:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 91, (count,), generator=g)
    labels[::4] = 90  # <NUM>
    values = torch.where(labels == 90, torch.randn(count, generator=g, dtype=torch.float64), 0.0)
    return Positions(torch.randn(count, 24, generator=g), labels, values, labels == 90, torch.arange(count) // 10)


def changed(training: Training) -> set[str]:
    model = tiny_model(number_dims=2)
    before = {name: value.clone() for name, value in model.named_parameters()}
    train_heads(model, positions(), steps=3, tokens=30, seed=0, training=training)
    return {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}


def test_a_phase_trains_only_what_its_losses_reach() -> None:
    words, numbers = changed(stages.WORDS), changed(stages.NUMBERS)
    assert {"action.cls_weight", "action.threshold"} <= words
    assert "action.reg_bias" not in words
    assert {"action.reg_weight", "action.reg_bias"} <= numbers
    assert not {"action.cls_weight", "action.threshold"} & numbers


def test_a_group_can_train_alone_and_a_rate_is_a_factor() -> None:
    assert changed(forgetting.GROUPS["thresholds alone"]) == {"action.threshold"}
    assert changed(forgetting.GROUPS["regression alone"]) == {"action.reg_weight", "action.reg_bias"}
    moves = {}
    for rate in (1.0, 10.0):
        model = tiny_model(number_dims=2)
        before = model.action.cls_weight.detach().clone()
        train_heads(model, positions(), steps=1, tokens=30, seed=0, training=Training(rate=rate))
        moves[rate] = float((model.action.cls_weight - before).abs().max())
    assert moves[10.0] == pytest.approx(10 * moves[1.0], rel=0.02), "Adam's first step is the rate"


def test_both_orders_of_lora_take_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 576}')
    ask = Ask(Path("out"), str(tmp_path), "texts.jsonl", SIZES["small"], 0, 3, print)
    files = {"train": "t", "words": "w"}
    heads_first, at_once = (_config(ask, LoraArm(heads_first=first), files) for first in (True, False))
    assert [stage["train"] for stage in heads_first["stages"]] == [
        ["heads", "embedding"],
        ["heads", "embedding", "lora"],
    ]
    assert [stage["train"] for stage in at_once["stages"]] == [["heads", "embedding", "lora"]]
    steps = [sum(stage["steps"] for stage in config["stages"]) for config in (heads_first, at_once)]
    assert steps[0] == steps[1]
    assert at_once["loss"]["constraint"] == {"mode": "monitor"}
    assert _config(ask, LoraArm(kl=0.1), files)["loss"]["constraint"] == {"mode": "dual", "eps": 0.1}


def test_training_measures_equal_values_by_hand() -> None:
    scores = {
        "is_number": np.array([0.0, 0.0, 1.0]),
        "best": np.array([3.0, 4.0, 9.0]),
        "label": np.array([3.0, 5.0, 9.0]),
        "soft_label": np.array([0.5, 0.125, 0.1]),
        "crps": np.array([0.0, 0.0, 0.7]),
        "goal": np.array([0.0, 0.0, 2.0]),
        "y_loc": np.array([0.0, 0.0, 0.5]),
        "p_label": np.array([0.1, 0.2, 0.3]),
    }
    found = of_scores(scores)
    assert found == pytest.approx(
        {"words right": 0.5, "surprise": math.log(4), "CRPS": 0.7, "median error": 1.5, "P of <NUM>": 0.3}
    )
    words = {"top1": 0.5, "perplexity": math.e}
    arm = of_arm({"words": {"words": words, "code": words}, "numbers": {"crps": 2.0, "mdae": 1.0}})
    assert arm["held out"] == {"words right": 0.5, "surprise": 1.0, "CRPS": 2.0, "median error": 1.0}
    assert arm["code"] == {"words right": 0.5, "surprise": 1.0}


def test_forgetting_is_the_rise_of_the_loss_over_its_start() -> None:
    arms = ["start", *forgetting.GROUPS, *forgetting.RATES, forgetting.START, *forgetting.LORA_ARMS]

    def seed(shift: float) -> dict[str, dict[str, dict[str, float]]]:
        kinds = ("held out", "prose", "code")
        found = {name: {kind: {"surprise": 2.0, "words right": 0.5} for kind in kinds} for name in arms}
        found["classifier alone"]["prose"]["surprise"] += 1.0 + shift
        found[forgetting.START]["code"]["surprise"] = 5.0
        found[forgetting.PLAIN]["code"]["surprise"] = 5.2
        return found

    result = forgetting.summary([seed(0.0), seed(0.02)])
    claims = {claim["claim"]: claim for claim in result["claims"]}
    assert claims["of the groups, the classifier forgets most"]["values"] == pytest.approx([0.5, 0.51])
    assert claims["LoRA forgets other texts"]["values"] == pytest.approx([0.1, 0.1])
    assert claims["training the heads forgets other texts"]["verdict"] == "does not hold"


def test_the_scale_is_chosen_by_the_one_vs_rest_loss() -> None:
    g = torch.Generator().manual_seed(0)
    loc, labels = torch.randn(20, 7, generator=g), torch.randint(0, 7, (20,), generator=g)
    x = (loc.double() - 0.3) / 0.2
    p = 0.5 + torch.atan(x) / math.pi
    one_hot = torch.nn.functional.one_hot(labels, 7).bool()
    expected = -torch.where(one_hot, p.log(), (1 - p).log()).sum(1).mean()
    assert mean_loss(loc, labels, 0.2, 0.3, "Cauchy") == pytest.approx(float(expected), rel=1e-5)
    p = torch.sigmoid(x)
    expected = -torch.where(one_hot, p.log(), (1 - p).log()).sum(1).mean()
    assert mean_loss(loc, labels, 0.2, 0.3, "logistic") == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("law", growth.LAWS)
def test_the_fitted_scale_has_the_lowest_loss(law: str) -> None:
    g = torch.Generator().manual_seed(0)
    loc = 2 * torch.randn(400, 30, generator=g)
    labels = torch.multinomial(loc.softmax(1), 1, generator=g)[:, 0]
    found = mean_loss(loc, labels, *fitted(loc, labels, law), law)
    scales, thresholds = np.geomspace(0.05, 5, 20), np.linspace(-2, 8, 21)
    assert found <= min(mean_loss(loc, labels, s, t, law) for s in scales for t in thresholds) + 0.01
    measures = judged(loc, labels)
    assert measures["softmax"]["ECE"] < 0.1, "the labels are softmax's own draws"
    assert measures[law]["sum of P"] == pytest.approx(
        float(prob(loc, *fitted(loc, labels, law), law).sum(1).median()), rel=0.3
    )


def test_a_reduced_vocabulary_contains_every_label() -> None:
    labels = torch.tensor([5, 90, 5])
    words = growth._words(labels, 100, 10, seed=1)
    assert len(words) == 10
    assert {5, 90} <= set(words.tolist())
    assert words.tolist() == sorted(set(words.tolist()))
    assert growth._words(labels, 100, 1, seed=1).tolist() == [5, 90]


def test_the_law_of_planted_residuals_is_found() -> None:
    g = np.random.default_rng(0)
    scores = {"is_number": np.ones(2000), "y_loc": np.zeros(2000), "text": np.arange(2000) // 10}
    laws = of_laws({**scores, "goal": 3 * g.standard_cauchy(2000)})
    assert laws["Cauchy"] > max(laws["Laplace"], laws["Gaussian"]) + 0.1
    expected = -math.log(4 * math.pi * 3)  # minus a Cauchy's entropy
    assert laws["Cauchy"] == pytest.approx(expected, abs=0.1)
    laws = of_laws({**scores, "goal": g.normal(0, 2, 2000)})
    assert laws["Gaussian"] > max(laws["Laplace"], laws["Cauchy"]) + 0.02
    assert math.isnan(of_laws({**scores, "goal": np.ones(2000), "text": np.zeros(2000)})["Cauchy"])
