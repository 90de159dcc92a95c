"""The scale's product in fp8 against float64: its operands are rounded to 3 bits, but nothing in it cancels."""

from __future__ import annotations

import math

import pytest
import torch
from test_ovr import gradients, problem

from cqwen_dist.ops.ovr import linear_ovr
from cqwen_dist.ops.products import fp8_rows


def calibrated(n: int = 64, c: int = 256, v: int = 3000) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As a calibrated start has them: logits of deviation 3.5, C = 15 near the largest, scale_S about 1e-3."""
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(v, c, generator=make) * 0.0156 * (0.5 + torch.rand(v, 1, generator=make))
    loc_u = torch.randn(n, c, generator=make) * 3.5 / (0.0156 * math.sqrt(c))
    scale_u = 1e-3 / (0.0125 * c) * torch.exp(0.5 * torch.randn(n, c, generator=make))
    threshold = 15 + 0.5 * torch.randn(v, generator=make)
    best = (loc_u @ weight.T).argmax(1)
    labels = torch.where(torch.rand(n, generator=make) < 0.6, best, torch.randint(v, (n,), generator=make))
    return [t.requires_grad_() for t in (loc_u, scale_u, weight, torch.zeros(v), threshold)], labels


def test_fp8_rows_keep_sums_and_each_number_to_a_sixteenth() -> None:
    rows = torch.rand(40, 123).square() * torch.logspace(-9, 9, 40)[:, None]
    rows[3] = 0.0
    found = fp8_rows(rows, torch.float32)
    assert found.factor is not None
    back = found.values * found.factor[:, None]
    torch.testing.assert_close(back.sum(1), rows.sum(1))
    large = rows > rows.amax(1, keepdim=True) * 2**-14
    assert ((back - rows).abs()[large] <= 0.07 * rows[large]).all()
    own = fp8_rows(rows, torch.float8_e4m3fn)
    assert torch.equal(own.values.float(), found.values)
    assert torch.equal(fp8_rows(rows, torch.bfloat16).values.float(), found.values)


def test_fp8_scales_are_unbiased_to_a_thousandth() -> None:
    make = torch.Generator().manual_seed(0)
    g = 1e-4 * torch.exp(0.5 * torch.randn(60, 896, generator=make))
    w = (torch.randn(700, 896, generator=make) * 0.0156).abs()
    left, right = fp8_rows(g, torch.float32), fp8_rows(w, torch.float32)
    found = left.values @ right.values.T * left.factor[:, None] * right.factor
    error = found.double() / (g.double() @ w.double().T) - 1
    assert error.square().mean().sqrt() < 1.5e-3
    assert error.mean().abs() < 2e-5


@pytest.mark.parametrize("kind", ["synthetic", "calibrated"])
def test_loss_and_gradients_against_float64(kind: str) -> None:
    """Relative errors over whole tensors; the bounds are about twice what is found (docs/decisions.md, D-fp8)."""
    leaves, labels = calibrated() if kind == "calibrated" else problem(64, 256, 3000, gamma=0.1, ignored=False)
    options = {"slope_limit": 1.0, "want_prob_sum": True}
    exact = gradients(leaves, labels, torch.float64, impl="reference", **options)
    found = gradients(leaves, labels, impl="chunked", scale_dtype="fp8", **options)

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    assert error(found[0], exact[0]) < 1e-4
    assert error(found[3], exact[3]) < 2e-3
    for name, bound, a, e in zip(("loc_u", "scale_u", "W", "b", "C"), BOUNDS[kind], found[1], exact[1], strict=True):
        assert error(a, e) < bound, name


BOUNDS = {"synthetic": (2e-3, 5e-4, 2e-3, 5e-4, 5e-4), "calibrated": (2e-4, 3e-3, 2e-4, 2e-4, 2e-4)}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 123, 507), (252, 123, 1), (252, 32, 507), (0, 3, 10), (4, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_shapes_dtypes_and_masters(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    leaves, labels = problem(max(1, shape[0]), shape[1], max(1, shape[2]), gamma=0.1, dtype=dtype)
    leaves = [leaf.detach()[:size] for leaf, size in zip(leaves, (shape[0], shape[0], *[shape[2]] * 3), strict=True)]
    leaves[2] = leaves[2].float()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    labels = labels[: shape[0]]
    near = gradients(leaves, labels, vocab_size=1000, impl="chunked")
    found = gradients(leaves, labels, vocab_size=1000, impl="chunked", scale_dtype="fp8")
    torch.testing.assert_close(found[0], near[0], rtol=0.02, atol=1e-6)
    assert all(torch.isfinite(g).all() and g.dtype == leaf.dtype for g, leaf in zip(found[1], leaves, strict=True))


def test_unsupported_fp8_settings_are_refused() -> None:
    leaves, labels = problem(5, 8, 30)
    for options in ({"scale_dtype": "fp8", "impl": "reference"}, {"scale_dtype": "fp4"}):
        with pytest.raises(ValueError, match="scale_dtype must be one of"):
            linear_ovr(*leaves, labels, **options)
