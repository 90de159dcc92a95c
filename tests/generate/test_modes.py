"""Each way to decide against its closed form: laws by Kolmogorov-Smirnov, choices by frequency (1e5 draws)."""

import math

import pytest
import torch
from scipy import stats
from support.numerics import assert_close
from support.tiny import HIDDEN, NUM, VOCAB, random_ids, tiny_model
from torch import Tensor
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cqwen_dist.generate.modes import MODES, Draws, Options, ovr_logits
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.ops.cauchy import Cauchy, log_prob_above

DRAWS = 100_000
ALL = Options(used_rows=VOCAB)
NONE = torch.zeros(1, 0, dtype=torch.int64)  # the ids so far, which only processors look at


@pytest.fixture(scope="module")
def action() -> ActionNetwork:
    """A head with a threshold a word and noise a dimension; scales of ordinary size."""
    net = tiny_model().action
    torch.manual_seed(2)
    with torch.no_grad():
        net.threshold.normal_()
        net.cls_bias.normal_()
        net.b_noise.normal_(std=0.1)
    return net.requires_grad_(False)


@pytest.fixture(scope="module")
def u() -> Cauchy:
    """One position's U [1,C]."""
    model = tiny_model()
    with torch.no_grad():
        law = model.infer(random_ids(1, 6))
    return Cauchy(law.loc[:, -1], law.scale[:, -1] * (0.2 + torch.rand(1, HIDDEN)))


def many(u: Cauchy, rows: int = DRAWS) -> Cauchy:
    return Cauchy(u.loc.expand(rows, -1), u.scale.expand(rows, -1))


def draws(seed: int = 0) -> Draws:
    return Draws(torch.Generator().manual_seed(seed))


def is_cauchy(sample: Tensor, loc: Tensor, scale: Tensor) -> bool:
    p = stats.kstest(sample.double().numpy(), "cauchy", args=(float(loc), float(scale))).pvalue
    return bool(p > 1e-3)


@pytest.mark.parametrize("mode", ["standard", "compatible", "ovr"])
def test_modes_without_sampling_draw_nothing(mode: str, action: ActionNetwork, u: Cauchy) -> None:
    law = MODES[mode].law(action, u, draws()).numbers
    assert torch.equal(law.loc, u.loc)
    assert torch.equal(law.scale, u.scale + action.b_noise.abs())


@pytest.mark.parametrize("mode", ["causal", "individual", "sample"])
def test_individuals_are_drawn_from_u(mode: str, action: ActionNetwork, u: Cauchy) -> None:
    """u ~ Cauchy(loc_U, scale_U) per row and dimension; then the noise as a law, or none (S3 3.2, 3.4.1, S4 2.4.2)."""
    law = MODES[mode].law(action, many(u), draws()).numbers
    for c in (0, 7, HIDDEN - 1):
        assert is_cauchy(law.loc[:, c], u.loc[0, c], u.scale[0, c])
    assert float(torch.corrcoef(law.loc.atan()[:, :2].T)[0, 1]) == pytest.approx(0.0, abs=0.02)
    expected = torch.zeros(HIDDEN) if mode == "sample" else action.b_noise.abs()
    assert torch.equal(law.scale[0], expected)


@pytest.mark.parametrize("mode", ["causal", "individual", "sample", "noise"])
@pytest.mark.parametrize("temperature", [0.0, 0.25])
def test_temperature_multiplies_the_scale_that_is_sampled(mode, temperature, action, u) -> None:
    d = Draws(torch.Generator().manual_seed(0), temperature=temperature)
    law = MODES[mode].law(action, many(u), d).numbers
    drawn_from = action.b_noise.abs() if mode == "noise" else u.scale[0]
    if temperature == 0.0:
        assert torch.equal(law.loc, many(u).loc)
    else:
        assert is_cauchy(law.loc[:, 5], u.loc[0, 5], temperature * drawn_from[5])
    assert torch.equal(law.scale, MODES[mode].law(action, many(u), draws()).numbers.scale)


@pytest.mark.parametrize("mode", ["causal", "individual", "sample", "noise"])
def test_words_and_numbers_read_one_eps_at_two_temperatures(mode: str, action: ActionNetwork, u: Cauchy) -> None:
    """Word and number have the quantiles of one individual, times their temperature; each cut at its own tails."""
    plain = MODES[mode].law(action, many(u, 50), draws()).numbers
    d = Draws(torch.Generator().manual_seed(0), 0.5, 0.0, words=(40.0, 0.05))
    words, numbers = MODES[mode].law(action, many(u, 50), d)
    shift, most = plain.loc - u.loc, math.tan(math.pi * 0.45)
    assert_close(numbers.loc - u.loc, 0.5 * shift, 1e-3)
    scale = action.b_noise.abs() if mode == "noise" else u.scale
    assert_close(words.loc - u.loc, 40.0 * shift.clamp(-most * scale, most * scale), 1e-3)
    assert torch.equal(words.scale, plain.scale)


