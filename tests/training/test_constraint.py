"""KL against the start: the number, the gradient, what the start is, and that it holds what it is asked to hold."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.runs import as_rank, losses, metrics, set_back, train_run, write_config, write_texts
from support.tiny import random_batch, tiny_model
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config import Config, ConstraintConfig, load_config
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.training import constraint
from cqwen_dist.training.constraint import Constraint
from cqwen_dist.training.parameter_groups import feature_members


def test_kl_equals_the_integral() -> None:
    """By the trapezoid rule in float64 over the quantiles of p, of both laws rescaled to a unit; without a unit:
    tests/ops/test_cauchy.py."""
    p, q = Cauchy(torch.tensor(0.3), torch.tensor(0.5)), Cauchy(torch.tensor(-0.4), torch.tensor(1.7))
    factor = 0.3 / math.sqrt(0.5 * 1.7)
    wide = [Cauchy(law.loc.double(), law.scale.double() * factor) for law in (p, q)]
    at = wide[0].quantile((torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000)
    expected = (wide[1].nll(at) - wide[0].nll(at)).mean()
    assert float(p.kl(q, 0.3)) == pytest.approx(float(expected), rel=1e-4)
    assert float(q.kl(p, 0.3)) == pytest.approx(float(p.kl(q, 0.3)), rel=1e-6)
    assert float(p.kl(p, 0.3)) == 0.0


def test_narrow_laws_in_a_unit_keep_finite_gradients_and_the_literal_kl_explodes() -> None:
    loc = torch.tensor([0.1], requires_grad=True)
    narrow = Cauchy(loc, torch.tensor([1e-4]))
    start = Cauchy(torch.tensor([0.0]), torch.tensor([2e-4]))
    in_unit = narrow.kl(start, 1.0)
    in_unit.sum().backward()
    assert loc.grad is not None
    assert float(in_unit.detach()) == pytest.approx(math.log1p(0.125 + 0.0025), rel=1e-5)
    assert float(loc.grad) == pytest.approx(2 * 0.1 / 4 / 1.1275, rel=1e-5)
    assert float(narrow.kl(start).detach()) > 11


def begun(seed: int) -> tuple[CausalQwenModel, Constraint, Batch, Tensor]:
    """A model at its start, and a batch."""
    model = tiny_model(number_dims=2, lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]})
    batch = random_batch(seed=seed)
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    constraint = Constraint(
        model,
        ConstraintConfig(mode="dual"),
        model.kept_features,
        {m.name: m.parameter.shape for m in feature_members(model.features)},
    )
    return model, constraint, batch, keep


def on_one_rank() -> tuple[float, float, float, bool]:
    model, constraint, batch, keep = begun(0)
    features = {name: p for name, p in model.features.named_parameters()}
    assert not constraint.second_pass
    z_before = model.kept_features(batch, keep)
    constraint.begin({name: p + 1 if "lora_B" in name else p for name, p in features.items()}, [z_before])
    assert constraint.second_pass, "adapters that were trained before: z is not the base's"
    other = random_batch(seed=5)
    constraint.begin(features, [z_before, model.kept_features(other, other.kept).detach()])
    assert not constraint.second_pass
    u_before = model.abduction(z_before)
    still = float(constraint.term(u_before, z_before, 1.0)[1][0])
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name or "num" in name or name.startswith("abduction"):
                p.add_(torch.randn_like(p) * 0.2)
    z_now = model.kept_features(batch, keep)
    assert not torch.allclose(z_now, z_before, atol=1e-2)
    same = torch.equal(constraint.start_features(batch, keep), z_before)
    u = model.abduction(z_now)
    constraint._answer.fill_(0.5)
    loss, sums = constraint.term(u, z_before, 1.0)
    loc, scale = u_before.loc.detach(), u_before.scale.detach()
    spread = torch.cat([u_before.loc, model_u(constraint, random_batch(seed=5)).loc]).detach()
    start_scale = torch.cat([u_before.scale, model_u(constraint, random_batch(seed=5)).scale]).detach().mean(0)
    unit = (spread.var(0, correction=0) + start_scale.square()).sqrt()
    kl = torch.log1p((u.scale - scale) ** 2 / (4 * u.scale * scale) + ((u.loc - loc) / unit) ** 2 / 4)
    loss.backward()
    grad = model.abduction.loc_net.weight.grad.clone()
    model.zero_grad()
    weight = float(constraint.multiplier * constraint._answer)
    u = model.abduction(model.kept_features(batch, keep))
    again = torch.log1p((u.scale - scale) ** 2 / (4 * u.scale * scale) + ((u.loc - loc) / unit) ** 2 / 4)
    (weight * again.mean(-1).sum()).backward()
    other = model.abduction.loc_net.weight.grad
    return (still, float(sums[0] / kl.mean(-1).sum()), float((grad - other).abs().max() / other.abs().max()), same)


def model_u(constraint: Constraint, batch: Batch) -> Cauchy:
    """U of the start."""
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    u: Cauchy = constraint._abduction(constraint.start_features(batch, keep))
    return u


def test_kl_equals_the_closed_form_against_the_start() -> None:
    """Adapters off, w_num and <NUM>'s row as they began, the abduction as it was; a mean over C, a sum over tokens."""
    ((still, ratio, gradient_off, same),) = run_ranks(on_one_rank, 1)
    assert still == 0.0
    assert same, "z of the start is not what it was"
    assert ratio == pytest.approx(1.0, rel=1e-5)
    assert gradient_off < 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 40 + 60 steps that move U far: watched, held by the multiplier."""
    folder = tmp_path_factory.mktemp("constraint")
    write_texts(folder / "texts.jsonl", 60)
    config = write_config(
        folder,
        stages__0__steps=40,
        stages__1__steps=60,
        stages__0__schedule="constant",
        stages__1__schedule="constant",
        train__micro_batch_size=12,
        train__checkpoint_every=1000,
        data__eval_fraction=0.0,
        model__lora={"r": 4, "alpha": 16},
    )
    run_ranks(_train_each, 1, str(config))
    return folder


MODES = {
    "watched": [],
    "dual": ["loss.constraint.mode=dual", "loss.constraint.eps=0.05"],
    "off": ["loss.constraint.mode=off", "stages.1.steps=2"],
}


def _train_each(config: str) -> None:
    from cqwen_dist.training.train import train_on

    constraint.EVERY = 1
    for name, options in MODES.items():
        train_on(load_config(config, [f"run.dir={Path(config).parent}/{name}", *options]), as_rank())


def kl_of(run: Path) -> list[float]:
    return [record["train/kl"] for record in metrics(run)]


def test_monitor_mode_changes_no_step_and_starts_at_zero(folder: Path) -> None:
    off = losses(folder / "off")
    assert losses(folder / "watched")[: len(off)] == off
    assert kl_of(folder / "watched")[0] == 0.0
    assert max(kl_of(folder / "watched")) > 0.15, "U hardly moves: nothing is tested"


def test_dual_mode_keeps_kl_below_eps(folder: Path) -> None:
    """From step 20 on: on average, and at each step but for the scatter of batches. Words are learnt all the same."""
    held = kl_of(folder / "dual")[20:]
    assert sum(held) / len(held) < 0.05
    assert max(held) < 0.1
    words = [record["train/cls_loss_mean"] for record in metrics(folder / "dual")]
    assert sum(words[-5:]) < 0.3 * sum(words[:5])
    multipliers = [record.get("train/kl_multiplier", 0.0) for record in metrics(folder / "dual")]
    assert multipliers[0] == 0.0
    assert max(multipliers) > 5.0, "it rises with KL"


def test_far_below_its_bound_dual_changes_nothing_and_measures_as_rarely_as_monitor() -> None:
    """A second pass of the backbone costs a third of a step, so it waits for an eighth of eps."""
    rarely = [*range(10), 10, 20]
    assert run_ranks(_due_steps, 1) == [[rarely, list(range(21)), rarely, [0, 10, 20]]]


def _due_steps() -> list[list[int]]:
    _, held, _, _ = begun(0)

    def due() -> list[int]:
        return [step for step in range(21) if held.due(step)]

    held.adapted = True
    found = [due()]
    for kl in (0.013, 0.012):  # eps is 0.1
        held.after_step(torch.tensor([kl, 0.0, 0.0, 0.0]), 1)
        found.append(due())
    assert float(held._answer) == 0.0
    held.mode = "monitor"
    return [*found, due()]


def test_a_base_that_knows_something_is_held_by_default() -> None:
    """S3 2.3 asks for the bound. The seeds' own scales have to shrink by more; a base of the run's knows nothing."""

    def mode(model: dict[str, Any], **options: Any) -> str | None:
        return Config.model_validate({"model": model, "data": {"train": "x.jsonl"}, **options}).constraint.mode

    pretrained, built = {"name_or_path": "x"}, {"architecture": {"model_type": "qwen2"}, "tokenizer": "train"}
    assert mode(pretrained) == "dual"
    assert mode(built) == mode(pretrained, start="seed") == "monitor"
    assert mode(pretrained, loss={"constraint": {"mode": "off"}}) == "off"


def test_a_constrained_run_resumes_equal(tmp_path: Path) -> None:
    """Resumed within a stage, on other ranks, rows shared, ZeRO-3: the same losses and the same multiplier."""
    options = ["loss.constraint.mode=dual", "loss.constraint.eps=0.001"]
    config = write_config(tmp_path, train__checkpoint_every=1, train__keep_checkpoints=9)
    train_run(config, *options)
    copy = tmp_path / "copy"
    set_back(tmp_path / "run", copy, 4)
    spread = ["parallel.zero_stage=3", "parallel.vocab_group_size=2"]
    train_run(config, f"run.dir={copy}", *options, *spread, world=2)
    alone, resumed = metrics(tmp_path / "run"), metrics(copy)
    assert losses(copy) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    for name in ("train/kl", "train/kl_multiplier", "train/kl_drift"):
        assert [r[name] for r in resumed] == pytest.approx([r[name] for r in alone], rel=2e-4, abs=1e-9), name
    assert (alone[0]["train/kl_multiplier"], alone[-1]["train/kl_multiplier"] > 1.0) == (0.0, True)
