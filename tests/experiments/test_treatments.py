"""experiments.claims.treatments: its people by hand, its quantiles against scipy, verdicts that follow; gallery."""

import math

import numpy as np
import pytest
from scipy.stats import cauchy

from experiments.claims import gallery, treatments
from experiments.claims.effects import Law, least_squares, same_quantile, scale_of_errors, true_form
from experiments.claims.page import section
from experiments.claims.people import COLUMNS, DOSES, SPREAD_U, People, average_effect, spread

MANY = np.array(DOSES)[None]


def one(u: float = 1.0, dose: float = 2.0) -> People:
    return People(*(np.array([value]) for value in (50.0, 4.0, "fever", dose, u)))


def truth_of(people: People, doses: np.ndarray, half: float = 1.645 * SPREAD_U) -> Law:
    """The law that made the outcomes, in units of spread."""
    return Law(people.quantile(doses, 0.5), spread(doses) + np.zeros_like(doses), half)


def test_the_structural_model_equals_values_by_hand() -> None:
    person = one()
    gain = 8 * (1 - math.exp(-2 / 1.5)) * 1.6
    assert person.outcome(np.array([[0.0, 2.0]]))[0].tolist() == pytest.approx([30 + 10 - 6 + 1, 34 + gain + 2])
    assert person.quantile(np.array([[2.0]]), 0.5)[0, 0] == pytest.approx(34 + gain)
    wide = person.quantile(MANY, 0.95) - person.quantile(MANY, 0.05)
    assert wide[0].tolist() == pytest.approx([2 * 1.64485 * 2 * (1 + dose / 2) for dose in DOSES], rel=1e-4)
    assert person.rows()[0] == dict(zip(COLUMNS, ("50", "4", "fever", "2"), strict=True))
    assert person.rows(np.array([0.5]))[0]["dose"] == "0.5"
    effect = average_effect(np.array([0.0]), np.array([2.0]))
    assert effect[0] == pytest.approx(gain / 1.6 * (1 + 1.6 + 0.4 + 0.8) / 4)


def test_simulated_people_are_confounded_and_reproducible() -> None:
    many = People.drawn(4000, 3)
    assert (many.dose.min(), many.dose.max()) == (0.0, 4.0)
    assert np.corrcoef(many.dose, many.severity)[0, 1] > 0.4
    assert abs(np.corrcoef(many.dose, many.u)[0, 1]) < 0.05
    assert many.u.std() == pytest.approx(SPREAD_U, rel=0.05)
    assert (People.drawn(5, 3).u == People.drawn(5, 3).u).all()
    assert (People.drawn(5, 3).u != People.drawn(5, 4).u).all()


def test_counterfactuals_keep_the_cauchy_quantile() -> None:
    own, other = (
        Law(np.array([[1.0]]), np.array([[0.5]]), 1.0),
        Law(np.array([[3.0, -2.0]]), np.array([[0.5, 2.0]]), 1.0),
    )
    q = cauchy.cdf(1.7, 1.0, 0.5)
    expected = [cauchy.ppf(q, 3.0, 0.5), cauchy.ppf(q, -2.0, 2.0)]
    assert same_quantile(own, np.array([1.7]), other)[0].tolist() == pytest.approx(expected)
    assert expected == pytest.approx([3.7, 0.8]), "with equal scales the residual is added"
    low, high = other.interval()
    assert (high - low)[0].tolist() == [1.0, 4.0]


