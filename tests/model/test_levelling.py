"""Levelled rows: nothing that softmax feels, and logits that say how likely a word is."""

import pytest
import torch
from support.ranks import Pool, groups_of
from support.tiny import HIDDEN, NUM, random_batch, tiny_base

from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.levelling import level_logits, project_by_features
from cqwen_dist.parallel.groups import ALONE


def model_of(vocab_start: int = 0, rows: int | None = None, **shape: int) -> CausalQwenModel:
    """A tiny model whose normalisers differ from token to token: a direction that all rows share."""
    base = tiny_base("qwen2", tied=False)
    torch.manual_seed(3)
    base.lm_head.weight.data += torch.randn(HIDDEN)
    return CausalQwenModel.from_base_model(
        base, start="calibrated", num_token_id=NUM, vocab_start=vocab_start, rows=rows, **shape
    ).eval()


def locations(model: CausalQwenModel, seed: int = 0) -> torch.Tensor:
    batch = random_batch(8, 20, numbers=False, seed=seed)
    keep = batch.label_mask.flatten().nonzero()[:, 0]
    with torch.no_grad():
        return model.action.word_part(model.abduction(model.kept_features(batch, keep))).loc


def level(model: CausalQwenModel, loc: torch.Tensor) -> float:
    """`level_logits` by the normalisers of these tokens; the share it tells."""
    norm = (loc @ model.action.cls_weight.T + model.action.cls_bias).logsumexp(-1).detach()
    return level_logits(model.action, loc, norm)[0]


def logits(model: CausalQwenModel, loc: torch.Tensor) -> torch.Tensor:
    return (loc.double() @ model.action.cls_weight.double().T + model.action.cls_bias.double()).detach()


def projected(loc: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(this rank's rows of W_cls, W_loc, error) of 6 dimensions for features loc [N,H]; float64."""
    groups = groups_of(len(rows)) if len(rows) > 1 else ALONE
    own = groups.vocab_rank
    model = model_of(sum(rows[:own]), rows[own], causal_size=6, number_dims=2)
    part = len(loc) // max(1, groups.world_size)
    project_by_features(model, loc[groups.rank * part :][:part], groups)
    weights = model.action.cls_weight, model.abduction.loc_net.weight[:6]
    return *(weight.detach().double() for weight in weights), model.action.projection_error


def test_fewer_dimensions_keep_most_of_the_logits_of_real_features(pool: Pool) -> None:
    """No map of rank 6 is nearer to the base's logits (Eckart and Young); two ranks come to the same."""
    torch.manual_seed(5)
    z = torch.randn(200, HIDDEN) * torch.logspace(0, -2, HIDDEN)[torch.randperm(HIDDEN)] @ torch.randn(HIDDEN, HIDDEN)
    base = model_of().action.cls_weight.detach().double()
    weight, into, error = projected(z, [len(base)])
    logits = z.double() @ base.T
    values = torch.linalg.svdvals(logits)
    least = float((values[6:].square().sum() / values.square().sum()).sqrt())
    found = float((logits - z.double() @ into.T @ weight.T).norm() / logits.norm())
    assert least < 0.5
    assert found == pytest.approx(least, rel=1e-2), "but for the little ridge"
    assert error == pytest.approx(least, rel=1e-2)
    assert torch.allclose(into.norm(dim=1), torch.ones(6).double(), atol=1e-6)
    parts = pool(projected, 2, z, [40, len(base) - 40])
    assert torch.allclose(torch.cat([part[0] for part in parts]).abs(), weight.abs(), atol=1e-4)
    assert all(torch.allclose(part[1].abs(), into.abs(), atol=1e-4) for part in parts)


@pytest.mark.parametrize("shape", [{}, {"number_dims": 2}, {"causal_size": HIDDEN + 5}, {"causal_size": HIDDEN - 4}])
def test_levelling_keeps_the_softmax_and_flattens_the_normaliser(shape: dict[str, int]) -> None:
    model = model_of(**shape)
    loc, fresh = locations(model), locations(model, seed=1)
    before, unseen = logits(model, loc), logits(model, fresh)
    told = level(model, loc)
    after, unseen_after = logits(model, loc), logits(model, fresh)
    # a row of order 1 is rounded once, by 6e-8 of itself, over HIDDEN products with loc_U of order 1
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), atol=1e-6, rtol=1e-4)
    assert told > 0.9
    left = float(unseen_after.logsumexp(-1).var() / unseen.logsumexp(-1).var())
    assert left < 0.2, "on tokens it has not seen, too"
    assert 1 - told == pytest.approx(left, abs=0.1), "what is said of left-out tokens holds on others"


def test_with_many_tokens_levelling_is_least_squares() -> None:
    model = model_of()
    loc = locations(model)
    norm = logits(model, loc).logsumexp(-1)
    x = torch.cat([loc.double(), torch.ones(len(loc), 1)], 1)
    expected = torch.linalg.lstsq(x, norm[:, None]).solution[:-1, 0]
    rows = model.action.cls_weight.detach().clone()
    level(model, loc)
    taken = (rows - model.action.cls_weight.detach()).double()
    assert float((taken - taken[0]).abs().max()) < 1e-6, "the same from every row"
    assert float((taken[0] - expected).norm() / expected.norm()) < 0.05, "the ridge is a small one"
