"""Which model to use, in words; and errors and intervals by deciles."""

import numpy as np
import pytest

from cqwen_dist.tables.judging import OURS, conditional, errors, verdict

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
