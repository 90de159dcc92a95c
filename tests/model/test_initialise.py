"""The start: the base's knowledge moved in exactly, presets, calibration (S3 4, S1)."""

import copy
import math
import re

import pytest
import torch
from support.numerics import assert_best, assert_close
from support.tiny import HIDDEN, NUM, VOCAB, random_batch, random_ids, tiny_base, tiny_model
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.heads.seed_losses import OvrClassificationLoss
from cqwen_dist.model import CausalQwenModel
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.model.initialise import SEED_NOISE, inherit_head, set_scales


def logits_of(model: CausalQwenModel, ids: Tensor) -> Tensor:
    """loc_S of text without numbers."""
    return model(ids, torch.zeros(ids.shape, dtype=torch.float64))[0]


@pytest.mark.parametrize("start", ["seed", "calibrated"])
@pytest.mark.parametrize(
    ("shape", "kind", "tied"),
    [
        ({}, "qwen2", False),
        ({}, "llama", True),
        ({"number_dims": 4}, "qwen2", True),
        ({"causal_size": HIDDEN + 7, "number_dims": 4}, "mistral", False),
    ],
)
@torch.no_grad()
def test_the_softmax_of_loc_equals_the_bases(start: str, shape: dict[str, int], kind: str, tied: bool) -> None:
    """Exactly: the same products in the same order where C = H; to fp32 rounding where C > H, or rows are levelled."""
    base = tiny_base(kind, tied=tied)
    ids = random_ids(3, 9)
    expected = base(input_ids=ids).logits
    model = CausalQwenModel.from_base_model(copy.deepcopy(base), start=start, num_token_id=NUM, **shape).eval()
    if start == "calibrated":
        calibrate(model, [random_batch()], max_tokens=8)
    found = logits_of(model, ids)
    if not shape and start != "calibrated":
        assert torch.equal(found, expected)
    assert_close(found.softmax(-1), expected.softmax(-1), 5e-5, "softmax(loc_S)")
    assert_best(found.argmax(-1).flatten(), expected.flatten(0, 1))


@torch.no_grad()
def test_causal_size_below_h_keeps_the_largest_directions() -> None:
    base = tiny_base()
    weight = base.lm_head.weight.clone()
    for c in (8, 16, HIDDEN - 1):
        model = CausalQwenModel.from_base_model(copy.deepcopy(base), start="seed", num_token_id=NUM, causal_size=c)
        inherit_head(model, weight, None)
        product = model.action.cls_weight.double() @ model.abduction.loc_net.weight.double()
        error = float((product - weight.double()).norm() / weight.double().norm())
        assert error == pytest.approx(float(torch.linalg.svdvals(weight.double())[c:].norm() / weight.norm()), rel=1e-5)
        assert model.action.projection_error == pytest.approx(error, rel=1e-4), "told at a run's start"
    assert 0.0 < error < 0.3


@torch.no_grad()
def test_the_calibrated_starts_base_is_the_whole_base() -> None:
    """Not the part of its head that C < H dimensions hold."""
    torch.manual_seed(0)  # of w_num
    base, batch = tiny_base(), random_batch(8, 12)
    model = CausalQwenModel.from_base_model(copy.deepcopy(base), start="calibrated", num_token_id=NUM, causal_size=4)
    z, labels = model.kept_features(batch, batch.kept), batch.labels.flatten()[batch.kept]
    right = ((z @ base.lm_head.weight.T).argmax(1) == labels).double().mean()
    assert calibrate(model, [batch], max_tokens=10_000).base_accuracy == pytest.approx(float(right), abs=1e-9)
    assert right > 0, "else nothing is compared"