def test_regressions_recover_the_true_effect() -> None:
    learnt, asked = People.drawn(4000, 0), People.drawn(50, 1)
    y = learnt.outcome(learnt.dose[:, None])[:, 0]
    doses = np.tile(DOSES, (50, 1))
    known = true_form(learnt, y, asked, doses)
    assert known.loc == pytest.approx(asked.quantile(doses, 0.5), abs=0.5)
    assert known.scale == pytest.approx(SPREAD_U * spread(doses), rel=0.05)
    plain = least_squares(learnt, y, asked, doses)
    assert np.ptp(plain.scale) == 0
    assert np.abs(plain.loc - asked.quantile(doses, 0.5)).mean() < 1.0, "squares and products nearly hold the form"
    error = y - learnt.quantile(learnt.dose[:, None], 0.5)[:, 0]
    scale, half = scale_of_errors(learnt, error, asked, doses)
    assert (scale[:, -1] / scale[:, 0]).mean() == pytest.approx(3.0, rel=0.3)
    wide = Law(plain.loc, scale, half)
    held = [low <= true <= high for low, true, high in zip(*map(np.ravel, _ends(wide, asked, doses)), strict=True)]
    assert np.mean(held) == pytest.approx(0.9, abs=0.07)


def _ends(law: Law, people: People, doses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = law.interval()
    return low, people.outcome(doses), high


def test_the_true_law_satisfies_every_claim_and_a_constant_scale_does_not() -> None:
    asked = People.drawn(200, 5)
    doses = np.column_stack([asked.dose, np.tile(DOSES, (200, 1))])
    right = truth_of(asked, doses)
    flat = Law(right.loc, np.ones_like(right.loc), 1.645 * SPREAD_U * 2)
    laws = {treatments.SQUARES: flat, treatments.WIDER: right, treatments.TRUE: right, treatments.MENDED: right}
    found = treatments.measured({treatments.OURS: right, **laws}, asked)
    assert found["error"][treatments.KEPT]["mean"] == pytest.approx(0.0, abs=1e-9)
    assert found["place"][treatments.OURS] == pytest.approx(1.0)
    assert found["width"][treatments.OURS] == pytest.approx(found["width"]["truth"], rel=1e-3)
    by_hand = np.abs(asked.u[:, None] * (spread(doses[:, 1:]) - spread(doses[:, :1]))).mean()
    assert found["error"][treatments.ADDITIVE]["mean"] == pytest.approx(by_hand)
    assert found["people"][0]["kept"] == pytest.approx(found["people"][0]["true"])
    verdicts = [claim["verdict"] for claim in treatments.summary([found] * 3)["claims"]]
    assert verdicts == ["holds"] * 7
    found = treatments.measured({treatments.OURS: flat, **laws}, asked)
    claims = treatments.summary([found] * 3)["claims"]
    assert claims[0]["mean"] == pytest.approx(0.0), "with a constant scale the fact says nothing of the effect"
    assert [claim["verdict"] for claim in claims] == [
        *["does not hold"] * 2,
        "holds",
        "holds",
        "does not hold",
        *["holds"] * 2,
    ]


def test_the_gallery_has_tables_pictures_and_no_claims() -> None:
    asked = People.drawn(3, 7)
    doses = np.column_stack([asked.dose, np.tile(DOSES, (3, 1))])
    names = (treatments.OURS, treatments.MENDED, treatments.SQUARES, treatments.WIDER, treatments.TRUE)
    found = treatments.measured(dict.fromkeys(names, truth_of(asked, doses)), asked)
    table = gallery.people_table(found["people"])
    assert len(table["rows"]) == 4 * 3
    assert {len(row) for row in table["rows"]} == {len(table["head"])}
    assert gallery.width_chart(found["width"]).startswith("<svg")
    curve = {
        "person": asked.rows()[0],
        "doses": [0.0, 4.0],
        "lines": {"CausalQwen, 5 %": [1.0, 2.0], "truth": [3.0, 4.0]},
    }
    assert gallery.interval_chart(curve, "CausalQwen").count('stroke-width="2"') == 2 * 2, "two lines, two samples"
    assert gallery.interval_chart(curve, "scale of errors").count('stroke-width="2"') == 2 * 1
    about = {"command": "c", "date": "d", "seeds": 1, "seconds": 1.0, "machine": "m", "sizes": "s", "data": "d"}
    text = section("gallery", {"run": about, "claims": [], "tables": [table], "pictures": {"width": ""}})
    assert "verdict" not in text
    assert "one seed" in text
    assert "![width](experiments/gallery-width.svg)" in text
