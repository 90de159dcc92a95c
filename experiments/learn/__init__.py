"""`python -m experiments.learn`: one base, fine-tuned on the same texts as CausalQwen and with ordinary LoRA."""
