"""Several values a position, and values of several types (S4 4.7.1, 4.7.2): the seeds' module against the formulas."""

import math

import pytest
import torch
from support.numerics import assert_close
from torch import Tensor

from cqwen_dist.heads.seed_losses import CausalQwenLoss, one_nll
from cqwen_dist.ops.cauchy import Cauchy

N, C, V, R, NUM, ALPHA = 40, 6, 13, 3, 11, 0.3
WEIGHTS = torch.tensor([0.5, 2.0, 0.25])


@pytest.fixture
def case() -> dict[str, Tensor]:
    """Scores of words, U, W_reg [2R,C] (rows of values, then of types), and labels of N positions."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (N,), generator=draw)
    labels[::4] = NUM
    return {
        "loc_S": torch.randn(N, V, generator=draw),
        "scale_S": torch.rand(N, V, generator=draw) + 0.1,
        "loc": torch.randn(N, C, generator=draw),
        "scale": torch.rand(N, C, generator=draw) + 0.1,
        "reg_weight": torch.randn(2 * R, C, generator=draw).requires_grad_(),
        "labels": labels,
        "values": torch.randn(N, R, generator=draw) * 2,
        "types": torch.randint(-1, R, (N,), generator=draw),
    }


def by_hand(case: dict[str, Tensor], kind: str) -> Tensor:
    """The sum over positions as S4 writes it, in float64, one position and one value after the other."""
    p_num = 0.5 + torch.atan(case["loc_S"][:, NUM].double() / case["scale_S"][:, NUM].double()) / math.pi
    weight = case["reg_weight"].double()
    loc, scale = case["loc"].double() @ weight.T, case["scale"].double() @ weight.abs().T
    p_type = 0.5 + torch.atan(loc[:, R:] / scale[:, R:]).detach() / math.pi
    total = torch.zeros((), dtype=torch.float64)
    for i in (case["labels"] == NUM).nonzero()[:, 0].tolist():
        for r in range(R):
            v = case["values"][i, r if kind == "several" else 0].double()
            nll = torch.log(math.pi * scale[i, r]) + torch.log(1 + ((v - loc[i, r]) / scale[i, r]) ** 2)
            if kind == "several":
                total = total + (ALPHA + (1 - ALPHA) * p_num[i]) * WEIGHTS[r] * nll
            elif case["types"][i] == r:
                total = total + (ALPHA + (1 - ALPHA) * p_num[i]) * p_type[i, r] * nll
    return total / (case["labels"] == NUM).sum()


def of_module(case: dict[str, Tensor], kind: str, gate_grad: str = "stop", weights: Tensor = WEIGHTS) -> Tensor:
    """The regression's part of `CausalQwenLoss`, with its graph: the words' loss needs none of W_reg."""
    every = Cauchy(case["loc"], case["scale"]).affine(case["reg_weight"], torch.zeros(2 * R))
    y, scores = Cauchy(*(part[:, :R] for part in every)), Cauchy(*(part[:, R:] for part in every))
    several = kind == "several"
    loss = CausalQwenLoss(V, NUM, alpha=ALPHA, gate_grad=gate_grad, value_weights=weights if several else None)
    typed = {} if several else {"types": case["types"][None], "p_type": scores.sf(0.0)[None]}
    values = case["values"] if several else case["values"][:, 0]
    outputs = (part[None] for part in (case["loc_S"], case["scale_S"], *y))
    labels = case["labels"][None]
    total, figures = loss(*outputs, labels, values[None], torch.ones_like(labels), **typed)
    return total - figures["cls_loss_mean"]


@pytest.mark.parametrize("kind", ["several", "by type"])
def test_the_seeds_module_equals_the_formula_with_its_gradients(case: dict[str, Tensor], kind: str) -> None:
    """Loss and gradient of W_reg against the sum by hand. The loss is a difference of two, so within 1e-4."""
    expected, found = by_hand(case, kind), of_module(case, kind)
    assert float(expected.detach()) != 0.0
    assert_close(found, expected.float(), 1e-4, "loss")
    (wanted,) = torch.autograd.grad(expected, case["reg_weight"])
    (gradient,) = torch.autograd.grad(found, case["reg_weight"])
    assert_close(gradient, wanted, 1e-5, "W_reg")


@pytest.mark.parametrize("gate_grad", ["stop", "full"])
def test_the_gate_gives_the_type_a_gradient_only_with_gate_grad_full(case: dict[str, Tensor], gate_grad: str) -> None:
    (gradient,) = torch.autograd.grad(of_module(case, "by type", gate_grad), case["reg_weight"])
    assert bool(gradient[R:].any()) == (gate_grad == "full")
    assert bool(gradient[:R].any())


def test_missing_values_have_weight_zero(case: dict[str, Tensor]) -> None:
    """Weights by position: 0 where a number has fewer values."""
    weights = WEIGHTS.repeat(N, 1)
    weights[:, 2] = 0.0
    found = of_module(case, "several", weights=weights)
    case["values"][:, 2] = 1e30
    again = of_module(case, "several", weights=weights)
    assert float(found.detach()) == float(again.detach())
    (gradient,) = torch.autograd.grad(again, case["reg_weight"])
    assert not gradient[2].any()


def test_one_value_of_weight_one_equals_the_plain_number_loss() -> None:
    nll = torch.randn(N)
    assert torch.equal(one_nll(nll.unsqueeze(-1), torch.ones(1), None, None), nll)


@pytest.mark.parametrize("types", [None, torch.zeros(N, dtype=torch.int64)])
def test_several_values_need_a_reduction(types: Tensor | None) -> None:
    with pytest.raises(ValueError, match="value_weights"):
        one_nll(torch.zeros(N, R), None, None, types)