def test_a_tied_head_is_copied() -> None:
    """Training W_cls leaves the embeddings, tied to it in the base, untouched."""
    base = tiny_base(tied=True)
    assert base.lm_head.weight is base.model.embed_tokens.weight
    model = CausalQwenModel.from_base_model(base, start="seed", num_token_id=NUM)
    table = model.features.embedding.token_embedding.weight
    assert model.action.cls_weight.data_ptr() != table.data_ptr()
    before = table.detach().clone()
    with torch.no_grad():
        model.action.cls_weight.add_(1.0)
    assert torch.equal(table, before)
    assert model.transformer.embed_tokens is None


@torch.no_grad()
def test_presets_are_the_seeds_constants() -> None:
    for start, threshold in (("seed", 0.0), ("seed-100", 100.0)):
        model = tiny_model(start=start)
        u = model.infer(random_ids(1, 4))
        assert_close(u.scale, torch.full_like(u.scale, math.log1p(math.e)), 2e-6, "softplus(1)")
        assert model.action.threshold.unique().tolist() == [threshold]
        assert_close(model.action.b_noise, torch.full((HIDDEN,), SEED_NOISE), 1e-6, "b_noise")
        assert not model.action.cls_bias.any()
        assert not model.abduction.loc_net.bias.any()
        assert not model.abduction.scale_net.weight.any()
    quiet, loud = tiny_model(b_noise_init=0.0), tiny_model(b_noise_init=2.0)
    assert not quiet.action.b_noise.any()
    u = loud.infer(random_ids(1, 4))
    assert_close(u.scale, torch.full_like(u.scale, math.log1p(math.e)), 2e-6, "softplus(1), whatever the noise")


def test_the_initial_gain_of_a_head_without_a_base() -> None:
    """S1 5: Xavier with gain 0.1."""
    torch.manual_seed(3)
    whole = CausalQwenModel.from_base_model(tiny_base(), start="seed", num_token_id=NUM)
    torch.manual_seed(3)
    tenth = CausalQwenModel.from_base_model(tiny_base(), start="seed", num_token_id=NUM, reg_gain=0.1)
    torch.testing.assert_close(tenth.action.reg_weight, whole.action.reg_weight * 0.1)
    assert not tenth.action.reg_bias.any()


@torch.no_grad()
def test_words_ignore_number_dimensions_which_have_scale_one() -> None:
    model = tiny_model(number_dims=4)
    assert not model.action.cls_weight[:, HIDDEN:].any()
    assert_close(model.action.reg_weight[HIDDEN:], torch.full((4,), 0.25), 1e-6)
    u = model.action.add_noise(model.infer(random_ids(1, 3)))
    assert not u.loc[..., HIDDEN:].any()
    assert_close(u.scale[..., HIDDEN:], torch.ones(1, 3, 4), 2e-6, "total scale of number dimensions")
    plain = tiny_model()
    ids = random_ids(2, 5)
    for found, expected in zip(model(ids, torch.zeros(2, 5)), plain(ids, torch.zeros(2, 5)), strict=True):
        if found.ndim == 3:
            assert_close(found, expected, 1e-5, "S without number dimensions")


@pytest.mark.parametrize(("scale", "noise"), [(5e-8, 5e-8), (1e-4, 0.0), (1.0, 1.0)])
@torch.no_grad()
def test_set_scales(scale: float, noise: float) -> None:
    model = tiny_model()
    set_scales(model, scale, noise)
    total = model.action.add_noise(model.infer(random_ids(1, 3))).scale
    assert_close(total, torch.full_like(total, scale + noise), 5e-6, "total")
    assert_close(model.action.b_noise, torch.full((HIDDEN,), noise), 1e-6, "b_noise")
    assert model.config.scale_floor == model.abduction.scale_floor <= (scale + noise) * 1e-3


