"""Decisions without generating text: sets of words, and a choice between options.

One-vs-rest decides separately for each word whether it holds, P_k = P(S_k > C_k). So two or more words may hold (seed
S4 3.3.2), or no word (3.3.1: "I do not know"), and the meaning of a threshold does not depend on the other words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.batch import Padded, last_places, positions_in
from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.continuation import Prompt, encoded, padded
from cqwen_dist.generate.generation_settings import check_prompt
from cqwen_dist.generate.modes import prob_words
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.scores import ovr_scores


def inferred(model: Any, batch: Padded, keep: Tensor) -> Cauchy:
    """U at the flat positions `keep` [N], Cauchy [N,C] on the head's device. Raises `UserError` for a bad prompt."""
    net = model.model
    check_prompt(net, batch.ids, batch.values, batch.mask)
    u: Cauchy = net.infer(batch.ids, batch.values, batch.mask, position_ids=positions_in(batch.mask), keep=keep)
    return u.to(net.action.cls_weight.device)


def at_end(model: Any, batch: Padded) -> Cauchy:
    """U [B,C] behind each text."""
    return inferred(model, batch, last_places(batch.ids))


@dataclass(frozen=True)
class Holding:
    """A word that holds, its P and its decision strength (loc_S - C)/scale_S (S4 3.3.3)."""

    id: int
    p: float
    strength: float


@torch.no_grad()
def multi_label(
    model: Any, batch: Padded, prob_threshold: float = 0.5, decision_threshold: float | None = None
) -> list[list[Holding]]:
    """All words in use with P above prob_threshold after each prompt, best first (S4 3.5.3); the list may be empty.

    model: a `CausalQwenForCausalLM`. decision_threshold: C of all words (default: the model's C). Raises `UserError`.
    """
    if decision_threshold is not None and not math.isfinite(decision_threshold):
        raise UserError("decision_threshold", decision_threshold, "a finite number")
    if not 0.0 < prob_threshold < 1.0:
        raise UserError("prob_threshold", prob_threshold, "above 0, below 1")
    u = at_end(model, batch)
    action = model.model.action
    with at_hand(action):
        seen = action.word_part(action.add_noise(u))
        p = prob_words(action, seen, model.config.used_rows, decision_threshold).cpu()
    result = []
    for row in p:
        above = (row > prob_threshold).nonzero()[:, 0]
        order = above[row[above].argsort(descending=True)].tolist()
        result.append([Holding(i, float(row[i]), -1.0 / math.tan(math.pi * float(row[i]))) for i in order])
    return result


@dataclass(frozen=True)
class Choice:
    """The chosen option, or None if no option is likely enough; p: P of each."""

    option: str | None
    p: dict[str, float]


def choose(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: Sequence[str], reject_below: float = 0.0
) -> list[Choice]:
    """The option that is most likely to follow each prompt, or none if its P is below reject_below.

    P of an option is the product of its tokens' one-vs-rest P. These P do not sum to 1 over the options: all may be
    small, or several large. Raises `UserError`.
    """
    if not 0.0 <= reject_below <= 1.0:
        raise UserError("reject_below", reject_below, "0 to 1")
    if isinstance(options, str) or len(set(options)) < max(1, len(options)):
        raise UserError("options", options, "a list of different texts, one at least")
    if len({tuple(reader(tokenizer).encode(option, begin=False)[0]) for option in options}) < len(options):
        raise UserError("options", list(options), "texts of different words (P of a number is not that of its value)")
    result = []
    for prompt in prompts:
        p = dict(zip(options, map(math.exp, _log_p(model, tokenizer, prompt, options)), strict=True))
        best = max(p, key=lambda option: p[option])
        result.append(Choice(best if p[best] >= reject_below else None, p))
    return result


@torch.no_grad()
def _log_p(model: Any, tokenizer: Tokenizer, prompt: Prompt, continuations: Sequence[str]) -> list[float]:
    """log P of each continuation of one prompt, summed over its tokens. Raises `UserError` if one has no tokens."""
    tokenizer = reader(tokenizer)
    before_ids, before_values = encoded(tokenizer, prompt)
    if not before_ids:
        raise UserError("prompt", "no tokens", "some text")
    # Prompt and continuation are encoded apart, so that a continuation cannot change how the prompt is tokenized.
    after = [tokenizer.encode(text, begin=False) for text in continuations]
    lengths = [len(ids) for ids, _ in after]
    if not all(lengths):
        raise UserError("continuation", "no tokens", "some text")
    batch = padded(model, tokenizer, [(before_ids + ids, before_values + values) for ids, values in after])
    width, device = batch.ids.shape[1], batch.ids.device
    targets = torch.stack([torch.arange(width) >= width - n for n in lengths]).to(device)
    u = inferred(model, batch, targets.flatten().nonzero()[:, 0] - 1)  # each token is predicted one position before it
    action = model.model.action
    with at_hand(action):
        seen = action.word_part(action.add_noise(u))
        found = ovr_scores(seen, action.word_head(), batch.ids[targets].to(seen.loc.device))
    log_p = found.label_log_p.double().cpu().split(lengths)
    return [float(each.sum()) for each in log_p]
