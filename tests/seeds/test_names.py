"""docs/seeds.md: the seeds' classes and constants by their names."""

from inspect import signature
from pathlib import Path

from seeds.conformance import decisions_there, known_tests, lives_at, page, rows

import cqwen_dist
from cqwen_dist import model

PAGE = (Path(__file__).parents[2] / "docs" / "seeds.md").read_text(encoding="utf-8")
# S2's positional arguments, where a class is made by hand
S2 = {
    "AbductionNetwork": ["hidden_size", "causal_hidden_size"],
    "ActionNetwork": ["causal_hidden_size", "vocab_size"],
    "OvrClassificationLoss": ["vocab_size", "C_ovr", "learnable_threshold"],
    "CausalQwenLoss": ["vocab_size", "num_token_id", "C_ovr", "alpha", "reg_weight", "learnable_threshold"],
    "CausalQwenModel": ["qwen_model_path", "causal_hidden_size"],
}
OTHERS = {"NumericalAwareTokenizer", "NumericalAwareEmbedding", "FeatureExtractionNetwork", "RegressionLoss"}


def test_all_nine_classes_are_in_the_model_package_with_s2s_arguments() -> None:
    assert len({*S2, *OTHERS}) == 9
    for name in {*S2, *OTHERS}:
        assert f"`{name}`" in PAGE
        assert name in model.__all__
        found = getattr(model, name)
        wanted = S2.get(name, [])
        assert [p for p in signature(found.__init__).parameters][1 : 1 + len(wanted)] == wanted, name
    assert cqwen_dist.CausalQwenModel is model.CausalQwenModel


def test_every_row_is_there_and_is_tested_or_decided():
    assert list(rows()) == list(range(1, 146))
    assert [n for n, row in rows().items() if not row.get("tests") and not row.get("decisions")] == []


def test_files_and_tests_named_by_rows_exist():
    there, decided = known_tests(), decisions_there()
    lost = {
        n: [t for t in row.get("tests", []) if t not in there]
        + [d for d in row.get("decisions", []) if d not in decided]
        + [place for place in row["lives"] if not lives_at(place).exists()]
        for n, row in rows().items()
    }
    assert {n: names for n, names in lost.items() if names} == {}


def test_every_decision_belongs_to_a_row():
    """A decision that no requirement needs belongs in docs/measurements.md or docs/did-not-work.md."""
    used = {d for row in rows().values() for d in row.get("decisions", [])}
    assert set(decisions_there()) - used == set()


def test_the_page_has_every_row():
    assert [int(line.split()[1]) for line in page().splitlines() if line[2:3].isdigit()] == list(rows())
