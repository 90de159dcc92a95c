"""The quick argmax P is the plain one, whether few words remain to be looked at or all of them."""

from __future__ import annotations

import pytest
import torch
from support.numerics import ovr_top_word

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead
from cqwen_dist.ops.ovr.best import best_word, row_sizes


def head(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g) * torch.rand(rows, 1, generator=g)
    return weight, torch.randn(rows, generator=g) * 0.1, torch.randn(rows, generator=g) * 0.1 + 3.0


def law(tokens: int, width: int, spread: float, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = 1e-2 * torch.exp(spread * torch.randn(tokens, width, generator=g))
    return torch.randn(tokens, width, generator=g), scale


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("threshold", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_the_best_word_equals_the_plain_search(spread: float, threshold: float, tokens: int) -> None:
    """Whether every P is below 1/2 (a larger scale helps), above (it hurts), or mixed.

    Or one as good as that to rounding: the two multiply other shapes, and of some 15,000 choices a few are near ties.
    """
    weight, bias, c = head(1003, 37)
    for seed in range(10):
        loc, scale = law(tokens, 37, spread, seed)
        for used in (1003, 400):
            plain = ovr_top_word(loc, scale, weight, bias, c + threshold, used_rows=used).word
            whole = WordHead(weight, bias, c + threshold, used_rows=used)
            for sizes in (row_sizes(weight), None):
                quick = best_word(Cauchy(loc, scale), whole, sizes)
                other = (quick != plain).nonzero()[:, 0]
                above = loc[other].double() @ weight.double().T + (bias - c - threshold).double()
                z = above / (scale[other].double() @ weight.double().abs().T)
                best, found = (z.gather(1, words[other, None]) for words in (plain, quick))
                torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-5)


def test_with_scale_zero_ties_are_broken_by_loc() -> None:
    weight = torch.tensor([[1.0], [3.0], [2.0], [-1.0], [3.0]])
    one, zero = torch.ones(2, 1), torch.zeros(2, 1)
    for sizes in (row_sizes(weight), None):
        for threshold in (0.5, 9.0):
            head = WordHead.of(weight, None, threshold)
            assert best_word(Cauchy(one, zero), head, sizes).tolist() == [1, 1]  # the first of equals
