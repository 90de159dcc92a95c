"""Module 5: the seeds' losses against their formulas in float64, and the fused path against them (S0 5, S2 4)."""

import math

import pytest
import torch
from support.numerics import assert_all_close, assert_close, gradients
from support.tiny import NUM, VOCAB, random_batch, tiny_model
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.heads.fused_loss import LossOptions, LossTerms, TokenLabels, fused_loss
from cqwen_dist.heads.number_head import NumberLabels
from cqwen_dist.heads.seed_losses import CausalQwenLoss, OvrClassificationLoss
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy

B, T, V = 2, 5, 13


def ovr_loss(loc: Tensor, scale: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """S0 5.1 formulas 1-5 as they read, in float64: [B,T], 0 where ignored."""
    p = 0.5 + torch.atan((loc.double() - c.double()) / scale.double()) / math.pi
    y = torch.nn.functional.one_hot(labels.clamp(min=0), loc.shape[-1]).double()
    return -(y * p.log() + (1 - y) * (1 - p).log()).sum(-1) * (labels >= 0)


@pytest.fixture
def scores() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, V, (B, T))
    labels[0, 1] = labels[1, 4] = -100
    return torch.randn(B, T, V) * 3, torch.rand(B, T, V) + 0.05, labels


def test_a_threshold_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"C_ovr must be a number or of shape \(13,\), found \(12,\)"):
        OvrClassificationLoss(V, torch.zeros(V - 1))
    assert not OvrClassificationLoss(V, 100.0).threshold.requires_grad


def test_every_words_threshold_gets_a_gradient(scores: tuple[Tensor, Tensor, Tensor]) -> None:
    """S3 2.5.1. The gradient is the words' loss's over its count: the gate stops P(<NUM>)'s own."""
    loc, scale, labels = scores
    y = torch.ones(labels.shape)
    loss = CausalQwenLoss(V, 4, 0.5, learnable_threshold=True)
    assert loss.ovr_loss.threshold.tolist() == [0.5] * V
    loss(loc, scale, y, y, labels, y, y)[0].backward()
    c = torch.full((V,), 0.5, dtype=torch.float64, requires_grad=True)
    (ovr_loss(loc, scale, c, labels).sum() / (labels != -100).sum()).backward()
    assert_close(loss.ovr_loss.threshold.grad, c.grad, 1e-5, "dL/dC")
    assert len(set(loss.ovr_loss.threshold.grad.tolist())) == V


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_causal_qwen_loss_equals_the_formula(scores: tuple[Tensor, Tensor, Tensor], alpha: float) -> None:
    """S0 5.3: separate denominators, the gate m (alpha + (1 - alpha) P_NUM), the masks."""
    loc, scale, labels = scores
    num = 4
    labels[0, 0] = labels[1, 2] = num
    labels[1, 3] = num
    mask = torch.ones(B, T)
    mask[1, 3:] = 0
    loc_y, scale_y, values = torch.randn(B, T), torch.rand(B, T) + 0.1, torch.randn(B, T)
    total, figures = CausalQwenLoss(V, num, 0.7, alpha, 0.5)(loc, scale, loc_y, scale_y, labels, values, mask)
    cls_mask = (labels >= 0) * mask.double()
    num_mask = (labels == num) * mask.double()
    cls = (ovr_loss(loc, scale, torch.tensor(0.7), labels) * cls_mask).sum() / cls_mask.sum()
    p = 0.5 + torch.atan((loc[..., num].double() - 0.7) / scale[..., num].double()) / math.pi
    nll = (math.pi * scale_y.double()).log() + (1 + ((values - loc_y).double() / scale_y.double()) ** 2).log()
    reg = (num_mask * (alpha + (1 - alpha) * p) * nll).sum() / num_mask.sum()
    assert_close(total, cls + 0.5 * reg, 1e-5, "total")
    assert figures["cls_loss_mean"] == pytest.approx(float(cls), rel=1e-5)
    assert figures["reg_loss_effective"] == pytest.approx(float(reg), rel=1e-5)


def seed_total(model: CausalQwenModel, batch: Batch, **options: object) -> Tensor:
    """CausalQwenLoss on materialised scores, with the model's own threshold."""
    loss = CausalQwenLoss(VOCAB, NUM, model.action.threshold, **options)  # type: ignore[arg-type]
    outputs = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    return loss(*outputs, batch.labels, model.target.forward(batch.numeric_labels), batch.attention_mask)[0]


def fused_total(model: CausalQwenModel, batch: Batch, reg_weight: float = 1.0, **options: object) -> LossTerms:
    """`fused_loss` on the labelled positions, in one process."""
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    z = model.features(batch.input_ids, batch.numeric_values, batch.attention_mask, keep=keep)
    count, numbers = max(keep.numel(), 1), max(int(batch.numeric_mask.sum()), 1)
    if options.get("gate") == "soft":  # every position counts
        numbers = count
    return fused_loss(
        model.action,
        model.abduction(z),
        TokenLabels(batch.labels.flatten()[keep], model.action.number_head.labels(batch, keep)),
        LossOptions(model.config.num_token_id, **options),  # type: ignore[arg-type]
        token_weight=1.0 / count,
        number_weight=reg_weight / numbers,
    )


