"""A number's own law: its choice by held-out CRPS, and that loss, intervals, metrics and individuals follow it."""

import numpy as np
import pytest
import scipy.stats
import torch
from scipy import stats
from support.numerics import any_order, assert_close
from support.tiny import TARGET, number_prompts, number_writer, random_batch, random_ids, tiny_causal_lm, tiny_model
from tables.test_wide import batch_of, texts
from transformers import CompileConfig

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.base_model import ModelConfig
from cqwen_dist.generate import compiling
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES, Draws
from cqwen_dist.heads.abduction import AbductionNetwork
from cqwen_dist.heads.action import ActionNetwork
from cqwen_dist.heads.intervals import Intervals, number_interval
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS, FittedLaw, fit_law
from cqwen_dist.training.evaluation.number_metrics import Numbers, number_metrics

LAPLACE, T4 = ({**TARGET, "law": law} for law in ("laplace", "student-4"))


def of_scipy(law: str, loc, scale):
    return scipy.stats.laplace(loc, scale) if law == "laplace" else scipy.stats.t(int(law.split("-")[1]), loc, scale)


@pytest.mark.parametrize("law", ["cauchy", "laplace", "student-3"])
def test_auto_finds_the_law_that_errors_were_drawn_from(law):
    """Scale and CRPS are scipy's maximum likelihood and this test's own sum over the folds."""
    draw = np.random.default_rng(3)
    spread = np.exp(draw.standard_normal(4000) / 2)
    r = {"cauchy": draw.standard_cauchy, "laplace": draw.laplace, "student-3": lambda size: draw.standard_t(3, size)}
    error, folds = 0.3 * spread * r[law](size=4000), np.arange(4000) % 8
    found = fit_law("auto", *(torch.from_numpy(part) for part in (error, np.log(spread), folds)))
    assert found.name.partition("-")[0] == law.partition("-")[0]
    assert found.scale == pytest.approx(0.3, rel=0.1)
    if law == "laplace":
        crps = 0.0
        for fold in range(8):
            own = folds == fold
            scale = spread[own] * scipy.stats.laplace.fit(error[~own] / spread[~own], floc=0)[1]
            gap = np.abs(error[own])
            crps += (gap + scale * (np.exp(-gap / scale) - 0.75)).sum() / 4000
        assert found.crps["laplace"] == pytest.approx(crps, rel=1e-9)
    elif law == "student-3":
        of_3 = fit_law("student-3", *(torch.from_numpy(part) for part in (error, np.log(spread), folds)))
        assert of_3.scale == pytest.approx(scipy.stats.t.fit(error / spread, fdf=3, floc=0)[2], rel=1e-4)


def test_few_errors_and_errors_of_0_choose_no_law_by_chance():
    some = torch.randn(30, dtype=torch.float64)
    zeros, folds = torch.zeros(30, dtype=torch.float64), torch.arange(30) % 8
    assert [fit_law(asked, some, zeros, folds).name for asked in ("auto", "student", "laplace")] == [
        *("cauchy", "student-4", "laplace")
    ]
    assert fit_law("auto", 0 * torch.cat([some, some]), zeros.repeat(2), folds.repeat(2)).scale > 0


def test_the_chosen_law_is_told_with_its_gain():
    found = FittedLaw("student-4", 1.0, {"cauchy": 1.05, "laplace": 1.01, "student-4": 1.0})
    assert found.said == "student-4, with the least CRPS on rows left out (laplace +1.0%, cauchy +5.0%)"
    assert FittedLaw("laplace", 1.0, {}).said == "laplace"


def test_the_calibrated_start_gives_y_the_chosen_law_and_its_scale():
    """Texts do not tell the numbers: loc is their median, and the scale of Laplace the mean distance from it."""
    ids, values = texts(400)
    truth = 150 + 40 * torch.from_numpy(np.random.default_rng(0).laplace(size=400))
    batches = [batch_of(ids[at : at + 80], values[at : at + 80], truth[at : at + 80]) for at in range(0, 400, 80)]
    model = tiny_model(start="calibrated", number_dims=8, target=TARGET)
    found = calibrate(model, batches, law="auto")
    assert model.target.law == "laplace"
    assert found.law.startswith("laplace, with the least CRPS on rows left out (student-")
    *_, loc, scale = (part[:, -1].detach() for part in model(ids, values))
    error = (model.target.forward(truth) - loc).abs()
    assert float(scale.mean()) == pytest.approx(float(error.mean()), rel=0.1)


