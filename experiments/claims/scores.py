"""What a model says at every position: one-vs-rest and softmax side by side, scales, numbers. Written once a seed.

The experiments on uncertainty and on calibration read these files, so a base is asked once. softmax(loc_S) of the start
is the base's own distribution, but for <NUM> and the digits; words alone are compared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.ops.cauchy import Cauchy, prob_above
from cqwen_dist.ops.ovr.best import all_scores
from cqwen_dist.run.files import written_whole
from experiments.claims.lists import asked_lists
from experiments.claims.subject import Ask, Positions, calibrated, read, train_heads
from experiments.claims.texts import KINDS, texts_of

TOGETHER = 64  # positions in a matrix [N,V]
STAGES = ("start", "trained")
BINS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0001)  # edges of P, over all words
SMALL = 1e-3  # P below it belongs to the tail of a Cauchy rather than to a word that may come
Scores = dict[str, np.ndarray]


@torch.no_grad()
def scored(model: CausalQwenModel, seen: Positions) -> Scores:
    """Columns [N] float64 by name, and `bins ovr`, `bins softmax` [3, bins]: count, sum of P, hits of all words.

    best, p, scale: the word of largest P, its P and scale_S. p_sum, p_sq: sums over words of P and its square. p_tail:
    of P below `SMALL`. p_label. u_scale: the mean scale of U over the words' dimensions. soft_*: the same of softmax;
    entropy and margin (of the two largest) in nats. y_loc, y_scale, crps: in the target's unit, with goal.
    """
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    bins = {"bins ovr": np.zeros((3, len(BINS) - 1)), "bins softmax": np.zeros((3, len(BINS) - 1))}
    action = model.action
    head = action.word_head(int(model.config.used_rows))
    used = head.take(slice(0, head.rows))
    for first in range(0, len(seen.labels), TOGETHER):
        part = Positions(*(column[first : first + TOGETHER] for column in seen))
        u = model.abduction(part.z)
        u_prime = action.add_noise(u)
        word = action.word_part(u_prime)
        gap, (loc, scale) = all_scores(word, used)
        p = prob_above(scale, gap)
        soft = loc.log_softmax(1)
        found = _of_words(p, scale, soft, part.labels) | _of_numbers(model, u_prime, part)
        found["u_scale"] = action.word_part(u).scale.mean(1)
        found |= {"label": part.labels, "text": part.text, "is_number": part.is_number}
        for name, column in found.items():
            columns[name].append(column.double().cpu().numpy())
        for name, every in (("bins ovr", p), ("bins softmax", soft.exp())):
            bins[name] += _binned(every, part.labels)
    return {name: np.concatenate(parts) for name, parts in columns.items()} | bins


def _of_words(
    p: torch.Tensor, scale: torch.Tensor, soft: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Columns [N] of P, scale_S and log softmax [N,V]."""
    top, best = p.max(1)
    soft_top, soft_best = soft.topk(2, 1)
    at, q = labels.unsqueeze(1), soft.exp()
    return {
        "best": best,
        "p": top,
        "scale": scale.gather(1, best.unsqueeze(1))[:, 0],
        "p_sum": p.sum(1),
        "p_sq": p.square().sum(1),
        "p_tail": torch.where(p < SMALL, p, 0.0).sum(1),
        "p_label": p.gather(1, at)[:, 0],
        "soft_best": soft_best[:, 0],
        "soft_p": soft_top[:, 0].exp(),
        "soft_sq": q.square().sum(1),
        "soft_label": q.gather(1, at)[:, 0],
        "soft_entropy": -(q * soft).sum(1),
        "soft_margin": soft_top[:, 0] - soft_top[:, 1],
    }


def _of_numbers(model: CausalQwenModel, u_prime: Cauchy, part: Positions) -> dict[str, torch.Tensor]:
    """Columns [N] of Y, in the target's unit; only those where the label is a number have a meaning."""
    y, goal = model.action.number_head.value(u_prime), model.target.forward(part.values)
    return {"y_loc": y.loc, "y_scale": y.scale, "goal": goal, "crps": y.crps(goal)}


def _binned(p: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """[3, bins]: how many P [N,V] lie in each bin, their sum, and how many are the label's."""
    edges, label_p = torch.tensor(BINS, device=p.device), p.gather(1, labels.unsqueeze(1))[:, 0]
    large = p[p >= BINS[0]]
    own = label_p[label_p >= BINS[0]]
    place = torch.bucketize(large, edges, right=True) - 1
    counts = torch.bincount(place, minlength=len(BINS) - 1)
    sums = torch.bincount(place, weights=large.double(), minlength=len(BINS) - 1)
    hits = torch.bincount(torch.bucketize(own, edges, right=True) - 1, minlength=len(BINS) - 1)
    return torch.stack([counts.double(), sums, hits.double()]).cpu().numpy()


def scores_of(ask: Ask) -> dict[str, Scores]:
    """The scores of one seed: "STAGE/KIND" -> columns, KIND "held out", one of `KINDS`, or "lists"
    (`asked_lists`); "training" -> the loss of each step, how far each word's C moved, and how often it is in the texts.
    Read from `out` where they were made before.

    Raises `UserError`.
    """
    path = ask.out / "scores" / f"seed-{ask.seed}-of-{ask.seeds}.npz"
    if not path.is_file():
        made = _made(ask)
        path.parent.mkdir(parents=True, exist_ok=True)
        flat: dict[str, Any] = {f"{group}|{name}": c for group, own in made.items() for name, c in own.items()}
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **flat)
    found: dict[str, Scores] = defaultdict(dict)
    with np.load(path) as stored:
        for name in stored.files:
            group, _, column = name.partition("|")
            found[group][column] = stored[name]
    return dict(found)


def _made(ask: Ask) -> dict[str, Scores]:
    size, seed, say = ask.size, ask.seed, ask.say
    texts = texts_of(ask.out / "data", ask.data, size, seed, ask.seeds)
    say(f"seed {seed}: the start")
    model, tokenizer = calibrated(ask.base, texts["train"], seed, size.calibration)
    inner = model.model
    say(f"seed {seed}: features")
    seen = {kind: read(inner, texts[kind], tokenizer) for kind in ("train", "held out", *KINDS)}
    found: dict[str, Scores] = {}
    for stage in STAGES:
        if stage == "trained":
            say(f"seed {seed}: {size.steps} steps of the heads")
            used, c = int(inner.config.used_rows), inner.action.threshold.detach()
            before = c[:used].clone()
            losses = train_heads(inner, seen["train"], size.steps, size.step_tokens, seed)
            counts = torch.bincount(seen["train"].labels, minlength=used)[:used].cpu().numpy()
            moved = (c[:used] - before).cpu().numpy()
            found["training"] = {"loss": np.array(losses), "C moved": moved, "count": counts}
        say(f"seed {seed}: scores, {stage}")
        for kind in ("held out", *KINDS):
            found[f"{stage}/{kind}"] = scored(inner, seen[kind])
        found[f"{stage}/lists"] = asked_lists(inner, tokenizer)
    return found
