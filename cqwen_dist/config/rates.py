"""The learning rate that a base's hidden size decides."""

from __future__ import annotations

DENSE = 0.012  # U moves by about this share of a feature's size in an Adam step (docs/training.md)


def dense_rate(hidden: int) -> float:
    """Peak rate of W_loc, a dense map [H,H] that starts at the identity: a step moves every entry by the rate."""
    return DENSE / hidden
