"""C is the model's; the seeds' loss module takes it, so training and generation have the same (S2 4.1, 4.3)."""

import warnings

import pytest
import torch
from support.numerics import assert_close
from support.tiny import NUM, VOCAB, number_prompts, number_writer, random_batch, tiny_causal_lm
from torch import Tensor

from cqwen_dist.generate.generator import generate
from cqwen_dist.heads.fused_loss import LossOptions, TokenLabels, fused_loss
from cqwen_dist.heads.seed_losses import CausalQwenLoss
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel


@pytest.mark.parametrize("c", [-3.0, 0.0, 5.0, torch.linspace(-3, 5, VOCAB)])
@torch.no_grad()
def test_every_way_to_the_loss_reads_the_models_threshold(c: float | Tensor) -> None:
    model, batch = tiny_causal_lm(), random_batch()
    net, mask = model.model, batch.attention_mask
    net.action.threshold.copy_(torch.as_tensor(c))

    loss = CausalQwenLoss(VOCAB, NUM, net.action.threshold)
    seeds, _ = loss(*net(batch.input_ids, batch.numeric_values, mask), batch.labels, batch.numeric_labels, mask)

    kept = batch.kept
    labels = TokenLabels(batch.labels.flatten()[kept], net.action.number_head.labels(batch, kept))
    weights = 1.0 / len(kept), 1.0 / int(batch.numeric_mask.sum())
    training = fused_loss(net.action, net.abduction(net.kept_features(batch, kept)), labels, LossOptions(NUM), *weights)
    assert_close(training.loss, seeds, 1e-5, "training")

    face = model(batch.input_ids, batch.numeric_values, mask, labels=batch.input_ids).loss
    assert_close(face, seeds_loss_of(model, loss), 1e-5, "Hugging Face's")


def seeds_loss_of(model: CausalQwenForCausalLM, loss: CausalQwenLoss) -> Tensor:
    """The seeds' loss of `random_batch` with labels as Hugging Face has them: the ids themselves."""
    batch = random_batch()
    ids, values, mask = batch.input_ids, batch.numeric_values, batch.attention_mask
    scores = [t[:, :-1] for t in model.model(ids, values, mask)]
    return loss(*scores, ids[:, 1:].masked_fill(~mask[:, 1:], -100), values[:, 1:], mask[:, 1:])[0]


def test_training_the_losses_threshold_changes_what_the_model_writes() -> None:
    model, prompt = number_writer(), number_prompts()
    loss = CausalQwenLoss(VOCAB, NUM, model.action.threshold, 0.0, 1.0, True)
    before, batch = written(model, prompt), random_batch()
    step = torch.optim.SGD(loss.parameters(), lr=0.5)
    for _ in range(3):
        scores = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
        loss(*scores, batch.labels, batch.numeric_labels, batch.attention_mask)[0].backward()
        step.step()
    assert loss.ovr_loss.threshold is model.action.threshold
    assert not torch.equal(written(model, prompt), before)


def written(model: CausalQwenModel, prompt: dict[str, Tensor]) -> Tensor:
    return generate(model, **prompt, max_new_tokens=6, eos_token_id=[])[0]


def test_a_loss_with_another_threshold_than_the_model_warns() -> None:
    model, batch = tiny_causal_lm().model, random_batch()
    scores = model(batch.input_ids, batch.numeric_values, batch.attention_mask)
    given = batch.labels, batch.numeric_labels, batch.attention_mask
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CausalQwenLoss(VOCAB, NUM)(*scores, *given)  # both 0
        CausalQwenLoss(VOCAB, NUM, model.action.threshold)(*scores, *given)
    with pytest.warns(UserWarning, match="a different C than the model"):
        CausalQwenLoss(VOCAB, NUM, 5.0)(*scores, *given)
