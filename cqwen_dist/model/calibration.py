"""The calibrated start: closed-form fits on sample tokens transfer the base's knowledge to the heads.

The steps, in this order (docs/training.md; docs/measurements.md has the figures):

1. fit the <NUM> row of W_cls, and lower the rows of numeral tokens (`levelling.fit_numeral_rows`);
2. level all rows: subtract one vector, so that logits approximate log-probabilities (`levelling.level_logits`);
3. choose (C, gamma), the threshold and the total scale of U', of least OvR loss;
4. if the model has a side network (`heads.beside`), fit it;
5. start W_reg, b_reg and U's number dimensions: a robust ridge regression, or the median if that is no better;
6. measure how wide individuals are drawn for words (`heads.word_temperature`).

With the seeds' constants argmax P differs from argmax loc_S, and the loss starts in the thousands (seeds S3 section 4,
S1). There are two word-head products: one for the normalisers, one for the logits of the search, which stay in memory.
A run writes the result to start.json; a resumed run does not calibrate again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.heads.action import rows_of, words_of_base
from cqwen_dist.heads.beside import BESIDE
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.word_temperature import word_temperature
from cqwen_dist.model.initialise import NOISE, SEED_GAMMA, SEED_NOISE, set_scales, start_regression
from cqwen_dist.model.levelling import fit_numeral_rows, level_logits, project_by_features
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.model.ridge import fold_of_row, ridges_by_leave_one_out, robust_ridge
from cqwen_dist.model.start_search import StartLogits, best_threshold_and_gamma
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.number_laws import FittedLaw, fit_law
from cqwen_dist.parallel.collectives import gather_objects
from cqwen_dist.parallel.groups import ALONE, Groups
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_scores
from cqwen_dist.wings import from_wing

# Required gain of a ridge on z in addition to the part that reads words, in standard errors: 60 pairs of ridge and
# shrinkage are tried, and held-out residuals leak the targets of other folds. For 85 or fewer wines, one standard error
# was not enough: R2 fell from 0.48 to 0.12.
SURE = 3.0
LITTLE_NOISE = 0.05  # its share of a number's scale if the individual's own differs from text to text
LEVEL_TOKENS = 4096  # of all ranks, about: the fits decompose a matrix of them
MOST = 2 * LEVEL_TOKENS  # texts are of unequal lengths: there may be more positions than were asked for
NUMBERS = 12_288  # of all ranks, at most: the kernel of the side network has as many rows and columns, 1.2 GB
SCORED = 32_768  # of all ranks, at most: numbers that scores are fitted to
NORM_TOKENS = 256  # a rank's, between two looks at whether to go on
Progress = Callable[[str, int, int], None]  # (description, units done, units in all)
TextNumber = tuple[Any, float]  # a number in the raw unit that only the side network learns, after its text
Features = Callable[[Batch, Tensor], Tensor]  # (batch, label positions [N]) -> z [N,H]


@dataclass(frozen=True)
class Calibration:
    """What the calibrated start chose and how it looks before the first step."""

    threshold: float  # C
    gamma: float  # total scale of U' on the word dimensions
    loss: float  # mean OvR loss of the calibration tokens
    seed_loss: float  # the same at the seeds' start (C = 0, gamma = softplus(1) + 0.1), of the base's own rows
    accuracy: float  # of argmax P
    base_accuracy: float  # of argmax loc_S of the base's rows, where a digit counts as a number
    prob_sum_median: float  # median over tokens of sum_k P_k; 1 is calibrated
    tokens: int
    levelled: float  # share of the normaliser's variance that levelling removes from the logits; 0: rows unchanged
    num_row_told: float  # share of its target's variance that <NUM>'s fitted row explains; 0: the row is the base's
    num_f1: float | None  # of argmax P being <NUM> where a number follows; None: no number among the tokens
    num_p_mean: float | None  # mean P of <NUM> where a number follows: the gate's mean at the first step
    numbers: int  # the regression was fitted to this number
    reg_mdae: float | None  # median absolute error of those numbers, each predicted by the others, raw unit
    reg_median_mdae: float | None  # the same if their median is always predicted
    size: float  # mean |loc_U| before those numbers: the rates of candidates' rows are relative to it; 1 without any
    law: str | None  # of the numbers, and why
    word_temperature: float  # `heads.word_temperature`, on the positions that (C, gamma) were chosen on


@torch.no_grad()
def calibrate(
    model: CausalModules,
    batches: Iterable[Batch],
    *,
    groups: Groups = ALONE,
    features: Features | None = None,
    fit_features: Features | None = None,
    max_tokens: int = 1024,
    fit_batches: Iterable[Batch] | None = None,
    beside_batches: Iterable[tuple[Batch, Tensor]] = (),
    numerals: Sequence[int] = (),
    law: str | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Calibration:
    """Fit the rows, choose (C, gamma) and start the regression; the model is changed in place.

    batches: this rank's share, as the training collator yields them; the first max_tokens label positions of each rank
    choose (C, gamma). fit_batches: rows and regression are fitted to them (None: to `batches`). beside_batches:
    more batches, with features before their numbers; only the side network is fitted to these. features: default the
    model's own; the engine's under ZeRO. fit_features: of fit_batches, one after another (None: `features`). numerals:
    the tokens that spell numerals, if <NUM>'s row is to inherit from them. law: of the numbers, as `fit_law` (None: the
    config's). progress: called equally often
    on every rank; it may raise to end the calibration. Collective over the world: every rank brings the same number of
    batches, and ends with the same values. Raises ValueError for no batches, and if no rank has a label;
    `UserError` for a base whose features are not finite.
    """
    beside = None if model.beside is None else from_wing(f"start of model.{BESIDE}")(model.beside, model.config)
    start = _Start(model, groups, features or model.kept_features, tuple(numerals), beside, law, progress)

    # Features, and logits of the base's rows before any row changes
    search = start.positions(batches, "features", max_tokens)
    fit = search
    if fit_batches is not None:
        fit = start.positions(fit_batches, "features to fit rows to", features=fit_features)
    project_by_features(model, fit.z, groups)
    progress("logits", 0, 1)  # once: ranks may have unequal numbers of rows
    logits = StartLogits(model.action, start.word_loc(search.z), search.labels, groups)
    if not logits.tokens:
        raise ValueError("no labelled positions to calibrate on")
    base_best = start.best_of_base(search) if model.action.base_head is not None else logits.best_logit()
    seed_loss, _, _ = logits.at(0.0, SEED_GAMMA + SEED_NOISE)

    # Rows first: the search for (C, gamma) uses the levelled logits, and the regression the final scales
    rows = start.fit_rows(fit, logits)
    progress("C and gamma", 0, 1)
    histogram = logits.histogram()
    threshold, gamma = groups.agreed(lambda: best_threshold_and_gamma(histogram))
    progress("numbers", 0, 1)  # it may raise, and nothing has to be undone before the constants are set
    set_scales(model, gamma / 2, gamma / 2)
    model.action.threshold.fill_(threshold)
    regression = start.fit_regression(fit, beside_batches)

    found = start.measured(logits, base_best, threshold, gamma)
    progress("the word temperature", 0, 1)
    found["word_temperature"] = wide = word_temperature(
        model.action, model.abduction(search.z), model.config.used_rows, groups
    )
    model.config.calibration = Intervals(word_temperature=wide).to_dict()
    return Calibration(threshold=threshold, gamma=gamma, seed_loss=seed_loss, **rows, **regression, **found)


class _Positions(NamedTuple):
    """N label positions of this rank."""

    z: Tensor  # [N,H]
    labels: Tensor  # [N] int64
    learnt: Tensor  # [N] bool: whether a value is learnt
    values: Tensor  # [N] float64
    folds: Tensor  # [N] int64: the row's fold
    texts: list[Any]  # before each value that is learnt, for the side network
    memory: Tensor  # [N,K] float64: the number head's facts about earlier numbers


@dataclass(frozen=True)
class _Start:
    """The steps of `calibrate`, with their shared arguments."""

    model: CausalModules
    groups: Groups
    features: Features
    numerals: tuple[int, ...]
    beside: Any  # fits the side network, if there is one
    law: str | None
    progress: Progress

    def positions(
        self, batches: Iterable[Batch], what: str, most: int | None = None, features: Features | None = None
    ) -> _Positions:
        """One forward pass over the batches; keeps the first `most` positions.

        With groups, no rank may skip a batch: the forward pass may be collective (ZeRO-3).
        """
        batches, features, device = list(batches), features or self.features, self.model.action.cls_weight.device
        if not batches:
            raise ValueError("no batches to calibrate on")
        head, parts, texts = self.model.action.number_head, list[tuple[Tensor, ...]](), list[Any]()
        for i, batch in enumerate(batches):
            self.progress(what, i, len(batches))
            kept, batch = batch.kept.to(device), batch.to(device)
            z = features(batch, kept).float()
            folds = fold_of_row(batch, self.groups).repeat_interleave(batch.labels.shape[1])
            per_position = (batch.labels, batch.numeric_mask, batch.numeric_labels, folds)
            parts.append((z, *(part.flatten()[kept] for part in per_position), head.memory_at(batch, kept)))
            if self.beside is not None:
                numbers = batch.numeric_mask.flatten()[kept]
                texts += self.beside.texts_before(batch, kept[numbers], z[numbers])
            if self.groups is ALONE and most is not None and sum(len(labels) for _, labels, *_ in parts) >= most:
                break
        z, labels, learnt, values, folds, memory = (torch.cat(column)[:most] for column in zip(*parts, strict=True))
        if not bool(z.isfinite().all()):
            odd = [name for name, weight in self.model.named_parameters() if not bool(weight.isfinite().all())]
            found = f"NaN or infinity in {odd[0]}" if odd else "features that are not finite, of finite weights"
            raise UserError("model.base", Said(found), "a base that computes numbers in train.precision")
        return _Positions(z, labels, learnt, values, folds, texts[: int(learnt.sum())], memory)

    def word_loc(self, z: Tensor) -> Tensor:
        """loc_U [N,C_w] of features."""
        return self.model.action.word_part(self.model.abduction(z)).loc.contiguous()

    def best_of_base(self, of: _Positions) -> Tensor:
        """The base's own best word [n] of this rank's vocabulary group, by its whole head (C_w < H)."""
        u, head = words_of_base(self.model, of.z)
        vocab = self.groups.vocab
        best = vocab_parallel_scores(u, head, of.labels, vocab, rank_by="loc").best.word
        return gather_tokens(best, exchange_counts(len(best), vocab, best.device), vocab)

    def of_all_ranks(self, *parts: Tensor, most: int = MOST) -> list[Tensor]:
        """Values [N, ...] of this rank's positions -> the first `most` of all ranks."""
        world, own = self.groups.world, parts[0]
        counts = exchange_counts(len(own), world, own.device)
        return [gather_tokens(part, counts, world)[:most] for part in parts]

    def normalisers(self, loc: Tensor) -> Tensor:
        """log sum_k exp loc_S,k [N] of this rank's tokens; the first of the two word-head products."""
        head = self.model.action.word_head()
        longest = max(exchange_counts(len(loc), self.groups.world, loc.device))
        parts = [loc.new_zeros(0)]
        for first in range(0, longest, NORM_TOKENS):
            self.progress("normalisers", first, longest)
            own = loc[first : first + NORM_TOKENS]
            law, labels = Cauchy(own, torch.ones_like(own)), torch.zeros(len(own), dtype=torch.int64, device=own.device)
            parts.append(vocab_parallel_scores(law, head, labels, self.groups.vocab, rank_by="loc").log_norm)
        return torch.cat(parts)

    def fit_rows(self, fit: _Positions, logits: StartLogits) -> dict[str, Any]:
        """Fit <NUM>'s row, if asked for, and level all rows; `Calibration`'s fields of it."""
        # Only the first `MOST` of all ranks are used below, so no rank computes normalisers of more
        before = sum(exchange_counts(len(fit.z), self.groups.world, fit.z.device)[: self.groups.rank])
        used = slice(max(MOST - before, 0))
        own, share = self.word_loc(fit.z[used]), 0.0
        loc, log_norm, labels = self.of_all_ranks(own, self.normalisers(own), fit.labels[used])
        if self.numerals:
            self.progress("<NUM>'s row", 0, 1)
            share = fit_numeral_rows(self.model, loc, log_norm, labels, self.numerals, self.groups)
            logits.redo([*self.numerals, self.model.config.num_token_id])
        self.progress("levelling", 0, 1)
        levelled, v = level_logits(self.model.action, loc, log_norm, self.groups)
        logits.take(v)
        return {"levelled": levelled, "num_row_told": share}

    def beside_numbers(
        self, fit: _Positions, batches: Iterable[tuple[Batch, Tensor]]
    ) -> tuple[list[Any], list[TextNumber]]:
        """All ranks' texts before the numbers of `fit`, and the numbers of the batches."""
        world = self.groups.world
        further: list[TextNumber] = []
        if self.beside is None:
            return [], further
        for batch, z in batches:
            at = batch.number_places
            values = batch.numeric_labels.flatten()[at].tolist()
            further += zip(self.beside.texts_before(batch, at, z), values, strict=True)
        of_ranks = [(fit.texts, further)] if world is None else gather_objects((fit.texts, further), world)
        return [text for texts, _ in of_ranks for text in texts], [one for _, more in of_ranks for one in more]

    def fit_regression(self, fit: _Positions, beside_batches: Iterable[tuple[Batch, Tensor]]) -> dict[str, Any]:
        """Start the side network, W_reg, b_reg and U's number dimensions; `Calibration`'s fields of it."""
        target = self.model.target
        x = fit.z[:, : self.model.config.hidden_size] if self.model.config.number_dims else self.word_loc(fit.z)
        parts = x, fit.values, fit.folds
        x, values, folds = self.of_all_ranks(*(part[fit.learnt] for part in parts), most=NUMBERS)
        if not len(values):
            return {"numbers": 0, "reg_mdae": None, "reg_median_mdae": None, "law": None, "size": 1.0}
        texts, further = self.beside_numbers(fit, beside_batches)

        def tell(done: int, of: int) -> None:
            if self.groups.world_size == 1:  # progress is collective: other ranks only wait for this one
                self.progress("the wide part", done, of)

        def ridge() -> tuple[dict[str, Tensor], tuple[Tensor, float, float, float], FittedLaw, float, float]:
            targets = target.forward(values).double()
            before = [*texts[: len(values)], *(text for text, _ in further)]
            raw = torch.cat([values, values.new_tensor([value for _, value in further])])
            every = target.forward(raw).double()
            read = None if self.beside is None else self.beside.fit(before, every, tell)
            h = torch.zeros_like(targets)
            if read is None:
                g, tables, own_folds, shift = h, {}, folds, 0.0
            else:
                # One cross-fit for both regressions, and the median residual of the first
                rest = every - read.left_out.to(every)
                g, h = (part[: len(values)].to(targets) for part in (read.left_out, read.spread))
                tables = read.tables
                own_folds = folds.new_tensor(read.folds[: len(values)])
                shift = float(rest.median() - rest[: len(values)].median())
            found = robust_ridge(x, targets - g, own_folds, 0.0 if read is None else SURE)
            error = (target.inverse(found.left_out + shift + g) - values).abs().median()
            of_median = (values - values.quantile(0.5)).abs().median()
            scale, noise, left = found.scale, NOISE, targets - g - found.left_out - shift
            if bool(h.any()):
                scale, noise = scale * float((left / h.exp()).abs().median() / left.abs().median()), LITTLE_NOISE
            errors = left, h, own_folds
            if read is not None and not bool(found.coefficients.any()):  # z adds nothing: also the numbers without z
                errors = rest - found.intercept - shift, read.spread.to(every), folds.new_tensor(read.folds)
            law = fit_law(self.law or target.law, *errors)
            scale = scale if law.name == "cauchy" else law.scale
            start = found.coefficients.cpu(), found.intercept + shift, scale, noise
            return tables, start, law, float(error), float(of_median)

        size = self.fit_scores(fit)
        tables, begin, law, error, of_median = self.groups.agreed(ridge)
        for name, table in tables.items():
            self.model.get_parameter(f"{BESIDE}.{name}").copy_(table)
        start_regression(self.model, *begin)
        self.model.config.target = {**self.model.config.target, "law": law.name}
        return {"numbers": len(values), "reg_mdae": error, "reg_median_mdae": of_median, "law": law.said, "size": size}

    def fit_scores(self, fit: _Positions) -> float:
        """Start the number head's scores: ridge regressions on U's word part, then its own fit; `Calibration.size`."""
        head = self.model.action.number_head
        values, memory = fit.values[fit.learnt], fit.memory[fit.learnt]
        targets = head.score_targets(values, memory)
        if not targets.shape[1]:
            return 1.0
        parts = self.word_loc(fit.z)[fit.learnt], targets, values, memory
        x, targets, values, memory = self.of_all_ranks(*parts, most=SCORED)

        def ridge() -> tuple[Tensor, Tensor]:
            found, _ = ridges_by_leave_one_out(x.double(), targets)
            return found.cpu(), (targets.mean(0) - found @ x.double().mean(0)).cpu()

        head.start_scores(*self.groups.agreed(ridge))
        digits = self.model.config.digit_rows
        characters = rows_of(self.model.action.word_head(), digits, self.groups)[0] if digits else None
        for name, part in self.groups.agreed(lambda: head.sharpened(x, values, memory, characters)).items():
            self.model.action.get_parameter(name).copy_(part)
        return self.groups.agreed(lambda: float(x.abs().mean())) or 1.0

    def measured(self, logits: StartLogits, base_best: Tensor, threshold: float, gamma: float) -> dict[str, Any]:
        """`Calibration`'s fields of the start as it is set, on the positions that (C, gamma) were chosen on.

        base_best [n]: the base's best words.
        """
        num, labels = self.model.config.num_token_id, logits.labels
        loss, best, prob_sum = logits.at(threshold, gamma)
        digits = torch.isin(base_best, torch.tensor(self.numerals, dtype=torch.int64, device=labels.device))
        is_num, best_is_num, p_num = labels == num, best == num, logits.p_of(num, threshold, gamma)
        numbers = logits.mean(is_num)
        return {
            "loss": loss,
            "accuracy": logits.mean(best == labels),
            "base_accuracy": logits.mean((base_best == labels) | (digits & is_num)),
            "prob_sum_median": float(logits.of_all_ranks(prob_sum).quantile(0.5)),
            "tokens": logits.tokens,
            "num_f1": 2 * logits.mean(is_num & best_is_num) / (numbers + logits.mean(best_is_num)) if numbers else None,
            "num_p_mean": logits.mean(p_num * is_num) / numbers if numbers else None,
        }
