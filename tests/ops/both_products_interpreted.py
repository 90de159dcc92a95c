"""The kernel of both products, to be run with TRITON_INTERPRET=1 (by test_both_products.py); its problems and bound."""

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.both_products import both_by_triton

SHAPES = [(1, 37, 101), (1, 252, 507), (3, 123, 70), (16, 300, 65), (70, 33, 130), (1, 1, 1), (0, 5, 7), (2, 5, 0)]


def problem(tokens: int, width: int, words: int, dtype: torch.dtype) -> tuple[Cauchy, Tensor]:
    g = torch.Generator().manual_seed(tokens + width + words)
    u = Cauchy(torch.randn(tokens, width, generator=g), torch.rand(tokens, width, generator=g) * 1e-3)
    return u, torch.randn(words, width, generator=g).to(dtype)


def assert_exact(found: Tensor, u: Cauchy, weight: Tensor, product: float = 2.0**-24) -> None:
    """As fp32 sums in any order: a term is off by `product` of itself, each addition by 2^-24 of all terms together."""
    assert found.shape == (2, len(u.loc), len(weight))
    assert found.dtype == torch.float32
    wide, bound = weight.double(), product + 2.0**-24 * weight.shape[1]
    terms = u.loc.double().abs() @ wide.abs().T, u.scale.double() @ wide.abs().T
    exact = u.loc.double() @ wide.T, terms[1]
    for own, wanted, most in zip(found, exact, terms, strict=True):
        assert bool(((own - wanted).abs() <= bound * most + 1e-30).all())


if __name__ == "__main__":
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            u, weight = problem(*shape, dtype)
            assert_exact(both_by_triton(*u, weight), u, weight)
        half, weight = u.to(torch.bfloat16), weight.to(torch.bfloat16)
        assert_exact(both_by_triton(*half, weight), half, weight)
    u, weight = problem(3, 40, 70, torch.float32)
    assert_exact(both_by_triton(*u, weight[:33]), u, weight[:33])  # a part of the rows
