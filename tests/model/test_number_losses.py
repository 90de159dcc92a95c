"""Several values a position, and values of several types (S4 4.7.1, 4.7.2): as the formulas read, by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from support.numerics import assert_close
from torch import Tensor

from cqwen_dist.model.action import ActionNetwork
from cqwen_dist.model.losses import CausalQwenLoss, LossOptions, LossTerms, TokenLabels, fused_loss
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.regression import number_nll

N, C, V, R, NUM = 40, 6, 13, 3, 11
WEIGHTS = torch.tensor([0.5, 2.0, 0.25])


@pytest.fixture
def case() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (N,), generator=draw)
    labels[::4] = NUM
    return {
        "loc": torch.randn(N, C, generator=draw),
        "scale": torch.rand(N, C, generator=draw) + 0.1,
        "labels": labels,
        "values": torch.randn(N, R, generator=draw) * 2,
        "types": torch.randint(-1, R, (N,), generator=draw),
        "p_type": torch.rand(N, R, generator=draw),
    }


def action() -> ActionNetwork:
    torch.manual_seed(1)
    return ActionNetwork(C, V, values=R)


def p_num(model: ActionNetwork, case: dict[str, Tensor]) -> Tensor:
    scores = model.scores(model.add_noise(Cauchy(case["loc"], case["scale"])))
    return (0.5 + torch.atan((scores.loc - model.threshold) / scores.scale) / math.pi)[:, NUM]


def by_hand(model: ActionNetwork, case: dict[str, Tensor], kind: str) -> Tensor:
    """The sum over positions as S4 writes it, in float64, one position and one value after the other."""
    gate = p_num(model, case).detach().double()
    loc = (case["loc"] @ model.reg_weight.T + model.reg_bias).double()
    scale = ((case["scale"] + model.b_noise.abs()) @ model.reg_weight.abs().T).double()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        if case["labels"][i] != NUM:
            continue
        for r in range(R):
            v = case["values"][i, r if kind == "several" else 0].double()
            nll = torch.log(math.pi * scale[i, r]) + torch.log(1 + ((v - loc[i, r]) / scale[i, r]) ** 2)
            if kind == "several":
                total = total + gate[i] * WEIGHTS[r] * nll
            elif case["types"][i] == r:
                total = total + gate[i] * case["p_type"][i, r] * nll
    return total


def fused(model: ActionNetwork, case: dict[str, Tensor], kind: str, **options: object) -> LossTerms:
    several = {"value_weights": WEIGHTS} if kind == "several" else {"types": case["types"], "p_type": case["p_type"]}
    if "value_weights" in options:
        several = {"value_weights": options.pop("value_weights")}  # type: ignore[dict-item]
    labels = TokenLabels(
        case["labels"],
        case["values"] if kind == "several" else case["values"][:, 0],
        case["labels"] == NUM,
        **several,
    )
    u = Cauchy(case["loc"], case["scale"])
    return fused_loss(model, u, labels, LossOptions(NUM, **options), 0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["several", "by type"])
def test_the_formula_and_its_gradients(case: dict[str, Tensor], kind: str) -> None:
    """Loss and gradients of W_reg, b_reg against the sum by hand, relative 1e-5."""
    wanted = action()
    expected = by_hand(wanted, case, kind)
    expected.backward()
    model = action()
    terms = fused(model, case, kind)
    terms.loss.backward()
    assert_close(terms.loss, expected.float(), 1e-5, "loss")
    assert_close(model.reg_weight.grad, wanted.reg_weight.grad, 1e-5, "W_reg")
    assert_close(model.reg_bias.grad, wanted.reg_bias.grad, 1e-5, "b_reg")
    assert float(expected.detach()) != 0.0


@pytest.mark.parametrize("kind", ["several", "by type"])
@pytest.mark.parametrize("gate_grad", ["stop", "full"])
def test_the_seeds_module_gives_the_same(case: dict[str, Tensor], kind: str, gate_grad: str) -> None:
    model = action()
    terms = fused(model, case, kind, gate_grad=gate_grad, alpha=0.3)
    loss = CausalQwenLoss(V, NUM, alpha=0.3, gate_grad=gate_grad, value_weights=WEIGHTS if kind == "several" else None)
    outputs = [t.unsqueeze(0) for t in model(case["loc"], case["scale"])]
    values = case["values"] if kind == "several" else case["values"][:, 0]
    typed = {} if kind == "several" else {name: case[name].unsqueeze(0) for name in ("types", "p_type")}
    labels = case["labels"].unsqueeze(0)
    _, figures = loss(*outputs, labels, values.unsqueeze(0), torch.ones_like(labels), **typed)
    numbers = int((labels == NUM).sum())
    assert figures["reg_loss_effective"] * numbers == pytest.approx(float(terms.reg_sum), rel=1e-5)


@pytest.mark.parametrize("gate_grad", ["stop", "full"])
def test_p_of_the_type_has_gradient_only_when_asked(case: dict[str, Tensor], gate_grad: str) -> None:
    case["p_type"].requires_grad_(True)
    fused(action(), case, "by type", gate_grad=gate_grad).loss.backward()
    grad = case["p_type"].grad
    assert (grad is None) == (gate_grad == "stop")
    if grad is not None:
        assert not grad[case["labels"] != NUM].any()
        true = torch.nn.functional.one_hot(case["types"].clamp(min=0), R).bool() & (case["types"] >= 0)[:, None]
        assert not grad[~true].any()


def test_a_value_that_is_not_there_weighs_nothing(case: dict[str, Tensor]) -> None:
    """Weights by position: 0 where a number has fewer values."""
    weights = WEIGHTS.repeat(N, 1)
    weights[:, 2] = 0.0
    model = action()
    found = fused(model, case, "several", value_weights=weights)
    case["values"][:, 2] = 1e30
    again = fused(model, case, "several", value_weights=weights)
    assert float(found.reg_sum) == float(again.reg_sum)
    found.loss.backward()
    assert model.reg_weight.grad is not None
    assert not model.reg_weight.grad[2].any()


def test_one_value_of_weight_one_is_the_single_value(case: dict[str, Tensor]) -> None:
    nll = torch.randn(N)
    assert torch.equal(number_nll(nll.unsqueeze(-1), torch.ones(1)), nll)
    assert torch.equal(number_nll(nll), nll)


@pytest.mark.parametrize(
    "call",
    [
        lambda nll: number_nll(nll),
        lambda nll: number_nll(nll[:, 0], WEIGHTS),
        lambda nll: number_nll(nll, WEIGHTS, nll, torch.zeros(N, dtype=torch.int64)),
        lambda nll: number_nll(nll, types=torch.zeros(N, dtype=torch.int64)),
    ],
)
def test_what_to_make_of_several_values_must_be_said(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match="value_weights"):
        call(torch.zeros(N, R))
