"""Checks of the Triton kernel's arithmetic, to be run with TRITON_INTERPRET=1 (by test_ovr_triton.py)."""

from __future__ import annotations

from functools import partial

import torch
from support.rounding import install_if_asked
from test_ovr import assert_as_exact, assert_as_exact_as_the_materialised, gradients, problem, relative_error
from test_ovr_sampled import computed

from cqwen_dist.ops.cauchy import log_prob_above
from cqwen_dist.ops.ovr import fused, linear_ovr, one_pass
from cqwen_dist.ops.ovr.fused import FusedTile
from cqwen_dist.ops.ovr.sampled import draw_words
from cqwen_dist.ops.ovr.tile import Tile
from cqwen_dist.ops.ovr.triton import TritonTile
from cqwen_dist.ops.products import fp8_rows

KERNELS = {"triton": TritonTile, "fused": FusedTile}


def tile_of(maths, x, g, w, target, dtype=torch.float32, **more):
    """A tile whose scores are x w^T and g |w|^T, no offset or weights, with its buffers."""
    t, n = len(x), len(w)
    wide = dtype == torch.float32 and not maths.stacked
    given = {
        "offset": torch.zeros(n),
        "token_weights": torch.ones(t),
        "class_weights": None,
        "per_token": torch.zeros(t, dtype=torch.float64),
        "prob_sum": None,
        "gap_sum": None,
    }
    return Tile(
        x=x.to(dtype),
        g=maths.rows(g.to(dtype)),
        w=w.to(dtype),
        abs_w=maths.rows(w.abs().to(dtype)),
        work=torch.empty(maths.buffers, t, n),
        low=torch.empty(0 if wide else 2, t, -(-n // 8) * 8, dtype=dtype)[..., :n],
        target=target,
        **{**given, **more},
    )


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
            for kernel in KERNELS.values() if gamma == 1.0 else [TritonTile]:
                maths = kernel()
                target = torch.full((n,), label)
                tile = tile_of(maths, loc[:, None], scale[:, None], torch.ones(1, 1), target)
                d_loc, d_scale = maths(tile, True)
                torch.testing.assert_close(tile.per_token, exact.detach(), rtol=1e-6, atol=0)
                torch.testing.assert_close(d_loc[:, 0].double(), loc64.grad, rtol=2e-6, atol=1e-30)
                torch.testing.assert_close(d_scale[:, 0].double(), scale64.grad, rtol=2e-6, atol=1e-30)


def whole_losses(impl: str) -> None:
    """Options, odd shapes, several tiles, bf16, inference."""
    for threshold, gamma in ((0.0, 10.0), (15.0, 1e-3), (1e4, 1e-6)):
        leaves, labels = problem(9, 33, 300, gamma=gamma, threshold=threshold)
        assert_as_exact_as_the_materialised(leaves, labels, impl, want_prob_sum=True)
    for shape in ((1, 1, 1), (1, 123, 507), (252, 5, 1)):
        leaves, labels = problem(*shape, gamma=0.1)
        assert_as_exact_as_the_materialised(leaves, labels, impl, want_prob_sum=True)
    one_pass.TILE_BYTES["cpu"] = 4 * 17 * 70
    one_pass.TILE_TOKENS["cpu"] = 17
    leaves, labels = problem(40, 8, 300, gamma=0.1)
    options = {"class_weights": torch.rand(300, 2)[:, 0], "token_weights": torch.rand(40), "want_prob_sum": True}
    assert_as_exact_as_the_materialised(leaves, labels, impl, **options)
    assert_as_exact_as_the_materialised(leaves, labels, impl, slope_limit=0.3, **options)
    one = [*leaves[:3], leaves[4].detach().mean().requires_grad_()]  # one threshold for all words, no bias
    exact, found = (
        linear_ovr(*(leaf.to(dtype) for leaf in one[:3]), None, one[3].to(dtype), labels, impl=kind).loss
        for dtype, kind in ((torch.float64, "reference"), (torch.float32, impl))
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    leaves, labels = problem(40, 8, 300, gamma=0.1, dtype=torch.bfloat16)
    assert_as_exact_as_the_materialised(leaves, labels, impl, **options)
    with torch.no_grad():
        once = linear_ovr(*leaves, labels, impl=impl).loss
    torch.testing.assert_close(once, gradients(leaves, labels, impl=impl)[0])
    one_pass.TILE_BYTES["cpu"], one_pass.TILE_TOKENS["cpu"] = 2 << 20, 512


def many_blocks() -> None:
    """Programs that walk many blocks of words and tokens, grouped; rows for descriptors; a master; no work at all."""
    fused.GROUP = 3
    for dtype in (torch.float32, torch.bfloat16):
        leaves, labels = problem(70, 48, 140, gamma=0.1, dtype=dtype)
        leaves[2] = leaves[2].detach().float().requires_grad_()
        assert_as_exact_as_the_materialised(leaves, labels, "fused", want_prob_sum=True)
    once, again = (gradients(leaves, labels, impl="fused") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True)), "the same bits each time"
    leaves, labels = problem(9, 8, 40, gamma=0.1)
    for frozen in ([0], [0, 1], [2], [3, 4], [1, 2, 3, 4]):
        leaves = [leaf.detach().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]
        assert_as_exact_as_the_materialised(leaves, labels, "fused")
    for n, v in ((0, 10), (4, 0), (0, 0)):
        leaves = [torch.ones(n, 3), torch.ones(n, 3), torch.ones(v, 3), torch.zeros(v), torch.tensor(0.0)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss, grads, _, _ = gradients(leaves, torch.zeros(n, dtype=torch.int64), vocab_start=5, impl="fused")
        assert loss == 0
        assert all((g == 0).all() for g in grads)


def scale_in_fp8() -> None:
    """The kernel in fp8 is the torch operations' emulation: e4m3 operands are multiplied exactly."""
    leaves, labels = problem(40, 48, 140, gamma=0.1, threshold=3.0)
    options = {"want_prob_sum": True, "scale_dtype": "fp8"}
    emulated = gradients(leaves, labels, impl="chunked", **options)
    for impl in KERNELS:
        found = gradients(leaves, labels, impl=impl, **options)
        for a, b in zip((found[0], *found[1], *found[2:]), (emulated[0], *emulated[1], *emulated[2:]), strict=True):
            assert relative_error(a, b.double()) < 1e-4
    x, g, w = (leaf.detach() for leaf in leaves[:3])
    own = FusedTile(fp8=True)
    own.rows = lambda a: fp8_rows(a, torch.float8_e4m3fn)  # as a device with fp8 has it
    held = FusedTile(fp8=True)
    pair = []
    for maths in (own, held):
        tile = tile_of(maths, x, g, w, labels, offset=torch.full((140,), 3.0))
        pair.append((*maths(tile, True), tile.per_token))
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def low_precision_outputs() -> None:
    """Gradients stored in bf16 are the fp32 ones, rounded; the column sums are of those in fp32."""
    loc, scale = torch.randn(5, 40), torch.rand(5, 40) + 0.1
    target, weights = torch.tensor([3, -1, 50, 39, 0]), {"offset": torch.randn(40), "token_weights": torch.rand(5)}
    loc, scale = loc.bfloat16().float(), scale.bfloat16().float()
    for kernel in KERNELS.values():
        maths = kernel()
        gap = [torch.zeros(40), torch.zeros(40)]
        wide = maths(tile_of(maths, loc, scale, torch.eye(40), target, gap_sum=gap[0], **weights), True)
        low = tile_of(maths, loc, scale, torch.eye(40), target, torch.bfloat16, gap_sum=gap[1], **weights)
        for a, b in zip(wide, maths(low, True), strict=True):
            torch.testing.assert_close(a.bfloat16(), b, rtol=1e-2, atol=0)
        torch.testing.assert_close(gap[0], wide[0].sum(0))
        torch.testing.assert_close(gap[1], gap[0], rtol=1e-6 if kernel is FusedTile else 1e-2, atol=1e-6)


def some_of_the_negatives() -> None:
    """Labels that are left out of the drawn rows: the same draw by the torch operations."""
    leaves, labels = problem(9, 33, 700, gamma=0.05)
    for options in ({}, {"class_weights": torch.rand(700), "slope_limit": 0.3}):
        for key in range(2):
            drawn = draw_words(700, 0.4, [key])
            labels[:4] = torch.cat([drawn.always[:2], drawn.some[:2]])
            plain = partial(computed, labels=labels, drawn=drawn, impl="reference", **options)
            for impl in KERNELS:
                assert_as_exact(plain, leaves, computed(leaves, labels, drawn, impl=impl, **options))


if __name__ == "__main__":
    install_if_asked()
    some_of_the_negatives()
    entry_by_entry()
    low_precision_outputs()
    scale_in_fp8()
    many_blocks()
    for each in KERNELS:
        whole_losses(each)
