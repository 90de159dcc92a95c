"""The baselines find what is there to find, and nothing breaks on what a table may hold."""

from datetime import date, timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cqwen_dist.config import load_config
from cqwen_dist.tables.baselines import EncodedRows, baselines, date_parts
from cqwen_dist.tables.choices import LEAST_READ, LEAST_STEPS, LONGEST, Pace, best_transform, choose, config_text
from cqwen_dist.tables.judging import OURS, conditional, errors, verdict
from cqwen_dist.tables.rows import Table

TRAIN, TEST = np.arange(160), np.arange(160, 200)


def table(with_numbers: bool, with_words: bool) -> Table:
    """score = 3 age + 10 where the city is Rome; an age is missing here and there, a city unseen in the test rows."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(200):
        city = "Nowhere" if i == 199 else ("Rome", "Oslo", "Bern")[i % 3]
        age = int(rng.integers(20, 80))
        row = {"score": str(3 * age * with_numbers + 10 * (city == "Rome") * with_words + 0.01 * i)}
        row |= {"age": "" if i % 50 == 7 else str(age)} if with_numbers else {}
        row |= {"city": city} if with_words else {}
        rows.append(row)
    names = ["age"] * with_numbers + ["city"] * with_words
    return Table(names, ["age"] * with_numbers, rows, "score", [])


def r2(found: Table) -> dict[str, float]:
    texts = [" ".join(row[name] for name in found.columns) for row in found.rows]
    truth = found.values()[TEST]
    return {rival.name: errors(rival.predicted, truth)["r2"] for rival in baselines(found, TRAIN, TEST, texts)}


def test_each_baseline_explains_what_it_can_read() -> None:
    found = r2(table(True, True))
    assert found["always the median"] <= 0
    assert 0.8 < found["ridge, numeric columns"] < 0.995, "it does not see the city"
    assert found["ridge, TF-IDF and one-hot"] > found["ridge, numeric columns"]
    assert found["gradient boosting"] > 0.8
    words, pairs = found["ridge, TF-IDF and one-hot"], found["ridge, TF-IDF of words and pairs"]
    assert words > pairs, "an age is a word there, of a few rows"


def test_numbers_as_large_as_they_get_harm_no_model() -> None:
    """Maps write the least float64 where nothing is known. Its square is infinite, and so is it in float32."""
    odd = table(True, True)
    for row in odd.rows[3::20]:
        row["age"] = "-1.7976931348623157e+308"
    assert all(np.isfinite(score) for score in r2(odd).values())


def test_baselines_handle_tables_of_only_words_or_numbers() -> None:
    words = r2(table(False, True))
    assert "ridge, numeric columns" not in words
    assert words["ridge, TF-IDF and one-hot"] > 0.9
    assert words["ridge, TF-IDF of words and pairs"] > 0.9
    assert r2(table(True, False))["ridge, numeric columns"] > 0.9


def test_a_skewed_target_is_fitted_as_logarithms_and_to_the_absolute_error() -> None:
    """price = 10^(x + noise of a Cauchy law): squares of raw prices see a few rows only."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, 200)
    prices = 10 ** (1 + x + 0.1 * np.abs(rng.standard_cauchy(200)).clip(max=30))
    rows = [{"x": f"{a:.4f}", "price": f"{p:.6g}"} for a, p in zip(x, prices, strict=True)]
    found = Table(["x"], ["x"], rows, "price", [])
    truth = found.values()[TEST]
    lost = {}
    for by_log in (False, True):
        _, ridge = islice(baselines(found, TRAIN, TEST, [""] * 200, by_log), 2)
        assert ridge.name == "ridge, numeric columns"
        assert ridge.fitted_to == "absolute error", "outliers pull the squares"
        lost[by_log] = np.median(np.abs(np.log(ridge.predicted.clip(1e-3) / truth)))
    assert lost[True] < 0.5 * lost[False]