def worn_model() -> CausalQwenModel:
    """All parameters away from their special starting values; scales of ordinary size."""
    model = tiny_model(number_dims=3, target={"name": "standardise", "median": 2.0, "scale": 20.0})
    torch.manual_seed(4)
    with torch.no_grad():
        for p in [*model.abduction.parameters(), *model.action.parameters(), model.features.embedding.num_row]:
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.mark.parametrize("gate_grad", ["stop", "full"])
@pytest.mark.parametrize(("alpha", "gate"), [(0.4, "alpha"), (0.0, "hard"), (0.4, "soft")])
def test_fused_loss_equals_the_seeds_modules(alpha: float, gate: str, gate_grad: str) -> None:
    """fp32, relative to a tensor's largest entry: 1e-5 of the loss, 1e-4 of gradients, whose terms cancel."""
    batch, model = random_batch(), worn_model()
    options = {"alpha": alpha, "gate": gate, "gate_grad": gate_grad, "reg_weight": 0.7}
    expected = seed_total(model, batch, **options)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    terms = fused_total(model, batch, **options)
    terms.loss.backward()
    assert_close(terms.loss, expected, 1e-5, "loss")
    assert_all_close(gradients(model), wanted, 1e-4)


def test_gate_gradient_stop_and_full_differ_only_through_p_num() -> None:
    batch = random_batch()
    grads = {}
    for gate_grad in ("stop", "full"):
        model = worn_model()
        fused_total(model, batch, gate_grad=gate_grad).loss.backward()
        grads[gate_grad] = gradients(model)
    for name in ("action.reg_weight", "action.reg_bias"):
        assert_close(grads["stop"][name], grads["full"][name], 1e-6, name)
    difference = grads["stop"]["action.threshold"] - grads["full"]["action.threshold"]
    assert float(difference[NUM].abs()) > 1e-3
    difference[NUM] = 0.0
    assert float(difference.abs().max()) < 1e-6


def test_regression_gradient_is_proportional_to_the_gate() -> None:
    """S4 4.3.2: with alpha = 0, d reg/d(W_reg, b_reg) is P_NUM times the ungated one, position by position."""
    model, batch = worn_model(), random_batch(1, 4)
    position = batch.numeric_mask.flatten().nonzero()[:1, 0]
    z = model.features(batch.input_ids, batch.numeric_values, keep=position)
    u = Cauchy(*(t.detach() for t in model.abduction(z)))
    grads, p_num = [], 0.0
    for alpha in (0.0, 1.0):
        terms = fused_loss(
            model.action,
            u,
            TokenLabels(torch.tensor([NUM]), NumberLabels(torch.tensor([3.0]), torch.tensor([True]))),
            LossOptions(NUM, alpha=alpha),
            token_weight=0.0,
            number_weight=1.0,
        )
        grads.append(torch.autograd.grad(terms.loss, model.action.reg_weight)[0])
        p_num = float(terms.p_num)
    assert_close(grads[0], grads[1] * p_num, 1e-5)


def test_a_batch_without_numbers_has_a_regression_loss_of_zero_with_gradients() -> None:
    model, batch = worn_model(), random_batch(numbers=False)
    terms = fused_total(model, batch)
    assert float(terms.reg_sum) == 0.0
    terms.loss.backward()
    grads = gradients(model)
    assert grads["action.reg_weight"].abs().max() == 0.0  # connected, so every rank has a gradient
    assert grads["action.reg_bias"] == 0.0
    assert all(bool(g.isfinite().all()) for g in grads.values())
    total = seed_total(model, batch)
    assert_close(terms.loss, total, 1e-5, "loss")
    assert "action.reg_weight" in grads


def test_a_batch_without_labels_has_a_loss_of_zero_with_gradients() -> None:
    model, batch = worn_model(), random_batch()
    empty = Batch(**{**vars(batch), "labels": torch.full_like(batch.labels, -100)})
    terms = fused_total(model, Batch(**{**vars(empty), "numeric_mask": torch.zeros_like(batch.numeric_mask)}))
    assert terms.prob_sum.shape == terms.p_num.shape == (0,)
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    grads = gradients(model)
    assert {"action.cls_weight", "action.reg_weight", "abduction.loc_net.weight"} <= grads.keys()
    assert all(not g.any() for g in grads.values())
    assert seed_total(model, empty).item() == 0.0


def test_sums_returned_with_the_loss() -> None:
    model, batch = worn_model(), random_batch()
    terms = fused_total(model, batch)
    loc, scale, *_ = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    p = Cauchy(loc, scale).sf(model.action.threshold)[batch.label_mask]
    assert_close(terms.prob_sum, p.sum(-1), 1e-5, "sum P")
    assert_close(terms.p_num, p[:, NUM], 1e-5, "P_NUM")
    per_token = OvrClassificationLoss(VOCAB, model.action.threshold.detach())(loc, scale, batch.labels)[0]
    assert_close(terms.cls_sum, per_token[batch.label_mask].sum(), 1e-5, "cls_sum")
    for t in (terms.cls_sum, terms.reg_sum, terms.prob_sum, terms.p_num):
        assert not t.requires_grad


def test_bf16_gemms_stay_near_fp32() -> None:
    """GEMMs in bf16 (8 bits of mantissa), the rest in fp32: loss within 1 %, gradients within 5 % in norm."""
    batch = random_batch()
    wanted, found = worn_model(), worn_model()
    a, b = fused_total(wanted, batch), fused_total(found, batch, gemm_dtype=torch.bfloat16)
    assert_close(b.loss, a.loss, 1e-2, "loss")
    a.loss.backward()
    b.loss.backward()
    for name in ("action.cls_weight", "abduction.scale_net.bias", "action.threshold", "features.embedding.w_num"):
        x, y = wanted.get_parameter(name).grad, found.get_parameter(name).grad
        assert float((x - y).norm() / x.norm()) < 5e-2, name
