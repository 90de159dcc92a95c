"""The word temperature against brute force in float64, and what it is for: words as diverse as softmax's."""

import copy
import math

import numpy as np
import pytest
import torch
from support.tiny import NUM, VOCAB, random_batch, tiny_model

from cqwen_dist.generate.modes import MODES, Draws, Options
from cqwen_dist.heads import word_temperature as module
from cqwen_dist.heads.intervals import WORD_TAILS, Intervals
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import ALONE

USED = NUM + 1


@pytest.fixture(scope="module")
def started():
    """A calibrated tiny model, its report, and U at 120 further positions."""
    model = tiny_model(start="calibrated", number_dims=2)
    batches = [random_batch(6, 24, seed=s) for s in range(3)]
    report = calibrate(model, batches[:2], max_tokens=200)
    with torch.no_grad():
        z = model.kept_features(batches[2], batches[2].kept)
        return model.requires_grad_(False), report, model.abduction(z[:120])


def softmax_words(loc: np.ndarray, n: int) -> float:
    """The mean number of different words among n draws from softmax at each position, float64."""
    p = np.exp(loc - loc.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return float((1 - (1 - p) ** n).sum(1).mean())


def parts(action, u):
    """loc_S, W, C, |W| |b| in float64, of the words in use."""
    weight, bias, c = (t.double().numpy() for t in (action.cls_weight, action.cls_bias, action.threshold))
    loc = u.loc[:, : action.word_size].double().numpy() @ weight.T + bias
    wide = np.abs(weight) @ action.b_noise[: action.word_size].abs().double().numpy()
    return loc[:, :USED], weight[:USED], np.broadcast_to(c, VOCAB)[:USED], wide[:USED]


def test_the_factor_equals_brute_force(started, monkeypatch: pytest.MonkeyPatch) -> None:
    """All words, every factor, in float64; few words a side are enough."""
    model, _, u = started
    at = torch.linspace(0, len(u.loc) - 1, module.POSITIONS).long()
    own = Cauchy(u.loc[at], u.scale[at])
    loc, weight, c, wide = parts(model.action, own)
    draw, counts = torch.Generator().manual_seed(0), np.zeros(len(module._FACTORS))
    for i in range(len(at)):
        eps = torch.rand(module.INDIVIDUALS, model.action.word_size, generator=draw).double().numpy()
        tangent = np.tan(math.pi * (eps.clip(WORD_TAILS, 1 - WORD_TAILS) - 0.5))
        shift = (own.scale[i, : model.action.word_size].double().numpy() * tangent) @ weight.T
        for j, factor in enumerate(module._FACTORS):
            counts[j] += len({int(k) for k in ((loc[i] - c + factor * shift) / wide).argmax(1)}) / len(at)
    wanted = softmax_words(loc, module.INDIVIDUALS)
    expected = np.exp(np.interp(wanted, np.maximum.accumulate(counts), np.log(module._FACTORS)))
    for most in (module.MOST, 40):
        monkeypatch.setattr(module, "MOST", most)
        found = module.word_temperature(model.action, u, USED, ALONE)
        assert found == pytest.approx(expected, rel=0.02)


def test_individuals_then_choose_as_many_different_words_as_softmax(started) -> None:
    """By the modes themselves, other individuals, other positions; at the inferred scale they all choose one word."""
    model, report, u = started
    wanted = softmax_words(parts(model.action, u)[0], 16)

    def words(factor: float) -> float:
        found = []
        for i in range(len(u.loc)):
            law = Cauchy(u.loc[i].expand(16, -1), u.scale[i].expand(16, -1))
            draws = Draws(torch.Generator().manual_seed(i), words=(factor, WORD_TAILS))
            seen = model.action.word_part(MODES["individual"].law(model.action, law, draws).words)
            found.append(len(MODES["individual"].choose(model.action, seen, draws, Options(USED), None).unique()))
        return sum(found) / len(found)

    assert words(report.word_temperature) == pytest.approx(wanted, rel=0.1)
    assert words(1.0) < 0.7 * wanted
    assert model.config.calibration == Intervals(word_temperature=report.word_temperature).to_dict()


def test_without_positions_the_factor_is_1_and_a_strange_one_is_refused(started) -> None:
    model, _, u = started
    assert module.word_temperature(model.action, Cauchy(u.loc[:0], u.scale[:0]), USED, ALONE) == 1.0
    still = copy.deepcopy(model.action)
    still.b_noise.zero_()
    assert 0.1 < module.word_temperature(still, u, USED, ALONE) < 1e7, "without noise"
    known = Intervals({0.9: 0.5}, 7, word_temperature=1540.0).to_dict()
    assert Intervals.from_dict(known).word_temperature == 1540.0
    assert Intervals.from_dict({"levels": {}, "n": 0}).word_temperature == 1.0, "of an older folder"
    for odd in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="word_temperature of"):
            Intervals.from_dict({**known, "word_temperature": odd})
