"""Tensor maths of the model: the Cauchy law, the one-vs-rest (OvR) loss, regression. No config, no process group.

Shape letters in this package: N tokens, C causal dimensions, V vocabulary, v words of a vocabulary slice, K outputs.
"""
