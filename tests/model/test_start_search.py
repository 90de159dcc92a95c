"""The search of the start: its loss is the loss of a model, its histogram all but that, and nothing better is near."""

import math

import pytest
import torch
from support.tiny import HIDDEN, NUM, VOCAB, tiny_base
from torch import Tensor

from cqwen_dist.heads.seed_losses import OvrClassificationLoss
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.start_search import Histogram, StartLogits, best_threshold_and_gamma
from cqwen_dist.parallel.groups import ALONE

POINTS = [(0.0, 1.4), (6.0, 1e-2), (12.0, 1e-3), (-3.0, 0.3)]


def model_of(vocab_start: int = 0, rows: int | None = None) -> CausalQwenModel:
    base = tiny_base()
    torch.manual_seed(3)
    base.lm_head.weight.data += 0.3 * torch.randn(HIDDEN)
    model = CausalQwenModel.from_base_model(
        base, start="calibrated", num_token_id=NUM, vocab_start=vocab_start, rows=rows
    ).eval()
    bias = 0.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.action.cls_bias.copy_(bias[model.action.vocab_start : model.action.vocab_start + model.action.rows])
    return model


def tokens(n: int = 70, seed: int = 0, noise: float = 3.0) -> tuple[Tensor, Tensor]:
    """loc_U [n,C_w], and labels [n] drawn from the softmax of the rows' logits over `noise`."""
    g = torch.Generator().manual_seed(seed)
    loc = torch.randn(n, HIDDEN, generator=g) * 3
    logits = loc @ model_of().action.cls_weight.detach().T
    draw = -torch.log(-torch.log(torch.rand(logits.shape, generator=g).clamp(1e-6, 1 - 1e-6)))
    return loc, (logits + noise * draw)[:, :NUM].argmax(1)


def search(model: CausalQwenModel, loc: Tensor, labels: Tensor) -> StartLogits:
    return StartLogits(model.action, loc, labels, ALONE)


def exact(model: CausalQwenModel, loc: Tensor, threshold: float, gamma: float) -> tuple[Tensor, Tensor]:
    """(loc_S, scale_S) [n,V] float64 of U = Cauchy(loc, gamma)."""
    weight = model.action.cls_weight.detach().double()
    scale = torch.full_like(loc, gamma, dtype=torch.float64) @ weight.abs().T
    return loc.double() @ weight.T + model.action.cls_bias.detach().double(), scale


def mean_loss(loc_s: Tensor, scale_s: Tensor, labels: Tensor, threshold: float) -> float:
    loss = OvrClassificationLoss(loc_s.shape[1], torch.full((loc_s.shape[1],), threshold, dtype=torch.float64))
    return float(loss(loc_s[None], scale_s[None], labels[None])[0].mean())


@pytest.mark.parametrize("point", POINTS)
@torch.no_grad()
def test_a_point_gives_the_loss_the_best_word_and_the_sum_of_p(point: tuple[float, float]) -> None:
    model, (loc, labels) = model_of(), tokens()
    loss, best, prob_sum = search(model, loc, labels).at(*point)
    loc_s, scale_s = exact(model, loc, *point)
    p = 0.5 + torch.atan((loc_s - point[0]) / scale_s) / math.pi
    # logits of order 30 round by 2e-6 in fp32, which the least scale here (1e-3 times a norm of 4) makes 1e-3 of P's z
    assert loss == pytest.approx(mean_loss(loc_s, scale_s, labels, point[0]), rel=1e-5)
    torch.testing.assert_close(prob_sum.double(), p.sum(1), rtol=1e-3, atol=1e-5)
    top = ((loc_s - point[0]) / scale_s).topk(2, 1)
    clear = top.values[:, 0] - top.values[:, 1] > 1e-4 * top.values.abs().amax(1)
    assert clear.float().mean() > 0.9
    assert torch.equal(best[clear], top.indices[clear, 0])


@torch.no_grad()
def test_the_histograms_loss_equals_the_exact_loss() -> None:
    """To what a cell is wide: two hundredths of a nat of location, beside which scales here are not small, and its
    norms within 24 steps, by which log P of a rare word varies as it does by gamma."""
    model, (loc, labels) = model_of(), tokens()
    seen = search(model, loc, labels).histogram()
    assert float(seen.words.sum()) == len(loc) * VOCAB
    g = torch.Generator().manual_seed(1)
    for share, power in torch.rand(40, 2, generator=g, dtype=torch.float64).tolist():
        threshold, gamma = seen.middle + (1.5 * share - 0.2) * seen.spread, 10 ** (4 * power - 3)
        loc_s, scale_s = exact(model, loc, threshold, gamma)
        expected = mean_loss(loc_s, scale_s, labels, threshold)
        assert seen.loss(threshold, gamma) == pytest.approx(expected, rel=0.01), (threshold, gamma)


def least_on_a_grid(seen: Histogram) -> float:
    """Of 24 x 24 points over all logits and six powers of ten."""
    typical = float((seen.words * seen.norm).sum() / seen.words.sum())
    low, high = float(seen.loc.min()), float(seen.loc.max())
    return min(
        seen.loss(c, 10**g * seen.spread / typical)
        for c in torch.linspace(low, high, 24, dtype=torch.float64).tolist()
        for g in torch.linspace(-5, 1, 24, dtype=torch.float64).tolist()
    )


@pytest.mark.parametrize(("knows", "sharpness"), [(3.0, 0.3), (3.0, 4.0), (0.3, 1.0)])
@torch.no_grad()
def test_the_search_finds_what_a_fine_grid_finds(knows: float, sharpness: float) -> None:
    """Also of a base that is much surer than it is right: its C lies far above the mean top logit."""
    model, (loc, labels) = model_of(), tokens(20, noise=knows)
    seen = search(model, loc * sharpness, labels).histogram()
    found = seen.loss(*best_threshold_and_gamma(seen))
    assert found <= 1.002 * least_on_a_grid(seen)
    assert found < 1 + math.log(VOCAB), "better than P = 1/V"
