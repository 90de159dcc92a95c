"""The start: the base's knowledge moved in, and the scales set, by preset or from data (seeds S3 section 4, S1).

At every start loc_S = W_Qwen z: softmax(loc_S) is the base's own distribution on text without numbers. What differs
is (C, gamma), the thresholds and the total scale of U'. With the seeds' constants argmax P is not argmax loc_S and
the loss begins in the thousands; the calibrated start picks the two so that the OvR loss on real text is least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.parallel.collectives import gather_lists, sum_over
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_ovr, vocab_parallel_topk

if TYPE_CHECKING:
    from cqwen_dist.model.causal_qwen import CausalQwenModel

SEED_GAMMA = math.log1p(math.e)  # softplus(1.0) = 1.3133 (S3 4 step 2)
SEED_NOISE = 0.1  # not the seeds' 0: |b| has no gradient at 0, so b_noise would never train
PRESET_THRESHOLD = {"seed": 0.0, "seed-100": 100.0, "calibrated": 0.0}


@torch.no_grad()
def inherit_head(
    model: CausalQwenModel,
    weight: Any,
    bias: Tensor | None,
    *,
    num_row_init: str = "inherit",
    num_bias_init: float = 0.0,
    reg_gain: float = 1.0,
) -> float:
    """W_cls from the base's output head [V,H] (cloned: the base may tie it to the embeddings), W_loc to match.

    Word part C_w = H: W_loc = I, W_cls = W. C_w > H: zero-padded, loc_S unchanged. C_w < H: the top C_w right singular
    directions of W. Number dimensions: none in W_cls, zero in W_loc, 1/m in W_reg: words see nothing of them.
    weight: a tensor, or the part of a safetensors file that is read by what is cut out of it. bias: the base head's,
    or None (Qwen has none): b_cls. num_row_init: <NUM>'s row inherited, the mean row, or small and random. reg_gain:
    of the words' part of W_reg, which is new (S1 5 has 0.1). Returns
    the relative error of the logits (Frobenius; 0 unless C_w < H).
    """
    config, action, abduction = model.config, model.action, model.abduction
    words, hidden, numbers = config.causal_size, config.hidden_size, config.number_dims
    rows = slice(action.vocab_start, action.vocab_start + action.rows)
    shared = min(words, hidden)
    action.cls_weight.zero_()
    abduction.loc_net.weight[shared:].zero_()
    error = 0.0
    if words >= hidden:
        action.cls_weight[:, :hidden] = weight[rows].to(action.cls_weight)
    else:
        whole = weight[:].double()
        gram = whole.T @ whole
        values, vectors = torch.linalg.eigh(gram)  # ascending
        top = vectors[:, hidden - words :]
        action.cls_weight[:, :words] = (whole[rows] @ top).to(action.cls_weight)
        abduction.loc_net.weight[:words] = top.T.to(abduction.loc_net.weight)
        error = math.sqrt(float(values[: hidden - words].clamp(min=0).sum() / values.sum().clamp(min=1e-300)))
    if numbers:
        torch.nn.init.xavier_uniform_(action.reg_weight[:words].unsqueeze(0))
        action.reg_weight[words:] = 1.0 / numbers
    action.reg_weight[:words] *= reg_gain
    if bias is not None:
        action.cls_bias.copy_(bias[rows])
    row = config.num_token_id - action.vocab_start
    if 0 <= row < action.rows:
        if num_row_init == "mean":
            mean = weight[:].float().mean(0)
            action.cls_weight[row, :shared] = mean if words >= hidden else (mean.double() @ top).to(action.cls_weight)
        elif num_row_init == "small":
            # not zero: |W| 0 would make scale_S 0 there, P 0 or 1 and the loss's gradient infinite
            with torch.random.fork_rng(devices=[]):  # only its owner draws
                torch.nn.init.normal_(action.cls_weight[row, :shared], std=0.1 * float(weight[:].float().std()))
        action.cls_bias[row] += num_bias_init
    return error


@torch.no_grad()
def set_scales(model: CausalQwenModel, gamma: float, b_noise: float | None) -> float:
    """Give U' the total scale gamma on word dimensions and 1 on number dimensions; returns the words' total.

    Half of each total is |b_noise| and half scale_U; with b_noise given, that is the noise of the words and scale_U
    the rest of gamma (at least half of it: then the total is more than gamma).
    """
    words = model.config.causal_size
    noise = gamma / 2 if b_noise is None else b_noise
    floor = min(1e-6, gamma * 1e-3)
    model.config.scale_floor = model.abduction.scale_floor = floor
    scale = max(gamma - noise, gamma / 2)
    model.abduction.set_scale(scale, 0, words)
    model.action.b_noise[:words] = noise
    if model.config.number_dims:
        model.abduction.set_scale(0.5, words)
        model.action.b_noise[words:] = 0.5
    return scale + noise


@torch.no_grad()
def apply_preset(model: CausalQwenModel, start: str, b_noise_init: float | None = None) -> None:
    """The seeds' constants: scale_U = softplus(1), C = 0 or 100 (`calibrated`: the same, until it is run)."""
    noise = SEED_NOISE if b_noise_init is None else b_noise_init
    set_scales(model, SEED_GAMMA + noise, noise)
    model.action.threshold.fill_(PRESET_THRESHOLD[start])


