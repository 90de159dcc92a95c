"""Tensor maths of the model: the Cauchy law, the one-vs-rest (OvR) loss, regression. No config, no process group.

Letters used throughout: N tokens, C causal dimension, V vocabulary, v rows of a vocabulary slice, K outputs.
"""
