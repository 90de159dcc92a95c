"""Ways to write many texts after one prompt, such that the n-th writer is the same one for every prompt, or is not.

individual      U is drawn once for each writer: the same quantiles at every step and prompt (S3 3.4.1); at the model's
                word temperature, or at one that is given
fresh           Gumbel noise on softmax's logits, new at every step and prompt: sampling with a temperature; with
                `nucleus`, among the most probable words that make up this share (top-p)
replayed        the noise of a step is the same for every prompt (arXiv 2409.17027)
constant        one noise for each word, the same at every step and prompt

Ordinary sampling is the largest logit after Gumbel noise, so the last three sample the effect, and differ only in which
noise is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.generator import generate
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.ovr.scores import ovr_scores

KINDS = ("individual", "fresh", "replayed", "constant")


@dataclass(frozen=True)
class Way:
    """How texts are written. temperature: of individuals' words; None: the model's own (`word_temperature`). nucleus:
    the share of softmax that the words to choose from make up, for the others."""

    kind: str
    temperature: float | None
    nucleus: float = 1.0

    def at(self, temperature: float) -> Way:
        """The same at another temperature."""
        return replace(self, temperature=temperature)


class Texts(NamedTuple):
    """What N writers wrote after each of M prompts."""

    ids: Tensor  # [M,N,T] int64, without the prompt
    surprise: Tensor  # [M,N] mean of -log softmax(loc_S) of the words, in nats


@dataclass
class GumbelNoise:
    """A logits processor: logits [N,V] / temperature + noise. Its argmax is a draw from softmax(logits /
    temperature)."""

    way: Way
    seed: int
    prompt: int
    width: int  # of the prompt, in tokens

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        step = ids.shape[1] - self.width
        place = {"fresh": (1 + self.prompt, 1 + step), "replayed": (0, 1 + step), "constant": (0, 0)}[self.way.kind]
        draw = torch.Generator().manual_seed((self.seed * 1009 + place[0]) * 100_003 + place[1])
        uniform = torch.rand(logits.shape, generator=draw).clamp(1e-12, 1 - 1e-7).to(logits.device)
        logits = logits / (self.way.temperature or 1.0)
        if self.way.nucleus < 1:
            logits = TopPLogitsWarper(self.way.nucleus)(ids, logits)
        return logits - torch.log(-torch.log(uniform))


def write(
    model: CausalQwenModel,
    tokenizer: NumericalAwareTokenizer,
    prompts: list[str],
    way: Way,
    writers: int,
    words: int,
    seed: int,
    judged: bool = True,
) -> Texts:
    """Every writer continues every prompt by `words` tokens. judged: whether the surprise is measured."""
    ids, surprise, device = [], [], model.action.cls_weight.device
    for number, prompt in enumerate(prompts):
        own_ids, own_values = tokenizer.encode(prompt)
        given = torch.tensor(own_ids).to(device), torch.tensor(own_values).double().to(device)
        width = len(own_ids)
        wide = "auto" if way.temperature is None else way.temperature
        options: dict[str, Any] = {"mode": "individual", "word_temperature": wide, "seed": seed}
        if way.kind != "individual":
            options = {"mode": "compatible", "logits_processor": GumbelNoise(way, seed, number, width)}
        found, numbers = generate(
            model, *(row.expand(writers, -1) for row in given), max_new_tokens=words, eos_token_id=[], **options
        )
        ids.append(found[:, width:])
        kept = surprise_of(model, found, numbers.values, width) if judged else torch.zeros(writers)
        surprise.append(kept)
    return Texts(torch.stack(ids).cpu(), torch.stack(surprise).cpu())


@torch.no_grad()
def surprise_of(model: CausalQwenModel, ids: Tensor, values: Tensor, width: int) -> Tensor:
    """The mean of -log softmax(loc_S) of the tokens from `width` on: ids, values [N,T] -> [N]."""
    rows, length = ids.shape
    ahead = torch.arange(width - 1, length - 1)
    keep = (torch.arange(rows)[:, None] * length + ahead).flatten().to(ids.device)
    u = model.action.add_noise(model.infer(ids, values, keep=keep))
    labels = ids[:, width:].flatten()
    scores = ovr_scores(model.action.word_part(u), model.action.word_head(), labels)
    return (scores.log_norm - scores.label_loc).view(rows, -1).mean(1)


def diversity(ids: Tensor) -> float:
    """How different the writers' texts [M,N,T] of one prompt are: the mean over pairs of 1 - shared / all words."""
    found = []
    for texts in ids.tolist():
        own = [set(text) for text in texts]
        for i, first in enumerate(own):
            found += [1 - len(first & second) / len(first | second) for second in own[:i]]
    return sum(found) / max(len(found), 1)


def matched(
    model: CausalQwenModel,
    tokenizer: NumericalAwareTokenizer,
    prompts: list[str],
    way: Way,
    goal: float,
    span: tuple[float, float],
    writers: int,
    words: int,
    seed: int,
    tries: int = 5,
) -> Way:
    """The way at the temperature, within the span, whose texts are as different as the goal, by halving its
    logarithm."""
    low, high = (math.log(end) for end in span)
    best = way
    nearest = math.inf
    for _ in range(tries):
        middle = way.at(math.exp((low + high) / 2))
        found = diversity(write(model, tokenizer, prompts, middle, writers, words, seed, judged=False).ids)
        if abs(found - goal) < nearest:
            best, nearest = middle, abs(found - goal)
        half = (low + high) / 2
        low, high = (low, half) if found > goal else (half, high)
    return best