@pytest.mark.parametrize("law", ["laplace", "student-4"])
@pytest.mark.parametrize("kind", [{}, {"candidates": "arithmetic"}])
def test_the_loss_is_minus_the_laws_log_density(law, kind):
    model = tiny_model(start="calibrated", number_dims=8, target={**TARGET, "law": law}, **kind).requires_grad_(False)
    head, batch = model.action.number_head, random_batch()
    keep = batch.kept
    u = model.action.add_noise(model.abduction(model.kept_features(batch, keep)))
    labels = head.labels(batch, keep)
    loc, scale = (part.double().numpy() for part in u.affine(model.action.reg_weight, model.action.reg_bias[0]))
    known = of_scipy(law, loc, scale)
    nll, _ = head.loss(u, labels)
    assert_close(nll, torch.from_numpy(-known.logpdf(labels.values.numpy())).float(), 1e-4)
    assert type(head.decide(u, head.memory_at(batch, keep)).y) is LAWS[law]


@pytest.mark.parametrize("law", ["laplace", "student-4"])
def test_metrics_and_intervals_are_the_laws(law):
    draw, target = np.random.default_rng(0), TargetTransform("standardise", 3.0, 2.0, law)
    loc, scale = draw.standard_normal(5000), np.exp(draw.standard_normal(5000))
    known = of_scipy(law, loc, scale)
    true = known.rvs(random_state=draw)
    found, factors, drawing = number_metrics(Numbers(3 + 2 * true, loc, scale, np.arange(5000)), target, None)
    true = target.forward(torch.from_numpy(3 + 2 * true)).double().numpy()
    assert found["eval/reg_nll"] == pytest.approx(-known.logpdf(true).mean(), rel=1e-6)
    inside = (known.ppf(0.05) <= true) & (true <= known.ppf(0.95))
    assert found["eval/coverage_90"] == inside.mean() == pytest.approx(0.9, abs=0.04)
    # The law is right: nothing to mend in any of ten blocks of 500, whose factors vary by some 6 %
    assert factors.factors[0.9] == pytest.approx([1.0] * 10, abs=0.2)
    assert drawing["pit"] == np.histogram(known.cdf(true), 20, (0, 1))[0].tolist()
    y = target.kind(*(torch.from_numpy(part[:3]) for part in (loc, scale)))
    low, high = number_interval(y, target, Intervals(), 0.9)
    np.testing.assert_allclose(high, 3 + 2 * known.ppf(0.95)[:3], rtol=1e-8)
    np.testing.assert_allclose(low, 3 + 2 * known.ppf(0.05)[:3], rtol=1e-8)


@pytest.mark.parametrize("law", ["laplace", "student-4"])
@pytest.mark.parametrize("mode", ["causal", "individual", "noise"])
def test_an_individual_keeps_its_quantile_in_the_law(law, mode):
    """Its words are drawn as ever; its number has the law, at the quantile that the Cauchy would have."""
    model = tiny_model(start="calibrated", number_dims=8, target={**TARGET, "law": law}).requires_grad_(False)
    plain = tiny_model(start="calibrated", number_dims=8, target=TARGET).requires_grad_(False)
    one = model.infer(random_ids(1, 6))
    u = Cauchy(*(part[:, -1].expand(20_000, -1) for part in one))
    drawn, as_cauchy = (
        MODES[mode].law(each.action, u, Draws(torch.Generator().manual_seed(0), temperature=0.5)).numbers
        for each in (model, plain)
    )
    words = model.action.word_size
    assert torch.equal(drawn.loc[:, :words], as_cauchy.loc[:, :words])
    part = Cauchy(u.loc[0], 0.5 * (model.action.b_noise.abs() if mode == "noise" else u.scale[0]))
    loc, scale = (float(part) for part in model.action.number_head.value(part))
    y, before = (model.action.number_head.value(each).loc.double() for each in (drawn, as_cauchy))
    assert scipy.stats.kstest(y.numpy(), of_scipy(law, loc, scale).cdf).pvalue > 1e-3
    quantile = scipy.stats.cauchy(loc, scale).cdf(before.numpy())
    np.testing.assert_allclose(of_scipy(law, loc, scale).cdf(y.numpy()), quantile, atol=1e-3)