def test_truncated_draws_stay_within_their_quantiles(action: ActionNetwork, u: Cauchy) -> None:
    d = Draws(torch.Generator().manual_seed(0), eps_truncation=0.01)
    z = ((MODES["causal"].law(action, many(u, 2000), d).numbers.loc - u.loc) / u.scale).abs()
    assert float(z.max()) == pytest.approx(math.tan(math.pi * 0.49), rel=1e-3)


def test_mode_noise_samples_the_noise_and_keeps_the_individuals_law(action: ActionNetwork, u: Cauchy) -> None:
    law = MODES["noise"].law(action, many(u), draws()).numbers
    assert torch.equal(law.scale, many(u).scale)
    for c in (0, 7):
        assert is_cauchy(law.loc[:, c], u.loc[0, c], action.b_noise[c].abs())


def test_individual_keeps_its_quantiles_and_noise_its_draw_over_a_generation(action: ActionNetwork, u: Cauchy) -> None:
    """Mode 1 keeps each row's quantiles, mode 2 its noise, whatever U becomes; causal draws afresh."""
    later = Cauchy(u.loc * 3 + 1, u.scale * 0.1)
    d = draws()
    first, second = (MODES["individual"].law(action, many(x, 4), d).numbers.loc for x in (u, later))
    quantile = (first - u.loc) / u.scale
    assert_close((second - later.loc) / later.scale, quantile, 1e-4, "tan(pi(eps - 1/2))")
    assert float((quantile[0] - quantile[1]).abs().min()) > 0.0  # a row is an individual of its own
    d = draws()
    first, second = (MODES["noise"].law(action, many(x, 4), d).numbers.loc for x in (u, later))
    assert_close(second - later.loc, first - u.loc, 1e-4, "|b| eps")
    d = draws()
    first, second = (MODES["causal"].law(action, many(u, 4), d).numbers.loc for _ in range(2))
    assert not torch.equal(first, second)


def test_words_are_chosen_by_argmax_p_or_argmax_loc(action: ActionNetwork) -> None:
    torch.manual_seed(1)
    laws = Cauchy(torch.randn(50, HIDDEN), torch.rand(50, HIDDEN))
    s = action.scores(laws)
    for rank_by, key in (("ovr", s.sf(action.threshold)), ("loc", s.loc)):
        best = MODES["standard"].choose(action, laws, draws(), Options(VOCAB, rank_by=rank_by), NONE)
        assert torch.equal(best, key.argmax(-1))
        used = MODES["standard"].choose(action, laws, draws(), Options(40, rank_by=rank_by), NONE)
        assert torch.equal(used, key[:, :40].argmax(-1))
    assert MODES["sample"].rank_by == "loc"


def chi_square(chosen: Tensor, p: Tensor) -> float:
    """p-value of the observed frequencies; words expected less than 5 times are put together."""
    counts = torch.bincount(chosen, minlength=p.numel()).double()
    expected = p.double() / p.double().sum() * chosen.numel()
    rare = expected < 5
    found, wanted = counts[~rare].tolist(), expected[~rare].tolist()
    if bool(rare.any()):
        found.append(float(counts[rare].sum()))
        wanted.append(float(expected[rare].sum()))
    if wanted[-1] < 1:  # what is left over is too little to be tested
        assert found[-1] < 10
        found, wanted = found[:-1], [w * sum(found[:-1]) / sum(wanted[:-1]) for w in wanted[:-1]]
    return float(stats.chisquare(found, wanted).pvalue)


def test_mode_ovr_samples_from_p_over_its_sum(action: ActionNetwork, u: Cauchy) -> None:
    law = action.add_noise(u)
    p = action.scores(law).sf(action.threshold)[0]
    chosen = MODES["ovr"].choose(action, many(law), draws(), ALL, NONE)
    assert chi_square(chosen, p) > 1e-3
    used = MODES["ovr"].choose(action, many(law), draws(), Options(used_rows=30), NONE)
    assert int(used.max()) < 30
    assert chi_square(used, p[:30]) > 1e-3


WARPED = pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 10, 1.0), (1.3, 0, 0.8), (0.5, 20, 0.9)]
)


