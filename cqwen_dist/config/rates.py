"""The learning rates that a base's hidden size decides."""

DENSE = 0.012  # U moves by about this share of a feature's size in an Adam step (docs/training.md)


def dense_rate(hidden: int) -> float:
    """Peak rate of W_loc, a dense map [H,H] that starts at the identity: a step moves every entry by the rate."""
    return DENSE / hidden


def group_rates(hidden: int) -> dict[str, float]:
    """Peak rates of the heads' other groups, if W_loc has `dense_rate` (docs/training.md, Rates)."""
    rate = dense_rate(hidden)
    return {"classifier": rate / 10, "regression": rate * 10, "thresholds": 1e-3}
