"""Where a step's gradient is clipped: at a number, or at three times what is usual in this stage."""

import json
import math
import statistics

from cqwen_dist.training.zero.engine import UsualNorm


def test_the_usual_limit_is_three_times_the_median_of_64_norms() -> None:
    usual, norms = UsualNorm(None), [float(1 + (37 * k) % 101) for k in range(200)]
    for k, norm in enumerate(norms):
        expected = 3 * statistics.median(norms[max(0, k - 64) : k]) if k >= 5 else math.inf
        assert usual.limit() == expected
        usual.add(norm)
    assert usual.seen == norms[-64:]
    again = UsualNorm(None)
    again.seen = list(json.loads(json.dumps(usual.seen)))
    assert again.limit() == usual.limit()
    fixed, zero = UsualNorm(1.5), UsualNorm(None)
    for _ in range(10):
        fixed.add(1e6)
        zero.add(0.0)  # w_num alone on texts without numbers: 0/0 would be in every weight
    assert (fixed.limit(), zero.limit()) == (1.5, math.inf)