def test_predictions_of_baselines_are_held_near_the_training_range() -> None:
    rows = [{"x": str(i % 40), "price": f"{np.exp(0.2 * (i % 40)):.6g}"} for i in range(200)]
    rows[199]["x"] = "4000"
    found = Table(["x"], ["x"], rows, "price", [])
    _, ridge = islice(baselines(found, TRAIN, TEST, [""] * 200, True), 2)
    assert np.isfinite(ridge.predicted).all()
    assert ridge.predicted[-1] < 1e5, "e^800 by the fitted line"


def test_dates_become_numbers_and_rare_categories_share_a_column() -> None:
    days = [(date(2020, 1, 1) + timedelta(days=3 * i)).strftime("%d.%m.%Y") for i in range(200)]
    rows = [{"day": day, "city": "Rome" if i % 2 else f"only {i}", "score": str(i % 7)} for i, day in enumerate(days)]
    texts = [row["city"] for row in rows]
    found = EncodedRows(Table(["day", "city"], [], rows, "score", []), texts, np.arange(200.0), TRAIN)
    assert found.numbers[1].tolist() == [2020, 1, 4, 5, date(2020, 1, 4).toordinal()]
    assert found.linear.shape[1] < 160, "no column a cell"
    at = date_parts(["2024-02-29 12:30:00", "", "2024-03-01"], np.arange(3))
    assert at[0, -1] == 12.5
    assert np.isnan(at[1]).all()
    assert date_parts(["2024-02-29", "later"], np.arange(2)) is None
    assert date_parts(["", ""], np.arange(2)) is None


def test_errors_equal_the_textbook_formulas() -> None:
    found = errors(np.array([1.0, 2.0, 6.0]), np.array([1.0, 3.0, 2.0]))
    assert found["mae"] == 5 / 3
    assert found["rmse"] == np.sqrt(17 / 3)
    assert found["mdae"] == 1.0
    assert abs(found["r2"] - (1 - 17 / 2)) < 1e-12


ROWS = 200
TRUTH = np.arange(ROWS) + 100.0
NOISE = np.random.default_rng(0).normal(0, 1, (4, ROWS))


def test_a_clear_winner_is_named_with_its_lead_over_ours() -> None:
    found = verdict({OURS: TRUTH + 5 * NOISE[0], "ridge": TRUTH + NOISE[1], "trees": TRUTH + 9 * NOISE[2]}, TRUTH)
    assert (found["best"], found["equal"]) == ("ridge", [])
    assert found["verdict"].startswith(f'Use "ridge". The mean error of "{OURS}" is ')
    assert "gives intervals" not in found["verdict"]


def test_models_within_noise_are_all_named_ours_first() -> None:
    near = {name: TRUTH + NOISE[i] for i, name in enumerate(("ridge", "trees", OURS, "boosting"))}
    found = verdict({**near, "median": np.full(ROWS, 200.0)}, TRUTH)
    assert {found["best"], *found["equal"]} == {*near}
    if found["best"] != OURS:
        assert f'Not surely worse on 200 rows: "{OURS}" (+' in found["verdict"]
    assert 'The mean error of "median"' in found["verdict"]
    assert found["verdict"].endswith(f" {OURS} also gives intervals.")


def test_the_luckiest_of_many_equal_models_is_no_clear_winner() -> None:
    draw = np.random.default_rng(1)
    clear = [
        len(verdict({f"m{i}": TRUTH[:40] + draw.normal(0, 1, 40) for i in range(10)}, TRUTH[:40])["equal"]) < 9
        for _ in range(40)
    ]
    assert sum(clear) <= 6, "with 95 % for each comparison alone it is a third"


def test_deciles_show_where_intervals_do_not_hold() -> None:
    """The interval has the same width for all, but errors grow with the size."""
    size = np.linspace(0.1, 3, ROWS)
    predictions = {OURS: TRUTH + size * NOISE[0], "a": TRUTH + 1.0, "b": TRUTH + 2.0}
    ends = np.stack([predictions[OURS] - 2, predictions[OURS] + 2], 1)
    results = {name: errors(found, TRUTH) for name, found in predictions.items()}
    groups = conditional(predictions, results, ends, TRUTH)["deciles"]["predicted"]
    assert [group["rows"] for group in groups] == [20] * 10
    assert groups[0]["coverage_90"] == 1.0
    assert groups[-1]["coverage_90"] < 0.75
    assert groups[0]["mae"].keys() == {OURS, "a"}, "beside the best of the others"
    assert groups[0]["mae"]["a"] == pytest.approx(1)
    assert groups[0]["to"] <= groups[1]["from"]


