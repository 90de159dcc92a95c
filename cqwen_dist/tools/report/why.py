"""Why a word: the dimensions of U that decide it, what drawn individuals choose, and how U moved (S4 2.5.4, 5.4).

A score is a sum over the dimensions that words see, loc_S_k = sum_j W_kj u_j + b_k, so each dimension contributes
W_kj u_j to the decision. Number dimensions contribute nothing and are left out.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.generation_settings import check_prompt
from cqwen_dist.generate.modes import prob_words
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy

WORDS = 3  # the chosen word and the next two
TURN = 1.5  # a step of U that is as many times as large as the median step is a change point


@dataclass(frozen=True)
class WordScore:
    """A word, its P, and loc_S = sum of contributions + rest + bias."""

    id: int
    text: str
    p: float
    loc: float
    bias: float
    contributions: list[float]  # W_kj u_j in `Why.dims`
    rest: float  # of all other dimensions


@dataclass(frozen=True)
class Why:
    """The explanation of the word after a prompt."""

    prompt: str
    dims: list[int]  # those that contribute most to the first word
    u: list[float]  # loc_U in them
    words: list[WordScore]
    individuals: list[str]  # the words that drawn individuals choose
    path: list[tuple[str, float]]  # each token after the first, and how far it moved loc_U, in median steps of the text


@torch.no_grad()
def why(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    dims: int = 8,
    individuals: int = 0,
    seed: int = 0,
    begin: bool = True,
) -> Why:
    """How the individual decides the word after a prompt: the likeliest `WORDS`.

    model: a `CausalQwenForCausalLM`. dims: number of dimensions to name. individuals: number to draw. begin: False for
    chats. Raises `UserError`.
    """
    if dims < 1:
        raise UserError("dims", dims, "1 or more")
    if individuals < 0:
        raise UserError("individuals", individuals, "0 or more")
    tokenizer = reader(tokenizer)
    ids, values = tokenizer.encode(prompt, begin)
    batch = padded(model, tokenizer, [(ids, values)])
    net, action, rows = model.model, model.model.action, model.config.used_rows
    check_prompt(net, batch.ids, batch.values, batch.mask)
    law = net.infer(batch.ids, batch.values, batch.mask)
    with at_hand(action):
        seen = action.word_part(law.to(action.cls_weight.device))
        noise = action.b_noise.abs()[: action.word_size]
        last = Cauchy(seen.loc[0, -1:], seen.scale[0, -1:])
        p = prob_words(action, Cauchy(last.loc, last.scale + noise), rows)[0]
        named = p.topk(min(WORDS, len(p))).indices.tolist()
        parts = (action.cls_weight[named] * last.loc).double().cpu()
        bias = action.cls_bias[named].double().cpu()
        eps = torch.rand(individuals, action.word_size, generator=torch.Generator().manual_seed(seed))
        wide, tails = Intervals.from_dict(net.config.calibration).word_draws(1.0, 0.0)
        drawn = Cauchy(last.loc, wide * last.scale).sample(eps.to(last.loc).clamp(tails, 1 - tails))
        chosen = prob_words(action, Cauchy(drawn, noise.expand_as(drawn)), rows).argmax(-1).tolist()
    top = parts[0].abs().argsort(descending=True)[:dims]
    scores = [
        WordScore(
            word, tokenizer.decode([word]), float(p[word]), float(part.sum() + b), float(b),
            part[top].tolist(), float(part.sum() - part[top].sum()),
        )
        for word, part, b in zip(named, parts, bias, strict=True)
    ]  # fmt: skip
    u = last.loc[0, top.to(last.loc.device)].tolist()
    steps = seen.loc[0].double().diff(dim=0).norm(dim=-1).cpu()
    far = (steps / steps.median().clamp(min=1e-300)).tolist() if len(steps) else []
    read = [tokenizer.decode([id_], [value]) for id_, value in zip(ids[1:], values[1:], strict=True)]
    path = list(zip(read, far, strict=True))
    return Why(prompt, top.tolist(), u, scores, [tokenizer.decode([word]) for word in chosen], path)


def tables(found: list[Why]) -> Any:
    """For the console: a table for each prompt."""
    from rich.console import Group
    from rich.table import Table

    parts: list[Any] = []
    for each in found:
        table = Table("dimension", "u", *(repr(word.text) for word in each.words), title=each.prompt[-80:])
        for i, (dim, u) in enumerate(zip(each.dims, each.u, strict=True)):
            table.add_row(str(dim), f"{u:.4g}", *(f"{word.contributions[i]:+.4g}" for word in each.words))
        for name, part in (("others", "rest"), ("bias", "bias"), ("loc_S", "loc"), ("P", "p")):
            table.add_row(name, "", *(f"{getattr(word, part):.4g}" for word in each.words))
        parts.append(table)
        if each.individuals:
            chosen = ", ".join(map(repr, each.individuals))
            parts.append(f"{len(each.individuals)} drawn individuals choose: {chosen}")
        if turns := [f"{token!r} ({step:.1f})" for token, step in each.path if step > TURN]:
            parts.append(f"U moves most at {', '.join(turns)} (median steps)")
    return Group(*parts)
