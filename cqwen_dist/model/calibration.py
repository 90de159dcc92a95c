"""The calibrated start: what a base knows, moved into the heads by closed forms on some tokens of the training data.

One procedure, in this order (docs/training.md tells it with figures):

1. <NUM>'s row of W_cls, and those of the tokens that numerals are spelt with (`levelling.fit_numeral_rows`);
2. all rows levelled, so that logits are near log-probabilities (`levelling.level_logits`);
3. (C, gamma), the thresholds and the total scale of U, of least OvR loss;
4. W_reg, b_reg and what of U they read: a robust ridge regression of the numbers, the median where it tells nothing.

With the seeds' constants argmax P is not argmax loc_S and the loss begins in the thousands (seeds S3 section 4, S1).
Two word-head products in all: one for the normalisers, one for the logits of the search, which it holds in memory: at
the start scale_S,k = gamma ||W_k||_1, and neither C nor gamma enters a location. What a run chose stands in its
start.json; a run that goes on does not choose again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.initialise import SEED_GAMMA, SEED_NOISE, set_scales, start_regression
from cqwen_dist.model.levelling import fit_numeral_rows, level_logits
from cqwen_dist.model.ridge import FOLDS, robust_ridge
from cqwen_dist.model.start_search import StartLogits, best_threshold_and_gamma
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import main_rank_says
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens
from cqwen_dist.parallel.vocab_scores import vocab_parallel_scores

if TYPE_CHECKING:
    from cqwen_dist.model.causal_qwen import CausalQwenModel

LEVEL_TOKENS = 4096  # of all ranks, about: the fits decompose a matrix of them
NORM_TOKENS = 256  # a rank's, between two looks at whether to go on
Progress = Callable[[str, int, int], None]  # (what is being done, how much of it is, of how much)


@dataclass(frozen=True)
class Calibration:
    """What the calibrated start chose and how it looks before the first step."""

    threshold: float  # C
    gamma: float  # total scale of U' on the word dimensions
    loss: float  # mean OvR loss of the calibration tokens
    seed_loss: float  # the same at the seeds' start (C = 0, gamma = softplus(1) + 0.1), of the base's own rows
    accuracy: float  # of argmax P
    base_accuracy: float  # of argmax loc_S of the base's rows on the same features; a digit is right where a number is
    agreement: float  # share of tokens on which the two are one word
    seed_accuracy: float  # of argmax P at the seeds' start
    uniform_loss: float  # 1 + ln V, the loss of P = 1/V for every word: a run that ends here has learnt nothing
    prob_sum_median: float  # median over tokens of sum_k P_k; 1 is calibrated
    tokens: int
    levelled: float  # share of the normaliser's variance that levelling takes from the logits; 0: rows untouched
    num_row_told: float  # share of its target's variance that <NUM>'s fitted row tells; 0: the row is the base's
    num_f1: float | None  # of argmax P being <NUM> where a number follows; None: no number among the tokens
    num_p_mean: float | None  # mean P of <NUM> where a number follows: what the gate lets through at the first step
    numbers: int  # that the regression was fitted to
    reg_mdae: float | None  # median absolute error of those numbers, each told by the others, raw unit
    reg_median_mdae: float | None  # of always their median

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
    fit_batches: Iterable[Batch] | None = None,
    level: bool = True,
    numerals: Sequence[int] = (),
    progress: Progress = lambda what, done, of: None,
) -> Calibration:
    """Fit the rows, choose (C, gamma) and start the regression; the model is changed in place.

    batches: what the training collator yields, this rank's share; the first max_tokens labelled positions of each
    rank choose (C, gamma). fit_batches: what rows and regression are fitted to (None: `batches`). features:
    (Batch, keep) -> z [N,H] (default the model's own; the engine's under ZeRO). level: whether to; if not, and without
    numerals, no row of W_cls changes. numerals: the tokens that the base spells numerals with, where
    <NUM>'s row is to inherit from them. progress: called often, on every rank alike; may raise to end it. gamma is one
    for all word dimensions. With b_noise_init the total may come out larger than the best gamma; what is reported is
    of the total that is set. Collective over the world: with groups, every rank brings the same number of batches, and
    ends with the same values. Raises ValueError where no rank holds a label.
    """
    features = features or model.kept_features
    search = _seen(model, batches, features, max_tokens, groups, progress, "features")
    if fit_batches is None:
        fit = search
    else:
        fit = _seen(model, fit_batches, features, None, groups, progress, "features to fit rows to")
    action, num = model.action, model.config.num_token_id
    shown = StartLogits(model, _word_loc(model, search.z), search.labels, groups, progress, used_rows)
    if not shown.tokens:
        raise ValueError("no labelled positions to calibrate on")
    norms = action.cls_weight.abs().sum(1)
    seed_loss, seed_said, _ = shown.at(0.0, SEED_GAMMA + SEED_NOISE, norms)
    base_said = shown.best_logit()

    levelled = told = 0.0
    if level or numerals:
        own = _word_loc(model, fit.z)
        log_norm = _normalisers(model, own, groups, progress)
        counts = exchange_counts(len(own), None if groups is None else groups.world, own.device)
        world = None if groups is None else groups.world
        loc, log_norm, labels = (gather_tokens(part, counts, world) for part in (own, log_norm, fit.labels))
        cut = slice(0, 2 * LEVEL_TOKENS)  # texts are of unequal lengths: there may be more than was asked for
        if numerals:
            progress("<NUM>'s row", 0, 1)
            told = fit_numeral_rows(model, loc[cut], log_norm[cut], labels[cut], numerals, groups)
            shown.redo([*numerals, num])
        if level:
            progress("levelling", 0, 1)
            levelled, v = level_logits(model, loc[cut], log_norm[cut], groups)
            shown.take(v)
    norms = action.cls_weight.abs().sum(1)

    def choose() -> tuple[float, float]:
        return best_threshold_and_gamma(histogram)

    progress("C and gamma", 0, 1)
    histogram = shown.histogram(norms)
    threshold, gamma = choose() if groups is None else main_rank_says(choose)
    gamma = set_scales(model, gamma, b_noise_init)
    action.threshold.fill_(threshold)
    loss, said, prob_sum = shown.at(threshold, gamma, norms)
    labels = shown.labels
    digits = torch.isin(base_said, torch.tensor(list(numerals), dtype=torch.int64, device=base_said.device))
    base_right = (base_said == labels) | (digits & (labels == num))
    is_num, said_num = labels == num, said == num
    p_num = shown.p_of(num, threshold, gamma, norms)

    def mean(values: Tensor) -> float:
        return shown.mean(values.float())

    numbers = mean(is_num)
    reg = _fit_regression(model, fit, groups)
    return Calibration(
        threshold=threshold,
        gamma=gamma,
        loss=loss,
        seed_loss=seed_loss,
        accuracy=mean(said == labels),
        base_accuracy=mean(base_right),
        agreement=mean(said == base_said),
        seed_accuracy=mean(seed_said == labels),
        uniform_loss=1.0 + math.log(action.vocab_size),
        prob_sum_median=float(shown.everyone(prob_sum).quantile(0.5)),
        tokens=shown.tokens,
        levelled=levelled,
        num_row_told=told,
        num_f1=2 * mean(is_num & said_num) / (numbers + mean(said_num)) if numbers else None,
        num_p_mean=mean(p_num * is_num) / numbers if numbers else None,
        numbers=reg[0],
        reg_mdae=reg[1],
        reg_median_mdae=reg[2],
    )


class _Seen(NamedTuple):
    """Labelled positions of this rank: z [N,H], labels, whether a value is learnt, the value, the row's fold [N]."""

    z: Tensor
    labels: Tensor
    learnt: Tensor
    values: Tensor
    folds: Tensor