@torch.no_grad()
def override_start(model: CausalQwenModel, threshold: float | None, gamma: float | None) -> None:
    """Another C for every word, another total scale of U' on word dimensions (half of it noise), where given."""
    if threshold is not None:
        model.action.threshold.fill_(threshold)
    if gamma is not None:
        set_scales(model, gamma, None)


@dataclass(frozen=True)
class Calibration:
    """What the calibrated start chose and how it looks before the first step."""

    threshold: float  # C
    gamma: float  # total scale of U' on the word dimensions
    loss: float  # mean OvR loss of the calibration tokens
    seed_loss: float  # the same at the seeds' start (C = 0, gamma = softplus(1) + 0.1)
    accuracy: float  # of argmax P
    base_accuracy: float  # of argmax loc_S on the same features
    prob_sum_median: float  # median over tokens of sum_k P_k; 1 is calibrated
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.no_grad()
def calibrate(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    *,
    groups: Groups | None = None,
    features: Callable[[Batch, Tensor], Tensor] | None = None,
    b_noise_init: float | None = None,
    max_tokens: int = 1024,
    used_rows: int | None = None,
) -> Calibration:
    """Choose (C, gamma) that minimise the mean OvR loss of real text at the start, and set them.

    batches: what the training collator yields, this rank's share; the first max_tokens labelled positions of each
    rank are used. features: (Batch, keep) -> z [N,H] (default the model's own; the engine's under ZeRO).
    A grid of 5 x 5, then a pattern search; gamma is one for all word dimensions, so scale_S = gamma ||W_k||_1. With
    b_noise_init the total may come out larger than the best gamma; what is reported is of the total that is set.
    Collective over the world: with groups, every rank brings the same number of batches, and ends with the same
    values. Raises ValueError where no rank holds a label.
    """
    z, labels = _labelled_features(model, batches, features or model.kept_features, max_tokens, groups is not None)
    vocab = None if groups is None else groups.vocab
    action = model.action
    loc = action.word_part(model.abduction(z)).loc.contiguous()
    count = _sum(torch.tensor(float(labels.numel()), device=z.device), groups)
    if not count:
        raise ValueError("no labelled positions to calibrate on")

    def evaluate(threshold: float, gamma: float) -> tuple[float, Tensor]:
        out = vocab_parallel_ovr(
            loc,
            torch.full_like(loc, gamma),
            action.cls_weight,
            action.cls_bias,
            torch.tensor(threshold, device=z.device),
            labels,
            group=vocab,
            vocab_start=action.vocab_start,
            vocab_size=action.vocab_size,
            used_rows=used_rows,
        )
        return _sum(out.per_token.sum(), groups) / count, out.prob_sum

    middle, spread, norm = _logit_range(model, loc, groups)
    best = _search(lambda f, g: evaluate(middle + f * spread, 10.0**g * spread / norm)[0])
    threshold, gamma = middle + best[0] * spread, 10.0 ** best[1] * spread / norm
    gamma = set_scales(model, gamma, b_noise_init)
    action.threshold.fill_(threshold)
    loss, prob_sum = evaluate(threshold, gamma)
    if groups is not None:
        prob_sum = gather_lists(prob_sum)

    def accuracy(rank_by: str) -> float:
        _, ids = vocab_parallel_topk(
            loc,
            torch.full_like(loc, gamma),
            action.cls_weight,
            action.cls_bias,
            action.threshold,
            1,
            group=vocab,
            vocab_start=action.vocab_start,
            rank_by=rank_by,
        )
        return _sum((ids[:, 0] == labels).float().sum(), groups) / count

    return Calibration(
        threshold=threshold,
        gamma=gamma,
        loss=loss,
        seed_loss=evaluate(0.0, SEED_GAMMA + SEED_NOISE)[0],
        accuracy=accuracy("ovr"),
        base_accuracy=accuracy("loc"),
        prob_sum_median=float(prob_sum.quantile(0.5)),
        tokens=int(count),
    )