def test_generation_and_its_record_have_the_law():
    net = tiny_causal_lm(number_dims=2, target=LAPLACE).requires_grad_(False)
    net.model.action.threshold[net.config.num_token_id] = -1e4
    _, numbers = net.generate(random_ids(1, 5), max_new_tokens=1, return_numbers=True)
    loc, scale = (float(part[0, -1]) for part in (numbers.loc, numbers.scale))
    low, high = (float(end[0, -1]) for end in numbers.interval(0.9))
    assert (low, high) == pytest.approx(tuple(150 + 40 * of_scipy("laplace", loc, scale).ppf([0.05, 0.95])), rel=1e-6)
    assert numbers.records(0)[0].intervals["0.9"] == pytest.approx((low, high))
    assert type(net.config).from_dict(net.config.to_dict()).target == LAPLACE


@pytest.mark.slow
@pytest.mark.parametrize("law", ["laplace", "student-4"])
def test_a_step_with_the_law_compiles_into_one_graph(law, monkeypatch):
    monkeypatch.setattr(compiling.notes, "warning", lambda said: pytest.fail(said))
    model = number_writer()
    model.config.target = {**model.config.target, "law": law}
    given = {"mode": "individual", "seed": 3, "max_new_tokens": 8, "digits": "auto"}
    static = {"cache_implementation": "static", "compile_config": CompileConfig(backend="aot_eager")}
    found, wanted = (generate(model, **number_prompts(), **given, **more) for more in (static, {}))
    assert torch.equal(found[0], wanted[0])
    assert bool(wanted[1].generated.any())
    torch.testing.assert_close(found[1].loc, wanted[1].loc, rtol=1e-4, atol=1e-5)


def test_laws_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match=r"target.*law 'gauss'"):
        tiny_model(target={**TARGET, "law": "gauss"})
    with pytest.raises(ValueError, match=r"'laplace', 'student' or 'auto'"):
        ModelConfig(name_or_path="x", number_head="gauss")
    config = {"model": {"name_or_path": "x", "number_head": "auto"}, "data": {"train": "x"}, "start": "seed"}
    with pytest.raises(ValueError, match="cauchy, or start calibrated"):
        Config.model_validate(config)


H = 12


@pytest.mark.parametrize("activation", ["softplus", "exp"])
@pytest.mark.parametrize("gamma", [1e-8, 1e-3, 300.0])
def test_gamma_init_is_the_scale_itself(activation: str, gamma: float) -> None:
    floor = 1e-6 if gamma > 1e-5 else gamma * 1e-3
    net = AbductionNetwork(H, H, gamma, scale_activation=activation, scale_floor=floor)
    scale = net(torch.randn(5, H)).scale
    # b_scale = log gamma is of size |log gamma| <= 18.4: rounding it to fp32 moves gamma by at most 1e-6 of itself
    assert_close(scale.double(), torch.full((5, H), gamma, dtype=torch.float64), 2e-6, "scale_U")


@pytest.mark.parametrize("c", [H - 4, H, H + 5])
def test_starts_as_the_identity(c: int) -> None:
    z = torch.randn(7, H)
    u = AbductionNetwork(H, c)(z)
    shared = min(c, H)
    assert u.loc.shape == u.scale.shape == (7, c)
    assert torch.equal(u.loc[:, :shared], z[:, :shared])
    assert not u.loc[:, shared:].any()
    assert_close(u.scale, torch.full((7, c), 1.3133), 1e-6, "scale_U")


def test_matches_the_formula_after_training() -> None:
    net = AbductionNetwork(H, 9, 0.3)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    z = torch.randn(4, 3, H)
    u, w = net(z), {n: p.detach().double() for n, p in net.named_parameters()}
    loc = z.double() @ w["loc_net.weight"].T + w["loc_net.bias"]
    scale = torch.log1p(torch.exp(z.double() @ w["scale_net.weight"].T + w["scale_net.bias"])) + 1e-6
    assert_close(u.loc, loc, any_order(H + 1), "loc_U")
    assert_close(u.scale, scale, any_order(H + 1), "scale_U")


def test_the_scales_floor_is_added_and_keeps_the_gradient() -> None:
    net = AbductionNetwork(H, H, 1e-3)
    with torch.no_grad():
        net.scale_net.bias.fill_(-20.0)  # softplus 2e-9, far below the floor of 1e-6
    u = net(torch.randn(2, H))
    assert bool((u.scale >= 1e-6).all())
    u.scale.sum().backward()
    assert bool((net.scale_net.bias.grad > 0).all())
    with torch.no_grad():
        net.scale_net.bias.fill_(-200.0)  # softplus is 0 in fp32: the floor alone, still positive
    assert bool((net(torch.randn(2, H)).scale > 0).all())


