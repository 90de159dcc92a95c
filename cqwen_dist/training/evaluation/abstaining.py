"""What abstaining buys (S4 3.3.3): the errors of held-out answers, the surest first.

The doubt of a word is its surprise under softmax(loc_S), which tells wrong words better than P, sum P or the scales do
(docs/experiments.md); the doubt of a number is scale_Y, to which the width of its interval is proportional.
"""

import math
from collections.abc import Callable

import numpy as np

from cqwen_dist.heads.intervals import SHARES


def surest(doubt: np.ndarray, error: np.ndarray, of: Callable[[np.ndarray], float]) -> tuple[list[float], list[float]]:
    """(largest doubt, risk) of the surest share of N answers, for each of `SHARES`; nothing without any.

    doubt [N], error [N]: of each answer. of: the risk of some errors, such as their mean.
    """
    if not len(doubt):
        return [], []
    order = np.argsort(doubt, kind="stable")
    ends = [max(1, round(share * len(order))) for share in SHARES]
    return [float(doubt[order[end - 1]]) for end in ends], [float(of(error[order[:end]])) for end in ends]


def risk_80(risks: list[float]) -> float:
    """The risk of the surest 80 %, out of those for `SHARES`; NaN without any."""
    return risks[SHARES.index(0.8)] if risks else math.nan
