"""The quick argmax P is the plain one, whether few words remain to be looked at or all of them."""

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
            for sizes, near in ((row_sizes(weight), None), (None, None), (None, weight.bfloat16())):
                quick = best_word(Cauchy(loc, scale), whole, sizes, near)
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


def test_the_fp32_rows_decide_among_a_shortlist() -> None:
    """Words that bf16 cannot tell apart, in far groups; and words that no precision can: the first one."""
    weight = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)) * 0.1
    weight[[2901, 1500, 40]] = torch.ones(16)
    weight[1500] += 1e-3
    assert torch.equal(weight[1500].bfloat16(), weight[40].bfloat16())
    u = Cauchy(torch.ones(70, 16), torch.full((70, 16), 1e-3))  # 70: in two parts
    assert best_word(u, WordHead.of(weight, None, 20.0), None, weight.bfloat16()).tolist() == [1500] * 70
    assert best_word(u, WordHead.of(weight, None, 20.0, 0, 3000, 1500), None, weight.bfloat16()).unique().item() == 40
    few = weight[[40, 7, 1500]]
    assert best_word(u, WordHead.of(few, None, 20.0), None, few.bfloat16()).unique().item() == 2
    weight[1500] = 1.0
    assert best_word(u, WordHead.of(weight, None, 20.0), None, weight.bfloat16()).unique().item() == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_the_shortlist_on_a_gpu(tokens: int) -> None:
    weight, bias, c = (part.cuda() for part in head(20_000, 896))
    whole, u = WordHead(weight, bias, c + 200.0, used_rows=19_999), Cauchy(*(x.cuda() for x in law(tokens, 896, 0.3)))
    for find in (best_word, torch.compile(best_word, fullgraph=True)):
        assert torch.equal(find(u, whole, None, weight.bfloat16()), best_word(u, whole, None))
