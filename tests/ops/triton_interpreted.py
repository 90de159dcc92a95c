"""Checks of the Triton kernel's arithmetic, to be run with TRITON_INTERPRET=1 (by test_ovr_triton.py)."""

import torch
from support.rounding import install_if_asked
from test_ovr import assert_as_exact_as_the_materialised, gradients, problem

from cqwen_dist import tiles
from cqwen_dist.ops.cauchy import Cauchy, log_prob_above
from cqwen_dist.ops.ovr import TermOptions, linear_ovr
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.ovr.loss import OvrOptions, ovr_loss
from cqwen_dist.ops.ovr.seen import Wanted
from cqwen_dist.ops.ovr.tile import Tile
from cqwen_dist.ops.ovr.triton import TritonTile


def tile_of(x, g, w, target, dtype=torch.float32, **more):
    """A tile with the scores x w^T and g |w|^T, no offset or weights, with its buffers."""
    t, n = len(x), len(w)
    size = t, -(-n // tiles.ROW_NUMBERS) * tiles.ROW_NUMBERS
    given = {
        "offset": torch.zeros(n),
        "leading": torch.zeros(n, dtype=dtype),
        "token_weights": torch.ones(t),
        "class_weights": None,
        "per_token": torch.zeros(t, dtype=torch.float64),
        "prob_sum": None,
        "gap_sum": None,
        "bias": torch.zeros(n),
    }
    tile = Tile(
        x=x.to(dtype),
        g=g.to(dtype),
        w=w.to(dtype),
        abs_w=w.abs().to(dtype),
        work=torch.empty(TritonTile.buffers, *size)[..., :n],
        low=torch.empty(0 if dtype == torch.float32 else 2, *size, dtype=dtype)[..., :n],
        target=target,
        **{**given, **more},
    )
    tile.scores(TritonTile.reads_gap)
    return tile


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
            tile = tile_of(loc[:, None], scale[:, None], torch.ones(1, 1), torch.full((n,), label))
            d_loc, d_scale = TritonTile()(tile, True)
            torch.testing.assert_close(tile.per_token, exact.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(d_loc[:, 0].double(), loc64.grad, rtol=2e-6, atol=1e-30)
            torch.testing.assert_close(d_scale[:, 0].double(), scale64.grad, rtol=2e-6, atol=1e-30)


def whole_losses(impl: str = "triton") -> None:
    """Options, odd shapes, several tiles, bf16, inference."""
    for threshold, gamma in ((0.0, 10.0), (15.0, 1e-3), (1e4, 1e-6)):
        leaves, labels = problem(9, 33, 300, gamma=gamma, threshold=threshold)
        assert_as_exact_as_the_materialised(leaves, labels, impl, want_prob_sum=True)
    for shape in ((1, 1, 1), (1, 123, 507), (252, 5, 1)):
        leaves, labels = problem(*shape, gamma=0.1)
        assert_as_exact_as_the_materialised(leaves, labels, impl, want_prob_sum=True)
    tiles.TILE_BYTES["cpu"] = 4 * 17 * 70
    tiles.TILE_TOKENS["cpu"] = 17
    leaves, labels = problem(40, 8, 300, gamma=0.1)
    options = {"class_weights": torch.rand(300, 2)[:, 0], "token_weights": torch.rand(40), "want_prob_sum": True}
    assert_as_exact_as_the_materialised(leaves, labels, impl, **options)
    assert_as_exact_as_the_materialised(leaves, labels, impl, terms=TermOptions(slope_limit=0.3), **options)
    assert_as_exact_as_the_materialised(leaves, labels, impl, terms=TermOptions(0.3, 3.0), **options)
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
    tiles.TILE_BYTES["cpu"], tiles.TILE_TOKENS["cpu"] = 2 << 20, 512


def low_precision_outputs() -> None:
    """Gradients stored in bf16 are the fp32 ones, rounded; the column sums are of those in fp32."""
    loc, scale = torch.randn(5, 40), torch.rand(5, 40) + 0.1
    target, weights = torch.tensor([3, -1, 50, 39, 0]), {"offset": torch.randn(40), "token_weights": torch.rand(5)}
    loc, scale = loc.bfloat16().float(), scale.bfloat16().float()
    maths, gap = TritonTile(), [torch.zeros(40), torch.zeros(40)]
    wide = maths(tile_of(loc, scale, torch.eye(40), target, gap_sum=gap[0], **weights), True)
    low = tile_of(loc, scale, torch.eye(40), target, torch.bfloat16, gap_sum=gap[1], **weights)
    for a, b in zip(wide, maths(low, True), strict=True):
        torch.testing.assert_close(a.bfloat16(), b, rtol=1e-2, atol=0)
    torch.testing.assert_close(gap[0], wide[0].sum(0))
    torch.testing.assert_close(gap[1], gap[0])


def what_a_pass_sees() -> None:
    """Best word, normaliser and counts equal those of the torch operations, in one chunk a tile and in several."""
    (loc, scale, weight, bias, threshold), labels = problem(40, 8, 300, gamma=0.1)
    wanted = Wanted(below=290, norm=True, thresholds=(0.3, 0.9))

    def passed(impl: str) -> list[torch.Tensor]:
        with torch.no_grad():
            out = ovr_loss(
                Cauchy(loc, scale),
                WordHead(weight, bias, threshold),
                labels,
                options=OvrOptions(impl=impl, seen=wanted),
            )
        assert out.seen is not None
        assert out.best is not None
        return [out.best.word.double(), out.best.loc, out.seen.log_norm, out.seen.above]

    expected = passed("chunked")
    for chunk in (1 << 20, 4 * 7 * 5):
        tiles.CHUNK_BYTES["cpu"] = chunk
        for found, own in zip(passed("triton"), expected, strict=True):
            torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    tiles.CHUNK_BYTES["cpu"] = 8 << 20


if __name__ == "__main__":
    install_if_asked()
    entry_by_entry()
    low_precision_outputs()
    what_a_pass_sees()
    whole_losses()