def _seen(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    features: Callable[[Batch, Tensor], Tensor],
    max_tokens: int | None,
    groups: Groups | None,
    progress: Progress,
    what: str,
) -> _Seen:
    """One forward pass over the batches. With groups no rank leaves one out: features may need the others (ZeRO-3)."""
    device = model.action.cls_weight.device
    batches = list(batches)
    z, labels, learnt, values, folds = [], [], [], [], []
    for i, batch in enumerate(batches):
        progress(what, i, len(batches))
        index = batch.label_mask.flatten().nonzero()[:, 0]
        keep, there = index.to(device), batch.to(device)
        z.append(features(there, keep).float())
        labels.append(there.labels.flatten()[keep])
        learnt.append(there.numeric_mask.flatten()[keep])
        values.append(there.numeric_labels.flatten()[keep])
        folds.append(_fold_of_row(there).repeat_interleave(there.labels.shape[1])[keep])
        if groups is None and max_tokens is not None and sum(map(len, labels)) >= max_tokens:
            break
    if not z:
        none = torch.zeros(0, device=device)
        z_none = none.new_zeros(0, model.config.hidden_size)
        return _Seen(z_none, none.long(), none.bool(), none.double(), none.long())
    return _Seen(*(torch.cat(parts)[:max_tokens] for parts in (z, labels, learnt, values, folds)))


