"""docs/seeds.md: the seeds' classes and constants by their names."""

from inspect import signature
from pathlib import Path

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
