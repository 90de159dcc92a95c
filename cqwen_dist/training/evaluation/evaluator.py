"""Held-out metrics, all from deterministic inference (seed S3 section 5).

eval/accuracy          argmax P at all labelled positions          eval/base_accuracy     top-1 of the base model
eval/perplexity        softmax(loc_S)                              eval/base_perplexity   the same of the base model
eval/perplexity_ovr    P_k / sum P                                 eval/num_*             <NUM> versus words
eval/ece, ece_calibrated                                           of the likeliest word's P (`word_calibration`)
eval/accuracy_words_*                                              by label frequency (`frequency.BAND_NAMES`)
dist/C_words_*                                                     mean threshold by the same bands
eval/accuracy_80, reg_mdae_80                                      of the surest 80 % of words, numbers (`surest`)
eval/reg_*, coverage_*, width_*, crps                              numbers (`number_metrics`)
eval/exact, candidates, ...                                        exact numbers, and metrics of a head of your own
eval/multilabel_*                                                  on request: sets of words
dist/U_loc_*, _scale_* over all tokens and the words' dimensions   dist/ovr_prob_sum_*    1 is calibrated
dist/U_number_*        the same over the number dimensions, if any (`Spread`)

A model that learns no words (`CausalQwenConfig.learns_words`) is measured at its numbers only, and of words nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.batch import Batch
from cqwen_dist.heads.action import rows_of, words_of_base
from cqwen_dist.heads.intervals import Intervals
from cqwen_dist.heads.word_temperature import word_temperature
from cqwen_dist.model.backbone import adapters_disabled
from cqwen_dist.model.modules import CausalModules
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.scores import OvrScores
from cqwen_dist.parallel.collectives import gather_objects, sum_over
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.parallel.vocab_parallel import vocab_parallel_prob_sums, vocab_parallel_scores
from cqwen_dist.training.evaluation.number_metrics import Numbers, number_metrics, risk_80, surest
from cqwen_dist.training.evaluation.spread import SpreadsOfU
from cqwen_dist.training.evaluation.word_calibration import word_calibration
from cqwen_dist.training.frequency import BAND_NAMES, band_of, mean_thresholds


@dataclass
class Evaluator:
    """Evaluates a model on a held-out set. Collective over the world."""

    model: CausalModules
    features: Callable[..., Tensor]  # (batch on the device, keep [N]) -> z [N,H]
    batches: Iterable[Batch]  # iterated in each evaluation
    groups: Groups
    _: KW_ONLY
    baseline_value: float | None  # median of the training numbers, raw unit
    gemm_dtype: torch.dtype = torch.float32
    word_counts: np.ndarray | None = None  # [V] occurrences in training, for metrics by frequency
    label_set: float | None = None  # also measure the sets of all words with a larger P (S4 3.3.2)
    known: Intervals = field(default_factory=Intervals)  # saved interval factors, to be tested on this data
    kept: Callable[[int, Batch, Tensor], Tensor] | None = None  # `features` of the i-th batch, kept in memory
    numerals: Sequence[int] = ()  # tokens with which the base spells numerals: each counts as <NUM> for the base
    progress: Callable[[str, int, int], None] = lambda what, done, of: None  # (what, batch, number of batches)

    def __post_init__(self) -> None:
        self.base: dict[str, float] = {}  # metrics of the base model; all evaluations include them
        self.factors: Intervals | None = None  # interval factors of the last evaluation
        self.drawing: dict[str, Any] | None = None  # of the numbers of the last evaluation, for a report's charts
        self.word_risk: list[float] = []  # share of wrong words among its surest ones, by `SHARES`
        self.device = self.model.action.cls_weight.device
        self.of_words = self.model.config.learns_words
        self.band = None if self.word_counts is None else torch.from_numpy(band_of(self.word_counts)).to(self.device)

    @torch.no_grad()
    def measure_base(self) -> dict[str, float]:
        """Top-1 and perplexity of the base model: without values, without adapters, with its own head.

        At a number any digit counts as <NUM>, with the total probability of all digits and <NUM>. Call this only before
        training.
        """
        action, embedding = self.model.action, self.model.features.embedding
        rows, bias = rows_of(action.base_head or action.word_head(), list(self.numerals), self.groups)
        spelt = torch.tensor(list(self.numerals), dtype=torch.int64, device=self.device)

        def scored() -> Iterator[tuple[OvrScores, Tensor, Tensor]]:
            for _, batch, keep in self._batches():
                u, head = words_of_base(self.model, self.features(batch, keep))
                labels = batch.labels.flatten()[keep]
                scores = vocab_parallel_scores(u.to(self.gemm_dtype), head, labels, self.groups.vocab, rank_by="loc")
                yield scores, labels, u.loc @ rows.T + bias

        self._exchange_row()
        w_num = torch.zeros(embedding.numeral_row.shape, device=self.device)  # the base reads no values
        base = {"embedding.w_num": w_num, "embedding.num_row": embedding.numeral_row.to(w_num)}
        try:
            with adapters_disabled(self.model.transformer), self.model.features.using(base):
                self.base = base_metrics(scored(), self.model.config.num_token_id, spelt)
        finally:
            self._exchange_row()
        return self.base

    def _exchange_row(self) -> None:
        """Exchange <NUM>'s row in the base with the one that the run starts from (`model.num_row_init`)."""
        action, row = self.model.action, self.model.config.num_token_id - self.model.action.vocab_start
        for rows, other in zip((action.cls_weight, action.cls_bias), action.base_row, strict=False):
            rows.data[row], other.data = other, rows[row].detach().clone()

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """All metrics, equal on all ranks. Also sets `factors` and `drawing`."""
        sums, banded = self._zeros()
        lists: dict[str, list[Tensor]] = defaultdict(list)
        generator = torch.Generator(self.device).manual_seed(0)  # the same individuals in each evaluation
        action = self.model.action
        individual = SpreadsOfU(action.word_size, action.causal_hidden_size, self.groups.world_size)
        texts, self.drawing = 0, None

        # This rank's batches: sums over tokens, and lists of values for medians
        for i, batch, keep in self._batches():
            u = self._u(i, batch, keep)
            u_prime = action.add_noise(u)
            individual.add(u)
            if self.of_words:
                for name, part in self._add_words(u_prime, batch, keep, sums, banded).items():
                    lists[name].append(part)
                lists["word_text"].append(texts + torch.div(keep, batch.labels.shape[1], rounding_mode="floor"))

                # One individual drawn from U, with only the noise as scale
                drawn = u.sample(torch.rand(u.loc.shape, generator=generator, device=self.device))
                seen = action.word_part(Cauchy(drawn, action.b_noise.abs())).to(self.gemm_dtype)
                head = action.word_head()
                lists["prob_sum_causal"].append(vocab_parallel_prob_sums(*seen, head, self.groups.vocab))

            # Numbers: decisions of the number head, truth (raw unit), Y, index of the text, and metrics of the head
            for name, part in self._numbers(u_prime, batch, keep, texts, sums).items():
                lists[name].append(part)
            texts += batch.filled_rows

        # All ranks: one gather for the lists, one all-reduce for the sums
        mine = {name: torch.cat(parts).double().cpu().numpy() for name, parts in lists.items()}
        gathered = _gather(mine, texts, self.groups.sequence_size)
        totals, hits, found_labels = self._over_ranks(sums, banded)
        metrics, factors = action.number_head.metrics(totals, gathered) | individual.summary(), Intervals()
        if self.of_words:
            wide = word_temperature(action, individual.of_words(), self.model.config.used_rows, self.groups)
            found, factors = self._word_calibration(gathered, wide)
            metrics = self._word_metrics(totals) | metrics | found

        # The numbers, and words by frequency
        if len(gathered["true"]):
            columns = (gathered["true"], gathered["loc"], gathered["scale"], gathered["text"].astype(np.int64))
            numbers = Numbers(*columns, gathered.get("likeliest"), gathered.get("p"))
            found, of_numbers, self.drawing = number_metrics(
                numbers, self.model.target, self.baseline_value, self.known
            )
            metrics |= found
            doubts, wide = {**factors.doubts, **of_numbers.doubts}, factors.word_temperature
            factors = replace(of_numbers, words=factors.words, doubts=doubts, word_temperature=wide)
        self.factors = factors
        if self.of_words and self.band is not None:
            bands = zip(BAND_NAMES, hits, found_labels, strict=True)
            metrics.update({f"eval/accuracy_words_{name}": h / n for name, h, n in bands if n})
            own = self.band[action.vocab_start : action.vocab_start + action.rows]
            metrics.update(mean_thresholds(action.word_head().threshold, own, self.groups))
        return metrics

    def _word_calibration(
        self, gathered: dict[str, np.ndarray], temperature: float
    ) -> tuple[dict[str, float], Intervals]:
        """(metrics of words over all ranks' lists, what words are calibrated by). Also sets `word_risk`."""
        metrics = {}
        for law in ("standard", "causal"):
            sums_of_p = gathered[f"prob_sum_{law}"]  # torch's quantile takes 16 million values at most
            metrics[f"dist/ovr_prob_sum_median_{law}"] = float(np.median(sums_of_p)) if len(sums_of_p) else math.nan
        strength, right, doubt, texts_of = (gathered[name] for name in ("strength", "right", "doubt", "word_text"))
        found, words = word_calibration(strength, right.astype(bool), texts_of.astype(np.int64))
        doubts, self.word_risk = surest(doubt, 1.0 - right, np.mean)
        metrics |= found | {"eval/accuracy_80": 1.0 - risk_80(self.word_risk)}
        return metrics, Intervals(words=words, doubts={"words": doubts}, word_temperature=temperature)

    @torch.no_grad()
    def words(self) -> dict[str, float]:
        """The metrics of the words only, equal on all ranks: accuracy, loss, perplexities, F1 of <NUM>."""
        sums, banded = self._zeros()
        for i, batch, keep in self._batches():
            self._add_words(self.model.action.add_noise(self._u(i, batch, keep)), batch, keep, sums, banded)
        return self._word_metrics(self._over_ranks(sums, banded)[0])

    def _zeros(self) -> tuple[dict[str, Tensor], Tensor]:
        """Sums by name, which begin at 0, and [2, bands]: hits and labels by frequency."""
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.device))
        return sums, torch.zeros(2, len(BAND_NAMES), dtype=torch.float64, device=self.device)

    def _over_ranks(self, sums: dict[str, Tensor], banded: Tensor) -> tuple[dict[str, float], list[float], list[float]]:
        """The sums over all ranks, in one all-reduce; hits and labels by frequency."""
        names = sorted(sums)
        packed = sum_over(torch.stack([*(sums[name] for name in names), *banded.flatten()]))
        hits, seen = packed[len(names) :].view(2, -1).tolist()
        return dict(zip(names, packed.tolist(), strict=False)), hits, seen

    def _u(self, i: int, batch: Batch, keep: Tensor) -> Cauchy:
        return self.model.abduction(self.features(batch, keep) if self.kept is None else self.kept(i, batch, keep))

    def _add_words(
        self, u_prime: Cauchy, batch: Batch, keep: Tensor, sums: dict[str, Tensor], banded: Tensor
    ) -> dict[str, Tensor]:
        """Add the words of a batch to the sums. Returns lists [N]: sum of P; strength of the likeliest word; whether it
        is right; the doubt of it."""
        labels, head = batch.labels.flatten()[keep], self.model.action.number_head
        sums["cls_loss"] += head.loss(u_prime, head.labels(batch, keep))[1]
        num_id = self.model.config.num_token_id
        scores = self._scores(u_prime, labels)
        strength, loc, best = scores.best
        right, is_num, best_is_num = best == labels, labels == num_id, best == num_id
        sums["tokens"] += labels.numel()
        sums["cls_loss"] += scores.per_token.sum()
        sums["surprise"] += (scores.log_norm - scores.label_loc).sum()
        sums["surprise_ovr"] += (scores.prob_sum.double().log() - scores.label_log_p).sum()
        sums["right"] += right.sum()
        sums["num_hit"] += (is_num & best_is_num).sum()
        sums["num_predicted"] += best_is_num.sum()
        sums["num_true"] += is_num.sum()
        if self.label_set is not None:
            size = scores.above[:, 0]
            sums["set_size"] += size.sum()
            sums["set_empty"] += (size == 0).sum()
            sums["set_hit"] += (scores.label_log_p > math.log(self.label_set)).sum()
        if self.band is not None:
            banded[0].index_add_(0, self.band[labels], right.double())
            banded[1].index_add_(0, self.band[labels], torch.ones_like(right, dtype=torch.float64))
        doubt = scores.log_norm - loc
        return {"prob_sum_standard": scores.prob_sum, "strength": strength, "right": right, "doubt": doubt}

    def _numbers(
        self, u_prime: Cauchy, batch: Batch, keep: Tensor, texts: int, sums: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The lists of a batch's numbers; adds the counts to the sums. texts: in earlier batches."""
        head, is_number = self.model.action.number_head, batch.numeric_mask.flatten()[keep]
        at, own = keep[is_number], Cauchy(u_prime.loc[is_number], u_prime.scale[is_number])
        # No exact value is written yet: its bar is set when all numbers are there
        decision, true = head.decide(own, head.memory_at(batch, at), bar=1.0), batch.numeric_labels.flatten()[at]
        text = texts + torch.div(at, batch.labels.shape[1], rounding_mode="floor")
        counted, listed = head.measure(decision, batch, at)
        for name, part in counted.items():
            sums[name] += part
        if decision.likeliest is not None and decision.p is not None:
            listed = {**listed, "likeliest": decision.likeliest, "p": decision.p}
        return {"true": true, "loc": decision.y.loc, "scale": decision.y.scale, "text": text, **listed}

    def _word_metrics(self, c: dict[str, float]) -> dict[str, float]:
        tokens = max(c["tokens"], 1)
        metrics = {
            "eval/accuracy": c["right"] / tokens,
            **self.base,
            "eval/cls_loss_mean": c["cls_loss"] / tokens,
            "eval/perplexity": perplexity(c["surprise"] / tokens),
            "eval/perplexity_ovr": perplexity(c["surprise_ovr"] / tokens),
            "eval/num_precision": c["num_hit"] / max(c["num_predicted"], 1),
            "eval/num_recall": c["num_hit"] / max(c["num_true"], 1),
            "eval/num_f1": 2 * c["num_hit"] / max(c["num_predicted"] + c["num_true"], 1),
        }
        if self.label_set is not None:
            metrics["eval/multilabel_recall"] = c["set_hit"] / tokens
            metrics["eval/multilabel_precision"] = c["set_hit"] / max(c["set_size"], 1)
            metrics["eval/multilabel_f1"] = 2 * c["set_hit"] / max(c["set_size"] + tokens, 1)
            metrics["eval/multilabel_size_mean"] = c["set_size"] / tokens
            metrics["eval/multilabel_empty"] = c["set_empty"] / tokens
        return metrics

    def _batches(self) -> Iterable[tuple[int, Batch, Tensor]]:  # number, batch, its label positions
        of = len(self.batches) if isinstance(self.batches, Sized) else 1
        for i, batch in enumerate(self.batches):
            self.progress("evaluating", i, of)
            yield i, batch.to(self.device), batch.learnt(self.of_words).to(self.device)

    def _scores(self, u_prime: Cauchy, labels: Tensor) -> OvrScores:
        """Results of one pass over the words for the label positions."""
        action, label_set = self.model.action, self.label_set
        return vocab_parallel_scores(
            action.word_part(u_prime).to(self.gemm_dtype),
            action.word_head(self.model.config.used_rows),
            labels,
            self.groups.vocab,
            () if label_set is None else (label_set,),
        )


def base_metrics(
    scored: Iterable[tuple[OvrScores, Tensor, Tensor]], num_token_id: int, spelt: Tensor
) -> dict[str, float]:
    """Top-1 and perplexity of a base that spells numerals with the tokens `spelt` [d]; d may be 0.

    If the label is <NUM>, each of these tokens is right, and their probabilities add to that of <NUM>. scored:
    (scores by loc_S, labels [N], logits of `spelt` [N,d]) for each batch. Collective over the world.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=spelt.device)
    for scores, labels, digits in scored:
        best, number = scores.best.word, labels == num_token_id
        together = torch.logaddexp(scores.label_loc, digits.float().logsumexp(1))
        sums[0] += ((best == labels) | (number & torch.isin(best, spelt))).sum()
        sums[1] += (scores.log_norm - torch.where(number, together, scores.label_loc)).double().sum()
        sums[2] += labels.numel()
    right, surprise, total = sum_over(sums).tolist()
    return {"eval/base_accuracy": right / max(total, 1), "eval/base_perplexity": perplexity(surprise / max(total, 1))}


def _gather(mine: dict[str, np.ndarray], texts: int, sharers: int) -> dict[str, np.ndarray]:
    """Join the lists of all ranks in one gather (a median needs all values); text numbers become global.

    sharers: ranks in a sequence group, which share their texts.
    """
    everyone = gather_objects((mine, texts))
    first = np.cumsum([0, *(count for _, count in everyone[::sharers])])
    for rank, (lists, _) in enumerate(everyone):
        for name in {"text", "word_text"} & lists.keys():
            lists[name] = lists[name] + first[rank // sharers]
    return {name: np.concatenate([lists[name] for lists, _ in everyone]) for name in mine}


def perplexity(surprise: float) -> float:
    """exp of a mean surprise in nats; inf on overflow."""
    return math.exp(surprise) if surprise < 709.0 else math.inf
