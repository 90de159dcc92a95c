"""The loss of labels as Hugging Face has them."""

from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import IGNORE_INDEX, Batch, positions_in
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.heads.fused_loss import mean_loss
from cqwen_dist.heads.numerals import given_digits
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import TermOptions


def refuse_foreign(given: dict[str, Any]) -> None:
    """Raises `UserError` for shift_labels and TypeError for other arguments that `forward` does not have.

    shift_labels cannot stand in its signature: Trainer evaluates only batches with every "label" that stands there.
    """
    if given.pop("shift_labels", None) is not None:
        allowed = "none: pass labels, which are shifted here together with the values of their numbers"
        raise UserError("shift_labels", Said("labels that were shifted before"), allowed)
    if given:
        raise TypeError(f"forward() got an unexpected keyword argument {next(iter(given))!r}")


def loss_of_labels(
    causal: Any, u: Cauchy, labels: Tensor, ids: Any, values: Any, mask: Any, num_items_in_batch: Any
) -> Tensor:
    """`mean_loss` of U [B,T,C] and unshifted labels [B,T] (S0 5.3 with alpha 0, the gate without gradient, lambda 1).

    causal: a `CausalQwenForCausalLM`. ids, values, mask [B,T], or None. num_items_in_batch: labels of all
    micro-batches of the step, as Trainer counts them. The loss is then this micro-batch's share, so that micro-batches
    count by their labels.
    """
    action, config = causal.model.action, causal.config
    width, items = labels.shape[1], (labels[:, 1:] != IGNORE_INDEX).sum()  # as Trainer counts
    real = torch.ones_like(labels, dtype=torch.bool)
    if mask is not None:
        real = mask[:, -width:].bool()  # with a cache the mask covers earlier tokens too
    if values is None:
        values = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    follows = torch.nn.functional.pad(real[:, 1:], (0, 1)) & real
    if config.digit_rows and ids is not None:
        given = given_digits((ids == config.num_token_id) & real, values)
        follows &= ~torch.nn.functional.pad(given[:, 1:], (0, 1))
    labels = labels.roll(-1, 1).masked_fill(~follows, IGNORE_INDEX)
    batch = Batch(
        input_ids=torch.zeros_like(labels) if ids is None else ids,
        numeric_values=values,
        attention_mask=real,
        position_ids=positions_in(real),
        labels=labels,
        numeric_labels=values.roll(-1, 1),
        numeric_mask=labels == config.num_token_id,
    )
    kept = batch.kept
    at = Cauchy(*(t.flatten(0, 1)[kept] for t in u))
    numbers, terms = action.number_head.labels(batch, kept), TermOptions(**config.word_terms)
    loss = mean_loss(action, at, labels.flatten()[kept], numbers, int(config.num_token_id), terms)
    return loss if num_items_in_batch is None else loss * (items / num_items_in_batch)
