"""The loss of exported code in plain torch equals training's, in chunks of any size."""

from typing import Any

import pytest
import torch
from support.numerics import assert_all_close, assert_close
from support.tiny import NUM, random_batch, tiny_causal_lm

from cqwen_dist.heads import fused_loss
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr import TermOptions
from cqwen_dist.ops.ovr.head import AS_WRITTEN
from cqwen_dist.tools.export import plain_loss

SHAPES: list[dict[str, Any]] = [{}, {"scalar_threshold": True, "candidates": "arithmetic"}]


@pytest.mark.parametrize(
    ("shape", "scores", "terms"),
    [
        *((shape, 1000, AS_WRITTEN) for shape in SHAPES),
        (SHAPES[0], 1, TermOptions(1.0, 3.0)),
        (SHAPES[1], 1 << 23, TermOptions(1.0, 3.0)),
    ],
)
def test_plain_loss_equals_the_fused_one(shape, scores, terms, monkeypatch) -> None:
    monkeypatch.setattr(plain_loss, "SCORES", scores)
    model, batch = tiny_causal_lm(number_dims=2, **shape).model, random_batch()
    kept = batch.kept
    features = model.features(batch.input_ids, batch.numeric_values).flatten(0, 1)[kept].detach()
    found = []
    for mean_loss in (plain_loss.mean_loss, fused_loss.mean_loss):
        model.zero_grad()
        numbers = model.action.number_head.labels(batch, kept)
        loss = mean_loss(model.action, model.abduction(features), batch.labels.flatten()[kept], numbers, NUM, terms)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
    assert_close(found[0][0], found[1][0], 1e-6)
    assert_all_close(found[0][1], found[1][1], 1e-5)


def test_no_labels_give_a_loss_of_zero_with_gradients() -> None:
    model, batch = tiny_causal_lm().model, random_batch()
    none = batch.kept[:0]
    numbers = model.action.number_head.labels(batch, none)
    u = Cauchy(torch.zeros(0, 24, requires_grad=True), torch.ones(0, 24))
    loss = plain_loss.mean_loss(model.action, u, batch.labels.flatten()[none], numbers, NUM)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_micro_batches_count_by_their_labels() -> None:
    """As Trainer accumulates: the micro-batches' losses, each with the labels of the whole step, add up."""
    model = tiny_causal_lm()
    ids = random_batch(4, 12, numbers=False).input_ids
    labels = ids.clone()
    labels[0, 3:] = -100
    with torch.no_grad():
        whole = model(ids, labels=labels).loss
        items = int((labels[:, 1:] != -100).sum())
        parts = [model(ids[at], labels=labels[at], num_items_in_batch=items).loss for at in (slice(0, 1), slice(1, 4))]
    assert_close(sum(parts), whole, 1e-6)
