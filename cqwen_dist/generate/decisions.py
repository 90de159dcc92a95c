"""Decisions that need no text to be written: words that hold, options to choose from or refuse, texts to be scored.

One-vs-rest asks of every word by itself whether it holds, P_k = P(S_k > C_k). So several may hold at once (seed S4
3.3.2), none may (3.3.1: "I do not know"), and a threshold means the same whatever the other words are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqwen_dist.config import UserError
from cqwen_dist.generate.continuation import Padded, input_device, padded
from cqwen_dist.generate.generation_settings import check_prompt
from cqwen_dist.generate.generator import at_hand
from cqwen_dist.generate.modes import prob_words
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.scores import ovr_scores
from cqwen_dist.ops.ovr.topk import prob_at


@torch.no_grad()
def law_at_end(model: Any, batch: Padded) -> Cauchy:
    """U' behind each prompt, Cauchy [B,C] where the head is. model: a `CausalQwenForCausalLM`. Raises `UserError`."""
    net = model.model
    check_prompt(net, batch.ids, batch.values, batch.mask)
    b, t = batch.ids.shape
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    last = torch.arange(1, b + 1, device=batch.ids.device) * t - 1
    u = net.infer(batch.ids, batch.values, batch.mask, position_ids=positions, keep=last)
    with at_hand(net.action):
        return net.action.add_noise(u.to(net.action.cls_weight.device))


@dataclass(frozen=True)
class Holding:
    """A word that holds, with its P and its decision strength (loc_S - C)/scale_S (S4 3.3.3)."""

    id: int
    p: float
    strength: float


@torch.no_grad()
def multi_label(
    model: Any,
    batch: Padded,
    prob_threshold: float = 0.5,
    words: Sequence[int] | None = None,
    decision_threshold: float | None = None,
) -> list[list[Holding]]:
    """Every word whose P is above the threshold behind each prompt, best first (S4 3.5.3); none is an answer too.

    words: ids to ask (default: all in use). decision_threshold: C of every word (default: the model's own). Raises
    `UserError`.
    """
    if decision_threshold is not None and not math.isfinite(decision_threshold):
        raise UserError("decision_threshold", decision_threshold, "a finite number")
    if not 0.0 < prob_threshold < 1.0:
        raise UserError("prob_threshold", prob_threshold, "above 0, below 1")
    net = model.model
    law = law_at_end(model, batch)
    with at_hand(net.action):
        seen = net.action.word_part(law)
        if words is None:
            p = prob_words(net.action, seen, int(model.config.used_rows), decision_threshold)
            ids = torch.arange(p.shape[1])
        else:
            ids = torch.tensor(_known(words, model.config.vocab_size), dtype=torch.int64)
            head = net.action.word_head()
            if decision_threshold is not None:
                head = head._replace(threshold=torch.tensor(decision_threshold, device=seen.loc.device))
            p = prob_at(seen, head, ids.to(seen.loc.device))
    result = []
    for row in p.cpu():
        above = (row > prob_threshold).nonzero()[:, 0]
        order = above[row[above].argsort(descending=True)]
        result.append([Holding(int(ids[i]), float(row[i]), -1.0 / math.tan(math.pi * float(row[i]))) for i in order])
    return result


@dataclass(frozen=True)
class Choice:
    """Which option, or None where none holds; p: P of each."""

    option: str | None
    p: dict[str, float]


def choose(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], options: Sequence[str], reject_below: float = 0.0
) -> list[Choice]:
    """The option most likely to come next behind each prompt; none of them where its P is below reject_below.

    P of an option is that of its tokens one after the other, the product of their one-vs-rest P: it is not shared out
    among the options, so it may be small for all of them, or large for several. Raises `UserError`.
    """
    if not 0.0 <= reject_below <= 1.0:
        raise UserError("reject_below", reject_below, "0 to 1")
    if len(set(options)) < max(1, len(options)):
        raise UserError("options", list(options), "different texts, one at least")
    result = []
    for prompt in prompts:
        p = {s.text: math.exp(s.log_p) for s in score(model, tokenizer, prompt, options)}
        best = max(p, key=lambda option: p[option])
        result.append(Choice(best if p[best] >= reject_below else None, p))
    return result


@dataclass(frozen=True)
class Score:
    """How well a text continues a prompt, in nats.

    log_p: sum of log P of its words, one-vs-rest. log_softmax: sum of the log softmax(loc_S), the base model's own
    measure. log_density: sum of the numbers' log densities, per unit of the raw number; 0 without numbers.
    """

    text: str
    tokens: int
    log_p: float
    log_softmax: float
    log_density: float


@torch.no_grad()
def score(model: Any, tokenizer: Tokenizer, prompt: str, continuations: Sequence[str]) -> list[Score]:
    """Continuations of one prompt as they stand, in one batch. Raises `UserError` for one without tokens."""
    net, num, tokenizer = model.model, model.config.num_token_id, reader(tokenizer)
    before = len(tokenizer.encode(prompt)[0])
    if not before:
        raise UserError("prompt", "no tokens", "some text")
    lengths = [len(tokenizer.encode(text)[0]) for text in continuations]
    if not all(lengths):
        raise UserError("continuation", "no tokens", "some text")
    # Prompt and continuation are read apart, so that a continuation cannot change how the prompt is cut into words.
    joined = _Joined(tokenizer, prompt)
    batch = padded(joined, continuations, input_device(model))
    check_prompt(net, batch.ids, batch.values, batch.mask)
    rows, width = batch.ids.shape
    targets = torch.stack([torch.arange(width) >= width - n for n in lengths]).to(batch.ids.device)
    keep = (targets.flatten().nonzero()[:, 0] - 1).to(batch.ids.device)  # what predicts each token of a continuation
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    u = net.infer(batch.ids, batch.values, batch.mask, position_ids=positions, keep=keep)
    labels, values = batch.ids[targets], batch.values[targets]
    with at_hand(net.action):
        action = net.action
        law = action.add_noise(u.to(action.cls_weight.device))
        seen = action.word_part(law)
        found = ovr_scores(seen, action.word_head(), labels.to(seen.loc.device))
        y = action.value(law)
    softmax = (found.label_loc - found.log_norm).double().cpu()
    log_p = found.label_log_p.double().cpu()
    density = -_raw_nll(net.target, y, values).double().cpu() * (labels.cpu() == num)
    owner = targets.nonzero()[:, 0].cpu()
    sums = [torch.zeros(rows, dtype=torch.float64).index_add_(0, owner, x) for x in (log_p, softmax, density)]
    return [Score(text, lengths[i], *(float(total[i]) for total in sums)) for i, text in enumerate(continuations)]


class _Joined:
    """A tokenizer that puts the prompt's tokens before each text's."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self._tokenizer, self._before = tokenizer, tokenizer.encode(prompt)

    def encode(self, text: str) -> tuple[list[int], list[float]]:
        ids, values = self._tokenizer.encode(text)
        return self._before[0] + ids, self._before[1] + values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _raw_nll(target: Any, y: Cauchy, values: Tensor) -> Tensor:
    """-log density at raw values: in the target's unit, and the transform's derivative."""
    raw = values.to(y.loc.device)
    nll = y.to(torch.float64).nll(target.forward(raw).double())
    return nll - target.log_derivative(raw)


def _known(words: Sequence[int], vocab_size: int) -> list[int]:
    odd = next((word for word in words if not 0 <= word < vocab_size), None)
    if odd is not None:
        raise UserError("words", odd, f"ids in [0, {vocab_size})")
    return list(words)
