"""The calibrated start: what a base knows, moved into the heads by closed forms on some tokens of the training data.

One procedure, in this order (docs/training.md has measurements):

1. fit <NUM>'s row of W_cls, and lower the rows of the tokens that spell numerals (`levelling.fit_numeral_rows`);
2. level all rows: subtract one vector, so that logits approximate log-probabilities (`levelling.level_logits`);
3. choose (C, gamma), the threshold and the total scale of U', of least OvR loss;
4. start W_reg, b_reg and U's number dimensions: a robust ridge regression, or the median where that is no better.

With the seeds' constants argmax P is not argmax loc_S and the loss begins in the thousands (seeds S3 section 4, S1).
Two word-head products in all: one for the normalisers, one for the logits of the search, which stay in memory. At the
start scale_S,k = gamma ||W_k||_1, and neither C nor gamma enters a location. A run's choice is in its start.json; a
resumed run does not choose again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.model.causal_qwen import CausalQwenModel
from cqwen_dist.model.initialise import SEED_GAMMA, SEED_NOISE, set_scales, start_regression
from cqwen_dist.model.levelling import fit_numeral_rows, level_logits
from cqwen_dist.model.ridge import FOLDS, robust_ridge
from cqwen_dist.model.start_search import StartLogits, best_threshold_and_gamma
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import main_rank_says
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens
from cqwen_dist.parallel.vocab_scores import vocab_parallel_scores

LEVEL_TOKENS = 4096  # of all ranks, about: the fits decompose a matrix of them
NORM_TOKENS = 256  # a rank's, between two looks at whether to go on
Progress = Callable[[str, int, int], None]  # (what is being done, how much of it is, of how much)
Features = Callable[[Batch, Tensor], Tensor]


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
    levelled: float  # share of the normaliser's variance that levelling removes from the logits; 0: rows unchanged
    num_row_told: float  # share of its target's variance that <NUM>'s fitted row explains; 0: the row is the base's
    num_f1: float | None  # of argmax P being <NUM> where a number follows; None: no number among the tokens
    num_p_mean: float | None  # mean P of <NUM> where a number follows: the gate's mean at the first step
    numbers: int  # that the regression was fitted to
    reg_mdae: float | None  # median absolute error of those numbers, each predicted by the others, raw unit
    reg_median_mdae: float | None  # the same, always predicting their median

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@torch.no_grad()
def calibrate(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    *,
    groups: Groups | None = None,
    features: Features | None = None,
    b_noise_init: float | None = None,
    max_tokens: int = 1024,
    used_rows: int | None = None,
    fit_batches: Iterable[Batch] | None = None,
    level: bool = True,
    numerals: Sequence[int] = (),
    progress: Progress = lambda what, done, of: None,
) -> Calibration:
    """Fit the rows, choose (C, gamma) and start the regression; the model is changed in place.

    batches: what the training collator yields, this rank's share; the first max_tokens label positions of each rank
    choose (C, gamma). fit_batches: what rows and regression are fitted to (None: `batches`). features: (batch, label
    positions) -> z [N,H] (default the model's own; the engine's under ZeRO). level: whether to level the rows; without
    it and without numerals no row of W_cls changes. numerals: the tokens that spell numerals, where <NUM>'s row is to
    inherit from them. progress: called equally often on every rank; it may raise to end the calibration. gamma is one
    for all word dimensions. With b_noise_init the total scale may be larger than the best gamma; the report is of the
    total that is set. Collective over the world: with groups, every rank brings the same number of batches, and ends
    with the same values. Raises ValueError where no rank holds a label.
    """
    features = features or model.kept_features
    search = _positions(model, batches, features, max_tokens, groups, progress, "features")
    fit = search
    if fit_batches is not None:
        fit = _positions(model, fit_batches, features, None, groups, progress, "features to fit rows to")
    logits = StartLogits(model.action, _word_loc(model, search.z), search.labels, groups, progress, used_rows)
    if not logits.tokens:
        raise ValueError("no labelled positions to calibrate on")
    seed_loss, seed_best, _ = logits.at(0.0, SEED_GAMMA + SEED_NOISE, model.action.row_norms())
    base = _Base(seed_loss, seed_best, logits.best_logit())
    rows = _fit_rows(model, fit, logits, level, numerals, groups, progress)
    progress("C and gamma", 0, 1)
    norms = model.action.row_norms()
    histogram = logits.histogram(norms)
    choose = partial(best_threshold_and_gamma, histogram)
    threshold, gamma = choose() if groups is None else main_rank_says(choose)
    gamma = set_scales(model, gamma, b_noise_init)
    model.action.threshold.fill_(threshold)
    numbers = _fit_regression(model, fit, groups)
    return _report(model, logits, base, rows, numbers, threshold, gamma, numerals)


class _Base(NamedTuple):
    """What was found before any row changed."""

    seed_loss: float
    seed_best: Tensor  # [n] argmax P at the seeds' start
    best_logit: Tensor  # [n] argmax loc_S


def _fit_rows(
    model: CausalQwenModel,
    fit: _Positions,
    logits: StartLogits,
    level: bool,
    numerals: Sequence[int],
    groups: Groups | None,
    progress: Progress,
) -> tuple[float, float]:
    """Fit <NUM>'s row and level all rows, where asked for; `Calibration`'s (levelled, num_row_told)."""
    if not (level or numerals):
        return 0.0, 0.0
    own, world = _word_loc(model, fit.z), None if groups is None else groups.world
    log_norm = _normalisers(model, own, groups, progress)
    counts = exchange_counts(len(own), world, own.device)
    cut = slice(0, 2 * LEVEL_TOKENS)  # texts are of unequal lengths: there may be more than was asked for
    loc, log_norm, labels = (gather_tokens(part, counts, world)[cut] for part in (own, log_norm, fit.labels))
    levelled = share = 0.0
    if numerals:
        progress("<NUM>'s row", 0, 1)
        share = fit_numeral_rows(model, loc, log_norm, labels, numerals, groups)
        logits.redo([*numerals, model.config.num_token_id])
    if level:
        progress("levelling", 0, 1)
        levelled, v = level_logits(model.action, loc, log_norm, groups)
        logits.take(v)
    return levelled, share


def _report(
    model: CausalQwenModel,
    logits: StartLogits,
    base: _Base,
    rows: tuple[float, float],
    regression: tuple[int, float | None, float | None],
    threshold: float,
    gamma: float,
    numerals: Sequence[int],
) -> Calibration:
    """The start as it is set, measured on the positions that (C, gamma) were chosen on."""
    levelled, num_row_told = rows
    fitted, reg_mdae, reg_median_mdae = regression
    num, labels, norms = model.config.num_token_id, logits.labels, model.action.row_norms()
    loss, best, prob_sum = logits.at(threshold, gamma, norms)
    digits = torch.isin(base.best_logit, torch.tensor(list(numerals), dtype=torch.int64, device=labels.device))
    base_right = (base.best_logit == labels) | (digits & (labels == num))
    is_num, best_is_num = labels == num, best == num
    p_num = logits.p_of(num, threshold, gamma, norms)
    numbers = logits.mean(is_num)
    return Calibration(
        threshold=threshold,
        gamma=gamma,
        loss=loss,
        seed_loss=base.seed_loss,
        accuracy=logits.mean(best == labels),
        base_accuracy=logits.mean(base_right),
        agreement=logits.mean(best == base.best_logit),
        seed_accuracy=logits.mean(base.seed_best == labels),
        uniform_loss=1.0 + math.log(model.action.vocab_size),
        prob_sum_median=float(logits.everyone(prob_sum).quantile(0.5)),
        tokens=logits.tokens,
        levelled=levelled,
        num_row_told=num_row_told,
        num_f1=2 * logits.mean(is_num & best_is_num) / (numbers + logits.mean(best_is_num)) if numbers else None,
        num_p_mean=logits.mean(p_num * is_num) / numbers if numbers else None,
        numbers=fitted,
        reg_mdae=reg_mdae,
        reg_median_mdae=reg_median_mdae,
    )


class _Positions(NamedTuple):
    """Label positions of this rank: z [N,H], labels, whether a value is learnt, the value, the row's fold [N]."""

    z: Tensor
    labels: Tensor
    learnt: Tensor
    values: Tensor
    folds: Tensor


