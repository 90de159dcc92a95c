"""Importing this registers CausalQwen with transformers' Auto classes and its text-generation pipeline.

import cqwen_dist.auto
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids, numbers = model.generate(**tokenizer("He paid", return_tensors="pt"), digits="auto", return_numbers=True)
print(tokenizer.decode(ids[0], numbers.values[0]), *numbers.records(0))
"""

from transformers import AutoTokenizer

from cqwen_dist.data.auto_tokenizer import CausalQwenTokenizer
from cqwen_dist.generate.pipeline import register_pipeline
from cqwen_dist.model import CausalQwenConfig, CausalQwenForCausalLM

register_pipeline()
AutoTokenizer.register(CausalQwenConfig, fast_tokenizer_class=CausalQwenTokenizer, exist_ok=True)

__all__ = ["CausalQwenConfig", "CausalQwenForCausalLM", "CausalQwenTokenizer"]
