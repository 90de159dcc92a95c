"""How two tensors are compared: relative errors with a stated tolerance."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import WordHead
from cqwen_dist.ops.ovr.scores import ovr_scores, probs
from cqwen_dist.ops.ovr.seen import TopWord


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| / max |expected|, in float64: 0 for two empty or zero tensors, inf where one is nan."""
    if found.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(found.shape)} and {tuple(expected.shape)}")
    a, b = found.detach().double(), expected.detach().double()
    if not a.numel():
        return 0.0
    error = float((a - b).abs().max())
    if math.isnan(error):
        return float("inf")
    size = float(b.abs().max())
    return error / size if size else (0.0 if error == 0.0 else float("inf"))


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "value") -> None:
    """`relative_error` of the whole tensor is at most tolerance."""
    error = relative_error(found, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def any_order(terms: int) -> float:
    """A tolerance for sums of so many fp32 terms, whatever their order: each addition rounds by 2^-24 of all of them,
    and they may be twice as large as what is left of them."""
    return terms * 2.0**-23


def assert_best(words: Tensor, strength: Tensor, tolerance: float = 1e-5) -> None:
    """Each row's word is its strongest, or as strong as that to rounding: at a near tie the order of sums decides."""
    found, best = strength.gather(1, words[:, None])[:, 0], strength.amax(1)
    torch.testing.assert_close(found, best, rtol=tolerance, atol=tolerance)


def assert_all_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """The same names, each within tolerance of its own size."""
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    for name, value in found.items():
        assert_close(value, expected[name], tolerance, name)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by name."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def ovr_top_word(
    loc_u: Tensor, scale_u: Tensor, weight: Tensor, bias: Tensor | None, c: Tensor | float, **options: Any
) -> TopWord:
    """The best words by `ovr_scores`, of plain tensors; options: vocab_start, used_rows, rank_by."""
    place = options.get("vocab_start", 0), None, options.get("used_rows")
    head, labels = WordHead.of(weight, bias, c, *place), torch.full((len(loc_u),), -100)
    return ovr_scores(Cauchy(loc_u, scale_u), head, labels, rank_by=options.get("rank_by", "ovr")).best


def ovr_prob_at(
    loc_u: Tensor,
    scale_u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    c: Tensor | float,
    word_ids: Tensor,
    vocab_start: int = 0,
) -> Tensor:
    """P [N, m] of the words word_ids [m], by `probs` of plain tensors."""
    return probs(Cauchy(loc_u, scale_u), WordHead.of(weight, bias, c, vocab_start).take(word_ids - vocab_start))
