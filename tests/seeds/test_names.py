"""docs/seeds.md: the seeds' classes and constants by their names."""

import re
from inspect import signature
from pathlib import Path

import cqwen_dist
from cqwen_dist import model
from cqwen_dist.config import Config
from cqwen_dist.config.messages import ELSEWHERE, _places

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


def test_every_key_of_the_page_exists_and_the_config_gives_the_same_hints() -> None:
    keys = set(re.findall(r"`((?:model|loss|train)\.[a-z_.]+[a-z])", PAGE))
    assert {k for k in keys if not k.endswith(".py")} <= set(_places(Config, ""))
    for name in ("qwen_model_path", "causal_hidden_size", "causal_dim", "C_ovr", "learnable_threshold", "sigma_init"):
        (row,) = [line for line in PAGE.splitlines() if line.startswith("| ") and f"`{name}`" in line.split("|")[1]]
        assert f"`{ELSEWHERE[name]}`" in row
    assert ELSEWHERE["lambda"] == "loss.reg_weight"
