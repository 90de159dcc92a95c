"""The model, by the seeds' names (S2). Importing this registers the Hugging Face Auto classes."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.model.backbone import FeatureExtractionNetwork
from cqwen_dist.model.causal_lm import CausalQwenForCausalLM
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.embedding import NumericalAwareEmbedding
from cqwen_dist.model.features_face import CausalQwenFeatures

AutoConfig.register(CausalQwenConfig.model_type, CausalQwenConfig, exist_ok=True)
AutoModel.register(CausalQwenConfig, CausalQwenFeatures, exist_ok=True)
AutoModelForCausalLM.register(CausalQwenConfig, CausalQwenForCausalLM, exist_ok=True)

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CausalQwenConfig",
    "CausalQwenFeatures",
    "CausalQwenForCausalLM",
    "CausalQwenModel",
    "FeatureExtractionNetwork",
    "NumericalAwareEmbedding",
]
# S2's other classes. A run does not need them, so they are imported on first use.
__all__ += ["CausalQwenLoss", "NumericalAwareTokenizer", "OvrClassificationLoss", "RegressionLoss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cqwen_dist.data import tokenizer
    from cqwen_dist.heads import seed_losses

    return getattr(tokenizer if name == "NumericalAwareTokenizer" else seed_losses, name)
