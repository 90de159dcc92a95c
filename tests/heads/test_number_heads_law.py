"""A number's own law: its choice by held-out CRPS, and that loss, intervals, metrics and individuals follow it."""

import numpy as np
import pytest
import scipy.stats
import torch
from support.numerics import assert_close
from support.tiny import TARGET, number_prompts, number_writer, random_batch, random_ids, tiny_causal_lm, tiny_model
from tables.test_wide import batch_of, texts
from transformers import CompileConfig

from cqwen_dist.config import Config, UserError
from cqwen_dist.config.base_model import ModelConfig
from cqwen_dist.generate import compiling
from cqwen_dist.generate.generator import generate
from cqwen_dist.generate.modes import MODES, Draws
from cqwen_dist.heads.intervals import Intervals, number_interval
from cqwen_dist.heads.number_kinds import SeveralLabels
from cqwen_dist.heads.targets import TargetTransform
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.model.number_law_choice import FittedLaw, fit_law
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import LAWS
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
@pytest.mark.parametrize("kind", [{}, {"candidates": "copies"}, {"more_values": 1}])
def test_the_loss_is_minus_the_laws_log_density(law, kind):
    model = tiny_model(start="calibrated", number_dims=8, target={**TARGET, "law": law}, **kind).requires_grad_(False)
    head, batch = model.action.number_head, random_batch()
    keep = batch.kept
    u = model.action.add_noise(model.abduction(model.kept_features(batch, keep)))
    labels = head.labels(batch, keep)
    loc, scale = (
        part.double().numpy()
        for part in u.affine(
            *(part.view(-1, part.shape[-1])[0] for part in (model.action.reg_weight,)), model.action.reg_bias[0]
        )
    )
    known = of_scipy(law, loc, scale)
    nll, _ = head.loss(u, labels, True)
    assert_close(nll, torch.from_numpy(-known.logpdf(labels.values.numpy())).float(), 1e-4)
    assert type(head.decide(u, head.memory_at(batch, keep)).y) is LAWS[law]
    if kind == {"more_values": 1}:
        both = SeveralLabels(labels.values[:, None].repeat(1, 2), labels.is_number, torch.tensor([1.0, 0.0]))
        assert_close(head.loss(u, both, True)[0], nll, 1e-5)


@pytest.mark.parametrize("law", ["laplace", "student-4"])
def test_metrics_and_intervals_are_the_laws(law):
    draw, target = np.random.default_rng(0), TargetTransform("standardise", 3.0, 2.0, law)
    loc, scale = draw.standard_normal(500), np.exp(draw.standard_normal(500))
    known = of_scipy(law, loc, scale)
    true = known.rvs(random_state=draw)
    found, factors, drawing = number_metrics(Numbers(3 + 2 * true, loc, scale, np.arange(500)), target, None)
    true = target.forward(torch.from_numpy(3 + 2 * true)).double().numpy()
    assert found["eval/reg_nll"] == pytest.approx(-known.logpdf(true).mean(), rel=1e-6)
    inside = (known.ppf(0.05) <= true) & (true <= known.ppf(0.95))
    assert found["eval/coverage_90"] == inside.mean() == pytest.approx(0.9, abs=0.04)
    assert factors.factors[0.9] == pytest.approx(1.0, abs=0.2)  # the law is right: nothing to mend
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
