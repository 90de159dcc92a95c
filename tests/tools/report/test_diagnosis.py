"""What is said of figures, in plain words: each rule on figures that call for it, and on some that do not."""

import re
from pathlib import Path

import pytest

from cqwen_dist.config import Config
from cqwen_dist.tools.report.diagnosis import Finding, diagnose
from cqwen_dist.tools.report.run_data import Curve, RunData

BASE = {"name_or_path": "Qwen/Qwen2.5-0.5B"}
WELL = {
    "eval/accuracy": 0.50,
    "eval/base_accuracy": 0.48,
    "eval/num_f1": 0.95,
    "eval/reg_mae": 5.0,
    "eval/reg_mdae": 3.0,
    "eval/baseline_mdae": 20.0,
    "eval/coverage_90": 0.91,
    "eval/coverage_90_conformal": 0.89,
    "eval/conformal_numbers": 200.0,
    "dist/ovr_prob_sum_median_standard": 1.1,
    "dist/ovr_prob_sum_median_causal": 1.02,
    **{f"dist/{name}_{k}": v for name in ("U_loc", "U_scale") for k, v in
       (("mean", 0.1), ("median", 0.1), ("std", 1.0), ("iqr", 1.35))},
}  # fmt: skip
FORGOT = {"watch/code/accuracy": 0.3, "watch/code/base_accuracy": 0.45}


def said(changes: dict[str, float] | None = None, **raw: list[float]) -> list[str]:
    """Titles of findings that are not good."""
    return [f.title for f in findings(changes, **raw) if f.level != "good"]


def findings(
    changes: dict[str, float] | None = None,
    alarms: list | None = None,
    start: dict | None = None,
    config: dict | None = None,
    **raw: list[float],
) -> list[Finding]:
    last = {**WELL, **(changes or {})}
    named = {name.replace("__", "/"): values for name, values in raw.items()}
    checked = Config.model_validate({"model": BASE, "data": {"train": "x.jsonl"}, "start": "seed", **(config or {})})
    curves = {name: Curve(list(range(len(values))), values) for name, values in named.items()}
    return diagnose(
        RunData("tea", Path(), {}, checked, "", {}, start or {}, [], curves, last, [], alarms or [], named)
    )  # fmt: skip


def test_a_good_run_gets_only_good_sentences() -> None:
    assert said() == []
    assert [f.title for f in findings()] == [
        "Words: 50.0% right",
        "Numbers: median absolute error 3",
        "Recalibrated 90 % intervals contain 89%",
        "The probabilities add up to 1.10",
    ]


@pytest.mark.parametrize(
    ("changes", "raw", "title"),
    [
        ({"eval/accuracy": 0.45}, {}, "It predicts 3.0 points fewer words right than its base model"),
        (FORGOT, {}, "It forgets code: 15.0 points of the base model's 45.0%"),
        ({"eval/num_f1": 0.4}, {}, "Telling numbers from words: F1 0.40"),
        ({"eval/reg_mae": 80.0}, {}, "A few extreme errors"),
        ({"eval/reg_mdae": 21.0, "eval/reg_mae": 22.0}, {}, "Numbers are hardly better than always saying the median"),
        ({"eval/coverage_90_conformal": 0.80}, {}, "Recalibrated 90 % intervals contain 80%"),
        ({"dist/U_loc_mean": 1.0}, {}, "The locations of U are skewed"),
        ({"dist/U_scale_std": 9.0}, {}, "The scales of U have heavy tails"),
        ({"train/kl": 2.2, "train/kl_eps": 0.1}, {}, "U moved further from its start than allowed: KL 2.2, bound 0.1"),
        ({"dist/ovr_prob_sum_median_standard": 70.0}, {}, "The probabilities of all words add up to 70.00"),
        ({"dist/ovr_prob_sum_median_causal": 0.2}, {}, "For one fixed individual they add up to 0.20"),
        ({}, {"eval__cls_loss_mean": [9.0, 5.0, 5.5, 6.0]}, "The held-out word loss was lower before"),
        ({}, {"eval__reg_nll": [2.0, 2.5, 2.1]}, "The loss of numbers never fell"),
        ({}, {"eval__cls_loss_mean": [7.0, 7.0, 7.5]}, "The loss of words never fell"),
        ({}, {"train__grad_norm": [0.5] * 20 + [900.0]}, "Gradients exploded at times"),
        ({}, {"train__grad_norm": [5.0] * 20, "train__clipped": [1.0] * 20}, "100% of the steps were clipped"),
        ({}, {"perf__step_s": [1.0] * 9, "perf__data_wait_s": [0.3] * 9}, "30% of the time went into waiting for data"),
        ({}, {"train__refused": [1.0, 1.0]}, "2 steps were refused"),
    ],
)
def test_each_rule_gives_only_its_sentence(changes: dict, raw: dict, title: str) -> None:
    assert said(changes, **raw) == [title]