def _labelled_features(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    features: Callable[[Batch, Tensor], Tensor],
    max_tokens: int,
    collective: bool,
) -> tuple[Tensor, Tensor]:
    """z [N,H] and labels [N] of the first max_tokens labelled positions of this rank (N may be 0).

    collective: features may need the other ranks (ZeRO-3), so no rank leaves a batch out.
    """
    device = model.action.cls_weight.device
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        index = batch.label_mask.flatten().nonzero()[:, 0]
        keep = index.to(device)
        there = batch.to(device)
        kept.append(features(there, keep))
        labels.append(there.labels.flatten()[keep])
        if not collective and sum(part.numel() for part in labels) >= max_tokens:
            break
    if not kept:
        return torch.zeros(0, model.config.hidden_size, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat(kept)[:max_tokens], torch.cat(labels)[:max_tokens]


def _logit_range(model: CausalQwenModel, loc: Tensor, groups: Groups | None) -> tuple[float, float, float]:
    """(mean logit, mean top logit minus it, mean ||W_k||_1): the units the search works in."""
    action = model.action
    vocab = None if groups is None else groups.vocab
    one = torch.ones((), device=loc.device)
    top, _ = vocab_parallel_topk(
        loc,
        torch.ones_like(loc),
        action.cls_weight,
        action.cls_bias,
        torch.zeros_like(one),
        1,
        group=vocab,
        vocab_start=action.vocab_start,
        rank_by="loc",
    )
    count = max(_sum(one * loc.shape[0], groups), 1.0)
    mean_row = action.cls_weight.sum(0) / action.vocab_size
    norms = action.cls_weight.abs().sum(1)
    norm = norms.sum() / action.vocab_size
    if groups is not None:
        sum_over(mean_row, groups.vocab)
        sum_over(norm, groups.vocab)
    mean = _sum((loc @ mean_row).sum(), groups) / count
    spread = _sum(top.sum(), groups) / count - mean
    return mean, max(spread, 1e-3), max(float(norm), 1e-6)


def _search(loss: Callable[[float, float], float]) -> tuple[float, float]:
    """Minimise over (share of the logits' range, log10 of the scale in that unit): a 5 x 5 grid, then 5 halvings."""
    seen: dict[tuple[float, float], float] = {}

    def at(point: tuple[float, float]) -> float:
        if point not in seen:
            value = loss(*point)
            seen[point] = value if math.isfinite(value) else math.inf
        return seen[point]

    best = min(((f, g) for f in (0.25, 0.5, 0.75, 1.0, 1.25) for g in (-4.0, -3.0, -2.0, -1.0, 0.0)), key=at)
    step = (0.125, 0.5)
    for _ in range(5):
        around = [(best[0] + i * step[0], best[1] + j * step[1]) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        best = min([best, *around], key=at)
        step = (step[0] / 2, step[1] / 2)
    return best


def _sum(value: Tensor, groups: Groups | None) -> float:
    """A scalar summed over the world."""
    total = value.detach().double().clone()
    if groups is not None:
        sum_over(total, groups.world)
    return float(total)
