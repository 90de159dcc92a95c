"""The regression loss and its gates: formulas and limits."""

import pytest
import torch

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import GATES

MASK = torch.tensor([True, False, True])
P = torch.tensor([0.9, 0.4, 0.2])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gates_equal_their_formulas(alpha):
    m = MASK.float()
    torch.testing.assert_close(GATES["alpha"](MASK, P, alpha), m * (alpha + (1 - alpha) * P))
    torch.testing.assert_close(GATES["soft"](MASK, P, alpha), (alpha + (1 - alpha) * m) * P)
    torch.testing.assert_close(GATES["hard"](MASK, P, alpha), m * P)


def test_regression_gradient_scales_with_p_num_and_only_at_numbers():
    loc = torch.zeros(3, requires_grad=True)
    nll = Cauchy(loc, torch.ones(3)).nll(torch.full((3,), 2.0))
    (GATES["alpha"](MASK, P, 0.0) * nll).sum().backward()
    plain = -2 * 2.0 / (1 + 4.0)
    torch.testing.assert_close(loc.grad, plain * P * MASK)
