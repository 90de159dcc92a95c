"""Several values a position, and values of several types (S4 4.7.1, 4.7.2): as the formulas read, by hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from support.numerics import assert_close
from torch import Tensor

from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.fused_loss import LossOptions, LossTerms, TokenLabels, fused_loss
from cqwen_dist.heads.number_kinds import SeveralLabels, TypedLabels
from cqwen_dist.heads.seed_losses import CausalQwenLoss
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
    }


def action(kind: str = "several") -> ActionNetwork:
    torch.manual_seed(1)
    kinds = {"more_values": 2} if kind == "several" else {"number_types": 3}
    return ActionNetwork(C, V, config=SimpleNamespace(**kinds))


def p_num(model: ActionNetwork, case: dict[str, Tensor]) -> Tensor:
    scores = model.scores(model.add_noise(Cauchy(case["loc"], case["scale"])))
    return (0.5 + torch.atan((scores.loc - model.threshold) / scores.scale) / math.pi)[:, NUM]


def by_hand(model: ActionNetwork, case: dict[str, Tensor], kind: str) -> Tensor:
    """The sum over positions as S4 writes it, in float64, one position and one value after the other."""
    gate = p_num(model, case).detach().double()
    loc = (case["loc"] @ model.reg_weight.T + model.reg_bias).double()
    scale = ((case["scale"] + model.b_noise.abs()) @ model.reg_weight.abs().T).double()
    if kind == "by type":
        p_type = 0.5 + torch.atan(loc[:, R:] / scale[:, R:]) / math.pi
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
                total = total + gate[i] * p_type[i, r].detach() * nll
    return total


def fused(model: ActionNetwork, case: dict[str, Tensor], kind: str, **options: object) -> LossTerms:
    is_number, weights = case["labels"] == NUM, options.pop("value_weights", WEIGHTS)
    if kind == "several":
        labels = TokenLabels(case["labels"], SeveralLabels(case["values"], is_number, weights))
    else:
        labels = TokenLabels(case["labels"], TypedLabels(case["values"][:, 0], is_number, case["types"]))
    u, token_weight = Cauchy(case["loc"], case["scale"]), float(options.pop("token_weight", 0.0))  # type: ignore[arg-type]
    return fused_loss(model, u, labels, LossOptions(NUM, **options), token_weight, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["several", "by type"])
def test_number_losses_equal_the_formula_with_its_gradients(case: dict[str, Tensor], kind: str) -> None:
    """Loss and gradients of W_reg, b_reg against the sum by hand, relative 1e-5."""
    wanted = action(kind)
    expected = by_hand(wanted, case, kind)
    expected.backward()
    model = action(kind)
    terms = fused(model, case, kind)
    terms.loss.backward()
    assert_close(terms.loss, expected.float(), 1e-5, "loss")
    assert_close(model.reg_weight.grad, wanted.reg_weight.grad, 1e-5, "W_reg")
    assert_close(model.reg_bias.grad, wanted.reg_bias.grad, 1e-5, "b_reg")
    assert float(expected.detach()) != 0.0


@pytest.mark.parametrize("kind", ["several", "by type"])
@pytest.mark.parametrize("gate_grad", ["stop", "full"])
def test_the_seeds_module_gives_the_same_loss(case: dict[str, Tensor], kind: str, gate_grad: str) -> None:
    model = action(kind)
    terms = fused(model, case, kind, gate_grad=gate_grad, alpha=0.3)
    loss = CausalQwenLoss(V, NUM, alpha=0.3, gate_grad=gate_grad, value_weights=WEIGHTS if kind == "several" else None)
    u_prime = model.add_noise(Cauchy(case["loc"], case["scale"]))
    outputs = [t.unsqueeze(0) for law in (model.scores(u_prime), model.number_head.values(u_prime)) for t in law]
    values = case["values"] if kind == "several" else case["values"][:, 0]
    typed = {}
    if kind == "by type":
        typed = {"types": case["types"][None], "p_type": model.number_head.type_scores(u_prime).sf(0.0)[None]}
    labels = case["labels"].unsqueeze(0)
    _, figures = loss(*outputs, labels, values.unsqueeze(0), torch.ones_like(labels), **typed)
    numbers = int((labels == NUM).sum())
    assert figures["reg_loss_effective"] * numbers == pytest.approx(float(terms.reg_sum), rel=1e-5)


@pytest.mark.parametrize("gate_grad", ["stop", "full"])
def test_the_gate_gives_the_type_a_gradient_only_with_gate_grad_full(case: dict[str, Tensor], gate_grad: str) -> None:
    """Its own cross entropy, one against the rest, trains it whatever the gate does; against float64."""
    model = action("by type")
    fused(model, case, "by type", gate_grad=gate_grad).loss.backward()
    scores = model.reg_weight.grad[R:]
    assert bool(scores.any()) == (gate_grad == "full")
    for p in model.parameters():
        p.grad = None
    both = fused(model, case, "by type", token_weight=0.3)
    without = fused(model, {**case, "types": torch.full((N,), -1)}, "by type", token_weight=0.3)
    wide = copy.deepcopy(model).double()
    s = wide.number_head.type_scores(wide.add_noise(Cauchy(case["loc"].double(), case["scale"].double())))
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        for t in range(R) if case["labels"][i] == NUM and case["types"][i] >= 0 else ():
            p = 0.5 + torch.atan(s.loc[i, t] / s.scale[i, t]) / math.pi
            expected = expected - torch.log(p if case["types"][i] == t else 1 - p)
    assert float(both.cls_sum - without.cls_sum) == pytest.approx(float(expected), rel=1e-5)
    both.loss.backward()
    (0.3 * expected).backward()
    assert_close(model.reg_weight.grad[R:], wide.reg_weight.grad[R:].float(), 1e-4, "scores of the types")


def test_the_predicted_value_is_that_of_the_likeliest_type(case: dict[str, Tensor]) -> None:
    model = action("by type")
    u = model.add_noise(Cauchy(case["loc"], case["scale"]))
    kind, y, laws = (
        model.number_head.type_scores(u).sf(0.0).argmax(-1),
        model.number_head.value(u),
        model.number_head.values(u),
    )
    assert len(kind.unique()) > 1
    assert torch.equal(y.loc, laws.loc[torch.arange(N), kind])
    assert torch.equal(y.scale, laws.scale[torch.arange(N), kind])


def test_missing_values_have_weight_zero(case: dict[str, Tensor]) -> None:
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


def test_one_value_of_weight_one_equals_the_plain_number_loss(case: dict[str, Tensor]) -> None:
    nll = torch.randn(N)
    assert torch.equal(number_nll(nll.unsqueeze(-1), torch.ones(1)), nll)
    assert torch.equal(number_nll(nll), nll)


@pytest.mark.parametrize("more", [{}, {"types": torch.zeros(N, dtype=torch.int64)}])
def test_several_values_need_a_reduction(more: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="value_weights"):
        number_nll(torch.zeros(N, R), **more)