@torch.no_grad()
def test_the_row_and_bias_of_num_at_the_start() -> None:
    weight = tiny_base().lm_head.weight
    inherit, small = (tiny_model(num_row_init=how).action for how in ("inherit", "small"))
    assert torch.equal(inherit.cls_weight, weight)
    assert 0.0 < float(small.cls_weight[NUM].std()) < 0.2 * float(weight.std())
    others = torch.arange(VOCAB) != NUM
    assert torch.equal(small.cls_weight[others], weight[others])
    bias = tiny_model(num_bias_init=-10.0).action.cls_bias
    assert float(bias[NUM]) == -10.0
    assert bias.count_nonzero() == 1
    model, bias = tiny_model(), torch.randn(VOCAB)
    inherit_head(model, weight, bias)
    assert torch.equal(model.action.cls_bias, bias), "the base's, if it has one"


@pytest.fixture(scope="module")
def learnt_base() -> CausalQwenModel:
    """A tiny base that knows something: the next id is a fixed function of the last one, learnt by cross-entropy."""
    torch.manual_seed(0)
    base = tiny_base()
    following = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))
    optimizer = torch.optim.AdamW(base.parameters(), 1e-2)
    base.train()
    for step in range(60):
        ids = random_ids(16, 12, seed=step)
        loss = torch.nn.functional.cross_entropy(base(input_ids=ids).logits.flatten(0, 1), following[ids].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    base.eval()
    base.following = following
    return base


def chain_batch(base: CausalQwenModel, seed: int, noise: float = 0.3):
    """Labels follow the learnt map, with a share of random ones."""
    batch = random_batch(6, 20, numbers=False, seed=seed)
    follow = base.following[batch.input_ids]
    g = torch.Generator().manual_seed(seed)
    keep = (torch.rand(follow.shape, generator=g) < noise) | (batch.labels == -100)
    return type(batch)(**{**vars(batch), "labels": torch.where(keep, batch.labels, follow)})


def turned(base: CausalQwenModel, **shape: int) -> CausalQwenModel:
    torch.manual_seed(1)
    return CausalQwenModel.from_base_model(copy.deepcopy(base), start="calibrated", num_token_id=NUM, **shape).eval()


def test_calibration_lowers_the_loss_and_keeps_the_ranking(learnt_base: CausalQwenModel) -> None:
    model = turned(learnt_base, number_dims=2)
    held = chain_batch(learnt_base, 100)
    report = calibrate(model, [chain_batch(learnt_base, s) for s in range(3)])
    assert report.tokens > 100
    assert report.loss < 0.5 * report.seed_loss
    assert report.loss < 1.0 + math.log(VOCAB)  # below the uniform solution
    assert report.base_accuracy > 0.5
    assert report.accuracy >= report.base_accuracy - 0.02
    assert 0.3 < report.prob_sum_median < 3.0
    assert model.action.threshold.unique().tolist() == [pytest.approx(report.threshold)]
    with torch.no_grad():
        loc, scale, *_ = model(held.input_ids, held.numeric_values, held.attention_mask)
    z = (loc - model.action.threshold) / scale
    right = [(x.argmax(-1) == held.labels)[held.label_mask].float().mean().item() for x in (z, loc)]
    assert right[0] >= right[1] - 0.03  # on batches it has not seen, too


def test_calibration_reports_the_loss_that_the_model_then_has(learnt_base: CausalQwenModel) -> None:
    model, batch = turned(learnt_base, number_dims=2), chain_batch(learnt_base, 0)
    report = calibrate(model, [batch], max_tokens=10_000)
    with torch.no_grad():
        loc, scale, *_ = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
        loss, _ = OvrClassificationLoss(VOCAB, model.action.threshold.detach())(loc, scale, batch.labels)
    assert float(loss[batch.label_mask].mean()) == pytest.approx(report.loss, rel=1e-4)
    assert int(batch.label_mask.sum()) == report.tokens


def test_nan_in_a_base_names_the_tensor() -> None:
    model = tiny_model()
    name, weight = next((n, p) for n, p in model.named_parameters() if "mlp" in n)
    weight.data[0, 0] = math.nan
    with pytest.raises(UserError, match=f"NaN or infinity in {re.escape(name)}, allowed: a base that computes"):
        calibrate(model, [random_batch()], max_tokens=8)
