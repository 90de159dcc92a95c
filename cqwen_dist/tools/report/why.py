"""Why a word: the dimensions of U that decide it, and where the individuals of a prompt lie (S4 2.5.4, 5.4).

A score is a sum over the dimensions that words see, loc_S_k = sum_j W_kj u_j + b_k, so each dimension contributes
W_kj u_j to the decision. Number dimensions contribute nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.decisions import rows_for
from cqwen_dist.generate.generation_settings import check_prompt
from cqwen_dist.generate.modes import prob_words
from cqwen_dist.generate.plot import drawing, share
from cqwen_dist.generate.streaming import Tokenizer, reader
from cqwen_dist.heads.precision import at_hand
from cqwen_dist.ops.cauchy import Cauchy

WORDS = 3  # the chosen word and the next two


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
class MapPoint:
    """An individual on the map: that of a token, or a drawn one with the word that it chooses."""

    text: str
    x: float
    y: float


@dataclass(frozen=True)
class Why:
    """The explanation of the word after a prompt. The map's axes are the principal components of the tokens'
    individuals."""

    prompt: str
    dims: list[int]  # those that contribute most to the first word
    u: list[float]  # loc_U in them
    words: list[WordScore]
    tokens: list[MapPoint]  # loc_U at each token; the last one decides
    individuals: list[MapPoint]  # drawn at the last token
    shares: tuple[float, float]  # of the tokens' variance, on each axis


@torch.no_grad()
def why(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    words: Sequence[int] | None = None,
    dims: int = 8,
    individuals: int = 0,
    seed: int = 0,
    begin: bool = True,
) -> Why:
    """How the individual decides the word after a prompt.

    model: a `CausalQwenForCausalLM`. words: ids to explain (default: the likeliest). dims: number of dimensions to
    name. individuals: number to draw. begin: False for chats. Raises `UserError`.
    """
    if dims < 1:
        raise UserError("dims", dims, "1 or more")
    if individuals < 0:
        raise UserError("individuals", individuals, "0 or more")
    rows = rows_for(model, words)
    tokenizer = reader(tokenizer)
    ids, values = tokenizer.encode(prompt, begin)
    batch = padded(model, tokenizer, [(ids, values)])
    net, action = model.model, model.model.action
    check_prompt(net, batch.ids, batch.values, batch.mask)
    law = net.infer(batch.ids, batch.values, batch.mask)
    with at_hand(action):
        seen = action.word_part(law.to(action.cls_weight.device))
        noise = action.b_noise.abs()[: action.word_size]
        last = Cauchy(seen.loc[0, -1:], seen.scale[0, -1:])
        p = prob_words(action, Cauchy(last.loc, last.scale + noise), rows)[0]
        named = p.topk(min(WORDS, len(p))).indices.tolist() if words is None else list(words)
        parts = (action.cls_weight[named] * last.loc).double().cpu()
        bias = action.cls_bias[named].double().cpu()
        eps = torch.rand(individuals, action.word_size, generator=torch.Generator().manual_seed(seed))
        drawn = last.sample(eps.to(last.loc))
        chosen = prob_words(action, Cauchy(drawn, noise.expand_as(drawn)), rows).argmax(-1).tolist()
    top = parts[0].abs().argsort(descending=True)[:dims]
    scores = [
        WordScore(
            word, tokenizer.decode([word]), float(p[word]), float(part.sum() + b), float(b),
            part[top].tolist(), float(part.sum() - part[top].sum()),
        )
        for word, part, b in zip(named, parts, bias, strict=True)
    ]  # fmt: skip
    centre, axes, shares = principal_axes(seen.loc[0].double().cpu().numpy())
    labels = [tokenizer.decode([word], [value]) for word, value in zip(ids, values, strict=True)]
    tokens, others = ((u.double().cpu().numpy() - centre) @ axes for u in (seen.loc[0], drawn))
    return Why(
        prompt, top.tolist(), last.loc[0, top.to(last.loc.device)].tolist(), scores,
        [MapPoint(text, *map(float, at)) for text, at in zip(labels, tokens, strict=True)],
        [MapPoint(tokenizer.decode([word]), *map(float, at)) for word, at in zip(chosen, others, strict=True)],
        shares,
    )  # fmt: skip


def principal_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """(centre [C], axes [C,2], share of the variance on each) of points [N,C]. An axis without variance is zero.

    An axis has the sign of its largest entry.
    """
    centre = points.mean(0)
    _, sizes, rows = np.linalg.svd(points - centre, full_matrices=False)
    axes, variance = np.zeros((points.shape[1], 2)), np.zeros(2)
    kept = min(2, int((sizes > 1e-12 * max(1.0, float(sizes[0]))).sum()))
    for i in range(kept):
        axes[:, i] = rows[i] * np.sign(rows[i][np.abs(rows[i]).argmax()])
        variance[i] = sizes[i] ** 2
    first, second = variance / max(float((sizes**2).sum()), 1e-300)
    return centre, axes, (float(first), float(second))


def map_plot(
    title: str, tokens: Sequence[tuple[str, float, float]], others: Sequence[tuple[str, float, float]], note: str
) -> str:
    """An SVG document: named points, those of tokens joined in order, the last one large; the rest in a second colour.

    The axes span the tokens; others beyond them are drawn at the edge.
    """
    width, height, margin, top = 640, 420, 40, 44
    spans = []
    for axis in (1, 2):
        low, high = min(float(p[axis]) for p in tokens), max(float(p[axis]) for p in tokens)
        spans.append((low - 1.0, high + 1.0) if high <= low else (low - 0.1 * (high - low), high + 0.1 * (high - low)))

    def at(x: float, y: float) -> tuple[float, float]:
        return margin + (width - 2 * margin) * share(x, *spans[0]), top + height * (1.0 - share(y, *spans[1]))

    places = [at(x, y) for _, x, y in tokens]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    lines = [f'<path d="M{path}" stroke="#ccc" fill="none"/>']
    for named, colour in ((others, "#b52"), (tokens, "#146")):
        for i, (text, x, y) in enumerate(named):
            px, py = at(x, y)
            size = 6 if named is tokens and i == len(tokens) - 1 else 3
            lines.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{size}" fill="{colour}"/>')
            label = escape(text.strip() or "·")
            lines.append(f'<text x="{px + 7:.1f}" y="{py - 4:.1f}" font-size="10" fill="{colour}">{label}</text>')
    lines.append(f'<text x="12" y="{top + height + 30}" fill="#666">{escape(note)}</text>')
    return drawing(title, width, top + height + 40, lines)


def picture(found: Why) -> str:
    """The map as SVG."""
    tokens, others = ([(place.text, place.x, place.y) for place in part] for part in (found.tokens, found.individuals))
    note = "axes: the tokens' first two principal components, {:.0%} and {:.0%} of the variance".format(*found.shares)
    return map_plot(found.prompt[-80:], tokens, others, note)


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
            chosen = ", ".join(repr(point.text) for point in each.individuals)
            parts.append(f"{len(each.individuals)} drawn individuals choose: {chosen}")
    return Group(*parts)
