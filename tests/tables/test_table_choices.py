"""What `cqwen fit` chooses: the unit of the target, the length, how long it trains."""

from pathlib import Path

import numpy as np
import pytest

from cqwen_dist.config import load_config
from cqwen_dist.tables.choices import LEAST_READ, LEAST_STEPS, LONGEST, Pace, best_transform, choose, config_text

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