PACE = Pace(0.05, 0.15, "fp32", 576)
NORMAL = np.random.default_rng(0).normal(50.0, 4.0, 1000)
TOKENS = np.full(1000, 90)


def test_only_targets_over_many_orders_of_magnitude_become_logarithms() -> None:
    prices = np.exp(np.random.default_rng(0).normal(3.0, 1.5, 1000))
    assert best_transform(prices) == "standardise_log"
    assert best_transform(NORMAL) == "standardise"
    assert best_transform(NORMAL - 50) == "standardise", "a logarithm has a corner at 0"
    assert best_transform(np.array([1.0] * 15 + [2.0] * 5)) in ("standardise", "standardise_log")


@pytest.mark.parametrize(("minutes", "least", "most"), [(1, 0, 0), (20, 1, 8), (10_000, 8, 8)])
def test_the_remaining_time_goes_to_adapters(minutes: float, least: float, most: float) -> None:
    chosen = choose(NORMAL, TOKENS, 150, 150, PACE, minutes)
    assert least <= chosen.epochs <= most
    assert chosen.lora_minutes <= 0.8 * minutes or chosen.epochs == 8


@pytest.mark.parametrize(("forward", "minutes"), [(0.2, 4), (0.07, 30), (0.001, 2)])
def test_rows_and_steps_fit_the_time(forward: float, minutes: float) -> None:
    pace = Pace(forward, 3 * forward, "fp32", 576)
    chosen = choose(np.resize(NORMAL, 1200), TOKENS, 400, 400, pace, minutes)
    assert chosen.minutes <= minutes
    assert chosen.heads_steps >= LEAST_STEPS
    capped = chosen.rows != (1200, 400, 400)
    assert capped == (forward > 0.01 and minutes < 30)
    assert all(rows >= LEAST_READ for rows in chosen.rows)
    assert not (capped and chosen.epochs), "rows come before adapters"


def test_the_least_is_read_however_little_time_there_is() -> None:
    chosen = choose(NORMAL, TOKENS, 150, 20, Pace(5.0, 15.0, "fp32", 576), 1)
    assert (chosen.rows, chosen.heads_steps, chosen.epochs) == ((LEAST_READ, LEAST_READ, 20), LEAST_STEPS, 0)
    assert chosen.minutes > 1, "and the time is told"


def test_the_sequence_length_fits_the_longest_row_up_to_a_limit(tmp_path: Path) -> None:
    assert choose(NORMAL, TOKENS, 150, 150, PACE, 20).length == 128
    assert choose(NORMAL, np.append(TOKENS, 5000), 150, 150, PACE, 20).length == LONGEST


def test_the_chosen_config_trains(tmp_path: Path) -> None:
    odd = 'a "quoted"\nprompt of {city}: ä '
    for minutes, stages in ((20, ["heads", "lora"]), (1, ["heads"])):
        chosen = choose(NORMAL, TOKENS, 150, 150, PACE, minutes)
        path = tmp_path / "fit.yaml"
        keys = {"prompt": odd, "text": "{score}", "target": "score", "numbers": {}, "empty": "-"}
        path.write_text(config_text(tmp_path, "b", chosen, PACE, 1000, 7, **keys), "utf-8")
        config = load_config(path)
        assert [stage.name for stage in config.stages] == stages
        assert config.data.prompt_template == odd
        assert config.train.seed == 7
        assert [f"{stage.lr:.1e}" for stage in config.stages] == ["2.1e-06", "2.1e-05"][: len(stages)], "of H = 576"
        assert config.stages[0].warmup_steps == min(chosen.heads_steps // 5, 20)
        if chosen.epochs:
            assert 0 < config.stages[1].warmup_steps <= chosen.epochs * 1000 / chosen.batch / 5
        assert config.model.start_numbers == 1000
        assert config.model.wide == (2**18, 6144)
