"""The model, by the seeds' names (S2). Importing this registers the Hugging Face Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.model.backbone import FeatureExtractionNetwork
from cqwen_dist.model.causal_lm import CausalQwenForCausalLM
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.configuration import CausalQwenConfig
from cqwen_dist.model.embedding import NumericalAwareEmbedding

AutoConfig.register(CausalQwenConfig.model_type, CausalQwenConfig, exist_ok=True)
AutoModel.register(CausalQwenConfig, CausalQwenForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(CausalQwenConfig, CausalQwenForCausalLM, exist_ok=True)

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CausalQwenConfig",
    "CausalQwenForCausalLM",
    "CausalQwenModel",
    "FeatureExtractionNetwork",
    "NumericalAwareEmbedding",
]