def _fold_of_row(batch: Batch) -> Tensor:
    """[B] in [0, FOLDS): what a row says decides, so that the folds are the same on any number of ranks."""
    places = torch.arange(1, batch.input_ids.shape[1] + 1, device=batch.input_ids.device)
    said = (batch.input_ids * batch.attention_mask * places).sum(1)
    return (said * 2_654_435_761 % 2**32) * FOLDS // 2**32  # Knuth's multiplicative hash: its high bits are even


def _word_loc(model: CausalQwenModel, z: Tensor) -> Tensor:
    return model.action.word_part(model.abduction(z)).loc.contiguous()


def _normalisers(model: CausalQwenModel, loc: Tensor, groups: Groups | None, progress: Progress) -> Tensor:
    """log sum_k exp loc_S,k [N] of this rank's tokens; the first of the two word-head products."""
    head = model.action.word_head()
    longest = max(exchange_counts(len(loc), None if groups is None else groups.world, loc.device))
    parts = []
    for start in range(0, longest, NORM_TOKENS):
        progress("normalisers", start, longest)
        own = loc[start : start + NORM_TOKENS]
        no_labels = torch.zeros(len(own), dtype=torch.int64, device=own.device)
        law = Cauchy(own, torch.ones_like(own))
        parts.append(vocab_parallel_scores(law, head, no_labels, None if groups is None else groups.vocab).log_norm)
    return torch.cat(parts) if parts else loc.new_zeros(0)


def _fit_regression(
    model: CausalQwenModel, seen: _Seen, groups: Groups | None
) -> tuple[int, float | None, float | None]:
    """Start W_reg, b_reg and U's number dimensions; returns (numbers, their median error left out, the median's)."""
    x = seen.z if model.config.number_dims else _word_loc(model, seen.z)
    x, values, folds = (part[seen.learnt] for part in (x, seen.values, seen.folds))
    if groups is not None:
        counts = exchange_counts(len(x), groups.world, x.device)
        x, values, folds = (gather_tokens(part, counts, groups.world) for part in (x, values, folds))
    if not len(values):
        return 0, None, None
    x, values, folds = (part[: 2 * LEVEL_TOKENS] for part in (x, values, folds))

    def fit() -> tuple[Any, float, float]:
        found = robust_ridge(x, model.target.forward(values).double(), folds)
        error = (model.target.inverse(found.left_out) - values).abs().median()
        return (
            found._replace(coefficients=found.coefficients.cpu(), left_out=found.left_out[:0].cpu()),
            float(error),
            float((values - values.quantile(0.5)).abs().median()),
        )

    found, error, of_median = fit() if groups is None else main_rank_says(fit)
    start_regression(model, found.coefficients, found.intercept, found.scale)
    return len(values), error, of_median
