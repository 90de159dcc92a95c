"""The regression's unit: forward and inverse agree, float64 in, fp32 out."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import NUM, VOCAB, random_batch, tiny_model

from cqwen_dist.generate.modes import MODES, Draws, Options
from cqwen_dist.heads import word_temperature as module
from cqwen_dist.heads.intervals import WORD_TAILS, Intervals
from cqwen_dist.heads.targets import NAMES, TargetTransform
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import ALONE


@given(
    st.sampled_from(NAMES),
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=5),
)
def test_inverse_undoes_forward_to_fp32(name: str, median: float, scale: float, values: list[float]) -> None:
    transform = TargetTransform(name, median, scale)
    raw = torch.tensor(values, dtype=torch.float64)
    target = transform.forward(raw)
    assert target.dtype == torch.float32
    back = transform.inverse(target)
    assert back.dtype == torch.float64
    # fp32 rounds the target; signed_log turns that into a relative error of about |t| 2^-24.
    if name == "signed_log":
        tolerance = 4e-6 * (raw.abs() + 1)
    elif name == "standardise_log":
        tolerance = (4e-6 + 2e-7 * abs(median)) * (raw.abs() + 1)
    else:
        tolerance = 2e-7 * ((raw - median).abs() if name == "standardise" else raw.abs()) + 1e-9 * (1 + abs(median))
    assert ((back - raw).abs() <= tolerance).all()


def test_forward_equals_values_computed_by_hand() -> None:
    raw = torch.tensor([99.9, -3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(TargetTransform("none").forward(raw), raw.float())
    torch.testing.assert_close(TargetTransform("standardise", 10.0, 2.0).forward(raw), ((raw - 10) / 2).float())
    expected = torch.tensor([math.log(100.9), -math.log(4.0), 0.0])
    torch.testing.assert_close(TargetTransform("signed_log").forward(raw), expected)
    torch.testing.assert_close(TargetTransform("standardise_log", 2.0, 0.5).forward(raw), (expected - 2) / 0.5)


def test_large_integers_keep_their_difference() -> None:
    # 2^24 and 2^24 + 1 are one number in fp32, but not when the subtraction happens in float64 first.
    raw = torch.tensor([2.0**24, 2.0**24 + 1], dtype=torch.float64)
    assert TargetTransform("standardise", 2.0**24, 1.0).forward(raw).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_values_stay_finite(name: str) -> None:
    transform = TargetTransform(name, 0.0, 1e-9)
    target = transform.forward(torch.tensor([1e308, -1e308], dtype=torch.float64))
    assert torch.isfinite(target).all()
    assert torch.isfinite(transform.inverse(torch.tensor([3e38, -3e38]))).all()


def test_scales() -> None:
    scales = torch.tensor([0.5, 2.0])
    assert TargetTransform("standardise", 7.0, 4.0).inverse_scale(scales).tolist() == [2.0, 8.0]
    assert TargetTransform("none", 7.0, 4.0).inverse_scale(scales).tolist() == [0.5, 2.0]
    with pytest.raises(ValueError, match="not linear"):
        TargetTransform("signed_log").inverse_scale(scales)


@pytest.mark.parametrize("args", [("log", 0.0, 1.0), ("none", math.nan, 1.0), ("standardise", 0.0, 0.0)])
def test_refuses_targets_without_a_usable_scale(args: tuple[str, float, float]) -> None:
    with pytest.raises(ValueError):
        TargetTransform(*args)


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
    known = Intervals({0.9: (0.5,)}, 7, word_temperature=1540.0).to_dict()
    assert Intervals.from_dict(known).word_temperature == 1540.0
    assert Intervals.from_dict({"levels": {}, "n": 0}).word_temperature == 1.0, "of an older folder"
    for odd in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="word_temperature of"):
            Intervals.from_dict({**known, "word_temperature": odd})
