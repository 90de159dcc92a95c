"""cqwen_dist: distributed LoRA fine-tuning of CausalQwen."""

__version__ = "0.1.0"
