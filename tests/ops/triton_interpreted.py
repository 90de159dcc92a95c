"""Checks of the Triton kernel's arithmetic, to be run with TRITON_INTERPRET=1 (by test_ovr_triton.py)."""

from __future__ import annotations

import torch
from test_ovr import assert_as_exact_as_the_materialised, gradients, problem, relative_error
from test_ovr_sampled import computed

from cqwen_dist.ops.cauchy import log_prob_above
from cqwen_dist.ops.ovr import one_pass
from cqwen_dist.ops.ovr.sampled import draw_words
from cqwen_dist.ops.ovr.tile import Tile
from cqwen_dist.ops.ovr.triton import TritonTile


def entry_by_entry() -> None:
    """Loss and gradients of single entries, z from -1e9 to 1e9."""
    z = torch.cat([-torch.logspace(9, -9, 150), torch.zeros(1), torch.logspace(-9, 9, 150)])
    n = z.numel()
    for gamma in (1e-6, 1.0, 10.0):
        for label in (-1, 0):
            loc, scale = z * gamma, torch.full((n,), gamma)
            loc64, scale64 = loc.double().requires_grad_(), scale.double().requires_grad_()
            exact = -log_prob_above(scale64, -loc64 if label == 0 else loc64)
            exact.sum().backward()
            per_token = torch.zeros(n, dtype=torch.float64)
            tile = Tile(
                loc[:, None].clone(),
                scale[:, None].clone(),
                [],
                [],
                torch.zeros(1),
                torch.full((n,), label),
                torch.ones(n),
                None,
                per_token,
                None,
            )
            d_loc, d_scale = TritonTile()(tile, True)
            torch.testing.assert_close(per_token, exact.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(d_loc[:, 0].double(), loc64.grad, rtol=2e-6, atol=1e-30)
            torch.testing.assert_close(d_scale[:, 0].double(), scale64.grad, rtol=2e-6, atol=1e-30)


def whole_losses() -> None:
    """Options, odd shapes, several tiles, bf16, inference."""
    for threshold, gamma in ((0.0, 10.0), (15.0, 1e-3), (1e4, 1e-6)):
        leaves, labels = problem(9, 33, 300, gamma=gamma, threshold=threshold)
        assert_as_exact_as_the_materialised(leaves, labels, "triton", want_prob_sum=True)
    for shape in ((1, 1, 1), (1, 123, 507), (252, 5, 1)):
        leaves, labels = problem(*shape, gamma=0.1)
        assert_as_exact_as_the_materialised(leaves, labels, "triton", want_prob_sum=True)
    one_pass.TILE_BYTES["cpu"] = 4 * 17 * 70
    one_pass.TILE_TOKENS["cpu"] = 17
    leaves, labels = problem(40, 8, 300, gamma=0.1)
    options = {"class_weights": torch.rand(300), "token_weights": torch.rand(40), "want_prob_sum": True}
    assert_as_exact_as_the_materialised(leaves, labels, "triton", **options)
    assert_as_exact_as_the_materialised(leaves, labels, "triton", slope_limit=0.3, **options)
    leaves, labels = problem(40, 8, 300, gamma=0.1, dtype=torch.bfloat16)
    assert_as_exact_as_the_materialised(leaves, labels, "triton", **options)
    with torch.no_grad():
        once = gradients_free(leaves, labels)
    torch.testing.assert_close(once, gradients(leaves, labels, impl="triton")[0])


def gradients_free(leaves: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    from cqwen_dist.ops.ovr import linear_ovr

    return linear_ovr(*leaves, labels, impl="triton").loss


def low_precision_outputs() -> None:
    """Gradients stored in bf16 are the fp32 ones, rounded."""
    loc, scale = torch.randn(5, 40), torch.rand(5, 40) + 0.1
    rest = (torch.randn(40), torch.tensor([3, -1, 50, 39, 0]), torch.rand(5), None)
    make = lambda low: Tile(loc.clone(), scale.clone(), [], low, *rest, torch.zeros(5, dtype=torch.float64), None)  # noqa: E731
    wide = TritonTile()(make([]), True)
    low = TritonTile()(make([torch.empty(5, 40, dtype=torch.bfloat16) for _ in range(2)]), True)
    for a, b in zip(wide, low, strict=True):
        torch.testing.assert_close(a.bfloat16(), b, rtol=1e-2, atol=0)


def some_of_the_negatives() -> None:
    """Labels that are left out of the drawn rows: the same draw by the torch operations."""
    leaves, labels = problem(9, 33, 700, gamma=0.05)
    for options in ({}, {"class_weights": torch.rand(700), "slope_limit": 0.3}):
        for key in range(2):
            drawn = draw_words(700, 0.4, [key])
            labels[:4] = torch.cat([drawn.always[:2], drawn.some[:2]])
            exact = computed([leaf.detach().double() for leaf in leaves], labels, drawn, impl="reference", **options)
            plain = computed(leaves, labels, drawn, impl="reference", **options)
            found = computed(leaves, labels, drawn, impl="triton", **options)
            for e, p, f in zip(*((r[0], *r[1], *r[2:]) for r in (exact, plain, found)), strict=True):
                assert relative_error(f, e) <= 2 * relative_error(p, e) + 1e-6


if __name__ == "__main__":
    some_of_the_negatives()
    entry_by_entry()
    low_precision_outputs()
    whole_losses()