def test_nothing_is_called_good_when_words_are_bad() -> None:
    poor = {"eval/accuracy": 0.011, "eval/base_accuracy": 0.011, "watch/code/accuracy": 0.01}
    found = findings({**poor, "watch/code/base_accuracy": 0.01})
    assert [f.title for f in found if f.level == "bad"] == ["Words: only 1.1% right"]
    assert [f.title for f in found if f.level == "good"] == [
        "Numbers: median absolute error 3",
        "Recalibrated 90 % intervals contain 89%",
    ]
    assert "every word has the same probability" in " ".join(f.text for f in found)
    built = {"architecture": {"model_type": "qwen2"}, "tokenizer": "train"}
    for model, cause in (
        (BASE, "data.prompt_template"),
        (built, "random weights"),
        ({**built, "pretrain": {"steps": 7}}, "for 7 steps only"),
    ):
        assert cause in findings(poor, config={"model": model})[0].text


LOST = {"eval/accuracy": 0.45}
TABLE = {"train": "x.jsonl", "text_template": "{a} costs {b}.", "target_field": "b"}


@pytest.mark.parametrize(
    ("changes", "config", "advised"),
    [
        (LOST, {}, "loss.constraint.mode: dual"),
        (LOST, {"loss": {"constraint": {"mode": "dual"}}}, "smaller loss.constraint.eps"),
        (FORGOT, {}, "Freeze `classifier` and `thresholds`"),
        ({"eval/reg_mdae": 21.0, "eval/reg_mae": 22.0}, {"data": TABLE}, "model.wide: 1024"),
        ({"eval/reg_mae": 80.0}, {}, "signed_log"),
        ({"eval/reg_mae": 80.0}, {"loss": {"target_transform": "standardise_log"}}, "few predictions are far off"),
    ],
)
def test_settings_that_are_already_set_are_not_advised(changes: dict, config: dict, advised: str) -> None:
    (text,) = (f.text for f in findings(changes, config=config) if f.level != "good")
    assert advised in text
    other = {"mode: dual": "smaller", "smaller": "mode: dual", "Freeze": "mix such", "mix such": "Freeze"}
    assert not any(word in advised and not_now in text for word, not_now in other.items())
    assert "signed_log" in text if advised == "signed_log" else "signed_log" not in text


def test_a_number_loss_that_never_falls_names_the_statistics_to_check() -> None:
    """S1 6.2, its second rule."""
    raw = {"eval__reg_nll": [2.0, 2.5], "eval__reg_mdae": [31.0, 19.0]}
    found = findings({"eval/reg_mdae": 19.0}, start={"statistics": {"median": 19.5, "scale": 4.25}}, **raw)
    text = next(f.text for f in found if "fell" in f.title)
    assert "19.5" in text
    assert "4.25" in text
    assert "31" in text


def test_alarms_come_first_with_their_samples() -> None:
    alarm = {"step": 7, "kind": "loss-spike", "text": "the loss is 9", "samples": [3, 4]}
    trap = {"step": 9, "kind": "uniform-trap", "text": "loss near 1 + ln V", "samples": []}
    first, second, *_ = findings({"eval/num_f1": 0.1}, alarms=[alarm, trap])
    assert (first.level, first.title) == ("bad", "Alarm at step 9: uniform-trap")
    assert second.title in ("Alarm at step 7: loss-spike", "Telling numbers from words: F1 0.10")
    spike = next(f for f in findings(alarms=[alarm]) if "loss-spike" in f.title)
    assert re.search(r"the loss is 9\. Samples: 3, 4\.", spike.text)