def test_bf16_features_keep_fp32_biases() -> None:
    net = AbductionNetwork(H, H, 1e-4)
    u = net(torch.randn(3, H).bfloat16())
    assert u.loc.dtype == u.scale.dtype == torch.float32
    assert_close(u.scale, torch.full((3, H), 1e-4), 2e-6, "scale_U under bf16 features")


C, V = 6, 11


@pytest.fixture
def action() -> ActionNetwork:
    torch.manual_seed(0)
    net = ActionNetwork(C, V)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    return net


def test_the_four_outputs_equal_the_formulas(action: ActionNetwork) -> None:
    loc, scale = torch.randn(2, 3, C), torch.rand(2, 3, C) + 0.1
    loc_s, scale_s, loc_y, scale_y = action(loc, scale)
    w, b, r = action.cls_weight.double(), action.cls_bias.double(), action.reg_weight.double()
    total = scale.double() + action.b_noise.double().abs()
    rounding = any_order(C + 1)
    assert_close(loc_s, torch.einsum("btc,vc->btv", loc.double(), w) + b, rounding, "loc_S")
    assert_close(scale_s, torch.einsum("btc,vc->btv", total, w.abs()), rounding, "scale_S holds no bias")
    assert_close(loc_y, (loc.double() * r).sum(-1) + action.reg_bias.double(), rounding, "loc_Y")
    assert_close(scale_y, (total * r.abs()).sum(-1), rounding, "scale_Y")


def test_draws_through_the_network_follow_the_closed_form(action: ActionNetwork) -> None:
    """1e5 individuals and noises, pushed through W: Kolmogorov-Smirnov against Cauchy(loc_S, scale_S) and Y's."""
    n, g = 100_000, torch.Generator().manual_seed(1)
    loc, scale = torch.randn(C, dtype=torch.float64), torch.rand(C, dtype=torch.float64) + 0.1
    net = action.double()
    loc_s, scale_s, loc_y, scale_y = (t.detach() for t in net(loc, scale))
    u = Cauchy(loc, scale).sample(torch.rand(n, C, generator=g, dtype=torch.float64))
    noise = Cauchy(torch.zeros(C, dtype=torch.float64), net.b_noise.detach().abs())
    u_prime = u + noise.sample(torch.rand(n, C, generator=g, dtype=torch.float64))
    s = u_prime @ net.cls_weight.detach().T + net.cls_bias.detach()
    y = u_prime @ net.reg_weight.detach() + net.reg_bias.detach()
    for draws, at, width in [(s[:, 0], loc_s[0], scale_s[0]), (s[:, -1], loc_s[-1], scale_s[-1]), (y, loc_y, scale_y)]:
        assert stats.kstest(draws.numpy(), "cauchy", args=(float(at), float(width))).pvalue > 1e-3


def test_noise_enters_by_its_absolute_value(action: ActionNetwork) -> None:
    u = Cauchy(torch.zeros(C), torch.ones(C))
    before = action.add_noise(u).scale
    with torch.no_grad():
        action.b_noise.neg_()
    assert torch.equal(action.add_noise(u).scale, before)
    assert torch.equal(action.add_noise(u).loc, u.loc)


def test_a_range_of_rows_gives_that_part_of_the_scores(action: ActionNetwork) -> None:
    part = ActionNetwork(C, V, vocab_start=3, rows=4)
    rows = slice(3, 7)
    with torch.no_grad():
        for name in ("cls_weight", "cls_bias", "threshold"):
            getattr(part, name).copy_(getattr(action, name)[rows])
    assert part.rows == 4
    u = Cauchy(torch.randn(5, C), torch.rand(5, C))
    rounding = any_order(C + 1)  # the order of sums goes by the number of rows
    assert_close(part.scores(u).loc, action.scores(u).loc[:, rows], rounding, "loc_S")
    assert_close(part.scores(u).scale, action.scores(u).scale[:, rows], rounding, "scale_S")


def test_weights_start_xavier_and_biases_zero() -> None:
    torch.manual_seed(0)
    net = ActionNetwork(400, 3)
    bound = (6.0 / 401) ** 0.5  # xavier uniform, fan in 400, fan out 1 (S3 4 step 4)
    assert float(net.reg_weight.detach().abs().max()) <= bound
    assert float(net.reg_weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert not net.cls_bias.any()
    assert net.reg_bias.item() == 0.0
    assert ActionNetwork(4, 3, scalar_threshold=True).threshold.shape == (1,)
