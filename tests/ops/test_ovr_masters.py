"""Tokens in bf16, weight an fp32 master: no copy of the weight, and its gradient is never rounded to bf16."""

from __future__ import annotations

import pytest
import torch
from support.numerics import assert_close, ovr_prob_at, ovr_prob_sum, ovr_top_word

from cqwen_dist.ops.ovr import linear_ovr


def problem() -> tuple[list[torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, s = torch.randn(20, 7, generator=g).bfloat16(), (torch.rand(20, 7, generator=g) + 0.1).bfloat16()
    weight, threshold = torch.randn(53, 7, generator=g), torch.randn(53, generator=g)
    return [x, s, weight, threshold], torch.randint(0, 53, (20,), generator=g)


@pytest.mark.parametrize(("impl", "tolerance"), [("chunked", 5e-3), ("reference", 2e-2)])
def test_the_gradient_of_a_master_is_fp32(impl: str, tolerance: float) -> None:
    inputs, labels = problem()
    x, s, weight, threshold = (t.clone().requires_grad_() for t in inputs)
    out = linear_ovr(x, s, weight, None, threshold, labels, impl=impl)
    out.loss.backward()
    exact = [t.double().requires_grad_() for t in inputs]
    expected = linear_ovr(exact[0], exact[1], exact[2], None, exact[3], labels, impl="reference")
    expected.loss.backward()
    assert_close(out.loss, expected.loss.float(), tolerance, "loss")
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    error = (weight.grad - exact[2].grad).norm() / exact[2].grad.norm()
    assert error <= tolerance, f"{error:.1e}"


def test_heads_accept_fp32_masters() -> None:
    (x, s, weight, threshold), _ = problem()
    rounded = weight.bfloat16()
    best, plain = (ovr_top_word(x, s, w, None, threshold).word for w in (weight, rounded))
    assert torch.equal(best, plain)
    assert_close(ovr_prob_sum(x, s, weight, None, threshold), ovr_prob_sum(x, s, rounded, None, threshold), 1e-6, "sum")
    word = torch.tensor([4])
    found = ovr_prob_at(x, s, weight, None, threshold, word)
    assert_close(found, ovr_prob_at(x, s, rounded, None, threshold, word).float(), 1e-6, "P")


def test_other_mixtures_of_dtypes_are_refused() -> None:
    (x, s, weight, threshold), labels = problem()
    for mixture in (
        (x.float(), s, weight),
        (x.double(), s.double(), weight),
        (x.float(), s.float(), weight.bfloat16()),
    ):
        with pytest.raises(TypeError, match="one dtype wanted"):
            linear_ovr(*mixture, None, threshold, labels)