def warped(p: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """p^(1/T) / sum, of its top_k words, of these the first that reach top_p: by the definitions, in float64."""
    p, order = (p.double() ** (1 / temperature)).sort(descending=True)
    if top_k:
        p[top_k:] = 0
    p = p / p.sum()
    p[p.cumsum(-1) - p >= top_p] = 0
    return torch.zeros_like(p).scatter(0, order, p)


def warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    found = [TemperatureLogitsWarper(temperature)]
    found += [TopKLogitsWarper(top_k)] if top_k else []
    return LogitsProcessorList([*found, TopPLogitsWarper(top_p)])


@pytest.mark.parametrize("mode", ["compatible", "ovr"])
@WARPED
def test_words_are_sampled_from_the_softmax_or_from_p_over_its_sum(action, u, mode, temperature, top_k, top_p) -> None:
    """S3 3.3: in ovr P / sum P takes the place of the softmax, with the same top-k, top-p and temperature."""
    scores, words = action.scores(law := action.add_noise(u)), VOCAB if mode == "compatible" else NUM
    p = scores.loc[0].double().softmax(-1) if mode == "compatible" else scores.sf(action.threshold)[0, :NUM]
    expected = warped(p, temperature, top_k, top_p)
    options = Options(words, processors=warpers(temperature, top_k, top_p))
    chosen = MODES[mode].choose(action, many(law, DRAWS // 3), draws(), options, NONE)
    assert not bool((expected[chosen] == 0).any())
    assert chi_square(chosen, expected) > 1e-3


def point_head(loc: list[float], threshold: float) -> tuple[ActionNetwork, Cauchy]:
    """Words with these locations at U = 1 and no scale at all."""
    net = ActionNetwork(1, len(loc))
    with torch.no_grad():
        net.cls_weight.copy_(torch.tensor(loc)[:, None])
        net.threshold.fill_(threshold)
        net.b_noise.zero_()
    return net.requires_grad_(False), Cauchy(torch.ones(1, 1), torch.zeros(1, 1))


def test_with_scale_zero_ties_of_p_are_broken_by_loc() -> None:
    """b_noise = 0 in causal: P is 0 or 1; the highest loc wins, not the lowest index."""
    net, u = point_head([1.0, 3.0, 2.0, -1.0], threshold=0.5)
    assert MODES["causal"].law(net, u, draws()).numbers.scale.tolist() == [[0.0]]
    assert MODES["standard"].choose(net, u, draws(), Options(4), NONE).tolist() == [1]


def test_all_p_zero_falls_back_to_the_best() -> None:
    net, u = point_head([1.0, 3.0, 2.0, -1.0], threshold=50.0)
    assert MODES["ovr"].choose(net, many(u, 3), draws(), Options(4), NONE).tolist() == [1, 1, 1]
    mixed = Cauchy(torch.tensor([[1.0], [100.0]]), torch.zeros(2, 1))  # row 1: P is 1 for words 0, 1, 2
    chosen = MODES["ovr"].choose(net, mixed, draws(), Options(4), NONE).tolist()
    assert chosen[0] == 1
    assert chosen[1] in (0, 1, 2)


def test_the_best_word_has_the_largest_logit_where_log_p_ties() -> None:
    gap = torch.tensor([1000.0002, 1000.0, 1000.0001])
    law = Cauchy(-gap, torch.full_like(gap, 1e-3))
    assert law.log_sf(0.0).unique().numel() == 1
    for shape in ((3,), (1, 3), (2, 2, 3)):
        logits = ovr_logits(gap.expand(shape), Cauchy(*(t.expand(shape) for t in law)), 5)
        assert (logits.argmax(-1) == 1).all()
        assert torch.isinf(logits[..., 3:]).all()
    assert_close(logits[0, 0, :3], law.log_sf(0.0), 1e-6)


def test_logits_have_the_gradients_of_log_p() -> None:
    gap, scale = torch.tensor([[3.0, -2.0]], requires_grad=True), torch.ones(1, 2)
    wanted = torch.autograd.grad(log_prob_above(scale, gap).sum(), gap)[0]
    assert torch.equal(torch.autograd.grad(ovr_logits(gap, Cauchy(-gap, scale)).sum(), gap)[0], wanted)


def test_a_uniform_of_zero_stays_finite(action: ActionNetwork, u: Cauchy) -> None:
    d = Draws()
    d._kept = torch.zeros_like(u.loc)
    law = MODES["individual"].law(action, u, d).numbers
    assert_close((law.loc - u.loc) / u.scale, torch.full_like(u.loc, -1.0 / math.tan(math.pi * 1e-7)), 1e-3)