def _positions(
    model: CausalQwenModel,
    batches: Iterable[Batch],
    features: Features,
    max_tokens: int | None,
    groups: Groups | None,
    progress: Progress,
    what: str,
) -> _Positions:
    """One forward pass over the batches. With groups no rank leaves one out: features may need the others (ZeRO-3)."""
    device = model.action.cls_weight.device
    batches = list(batches)
    parts: list[_Positions] = []
    for i, batch in enumerate(batches):
        progress(what, i, len(batches))
        kept, batch = batch.kept.to(device), batch.to(device)
        z = features(batch, kept).float()
        folds = _fold_of_row(batch).repeat_interleave(batch.labels.shape[1])
        per_position = (batch.labels, batch.numeric_mask, batch.numeric_labels, folds)
        parts.append(_Positions(z, *(part.flatten()[kept] for part in per_position)))
        if groups is None and max_tokens is not None and sum(len(part.labels) for part in parts) >= max_tokens:
            break
    if not parts:
        none = torch.zeros(0, device=device)
        z_none = none.new_zeros(0, model.config.hidden_size)
        return _Positions(z_none, none.long(), none.bool(), none.double(), none.long())
    return _Positions(*(torch.cat(column)[:max_tokens] for column in zip(*parts, strict=True)))


def _fold_of_row(batch: Batch) -> Tensor:
    """[B] in [0, FOLDS): a hash of the row's tokens, so that the folds are the same on any number of ranks."""
    places = torch.arange(1, batch.input_ids.shape[1] + 1, device=batch.input_ids.device)
    key = (batch.input_ids * batch.attention_mask * places).sum(1)
    return (key * 2_654_435_761 % 2**32) * FOLDS // 2**32  # Knuth's multiplicative hash: its high bits are even


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
    model: CausalQwenModel, seen: _Positions, groups: Groups | None
) -> tuple[int, float | None, float | None]:
    """Start W_reg, b_reg and U's number dimensions: `Calibration`'s (numbers, reg_mdae, reg_median_mdae)."""
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
