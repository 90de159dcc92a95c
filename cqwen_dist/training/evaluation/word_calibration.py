"""The probability of a word, recalibrated on held-out words, so that it can be read as a frequency.

P = 1/2 + atan(z)/pi for a decision strength z. With scales learnt by one-vs-rest P is nearly a step, so 0.99 is said
far too often. Two numbers mend it as Platt scaling does (1999): P' = 1/2 + atan((z - shift) / factor)/pi, at the least
log loss of "the likeliest word is right". P' rises with P, so no word changes.
"""

import numpy as np

from cqwen_dist.heads.intervals import UNCHANGED, WordScale
from cqwen_dist.training.evaluation.number_metrics import for_calibration

MOST = 4000  # words for the fit, which every evaluation makes three times: 0.3 s
BINS = 15  # of equally many words, for ECE
_SHIFTS, _FACTORS = np.linspace(0.0, 1.0, 41), np.logspace(-3, 5, 65)


def fit_word_scale(z: np.ndarray, right: np.ndarray) -> WordScale:
    """The scale of least log loss for strengths z [N] of the likeliest words, and whether each is right [N] bool.

    `UNCHANGED` if all or no words are right, which no scale can learn from.
    """
    if len(z) > MOST:
        z, right = (part[np.linspace(0, len(z) - 1, MOST).astype(np.int64)] for part in (z, right))
    if not right.any() or right.all():
        return UNCHANGED
    found, least = UNCHANGED, np.inf
    for shift in np.unique(np.quantile(z, _SHIFTS)):
        p = probability(z, WordScale(float(shift), _FACTORS[:, None]))
        loss = -np.log(np.clip(np.where(right, p, 1 - p), 1e-12, None)).mean(1)
        best = int(loss.argmin())
        if loss[best] < least:
            found, least = WordScale(float(shift), float(_FACTORS[best])), loss[best]
    return found


def probability(z: np.ndarray, scale: WordScale) -> np.ndarray:
    """P' for strengths."""
    return 0.5 + np.arctan((z - scale.shift) / scale.factor) / np.pi


def calibration_error(p: np.ndarray, right: np.ndarray) -> float:
    """ECE: the mean distance of the probabilities p [N] from the share that is right, in `BINS` equally large bins."""
    order = np.array_split(np.argsort(p, kind="stable"), min(BINS, len(p)))
    return float(sum(abs(p[some].mean() - right[some].mean()) * len(some) for some in order) / len(p))


def word_calibration(z: np.ndarray, right: np.ndarray, texts: np.ndarray) -> tuple[dict[str, float], WordScale]:
    """(eval/ece of P, eval/ece_calibrated of P' with each half's scale from the other half of the texts; the scale of
    all words). texts [N] int64: the text of each word. Without words no metrics."""
    if not len(z):
        return {}, UNCHANGED
    first = for_calibration(texts)
    calibrated = np.empty(len(z))
    for own in (first, ~first):
        calibrated[own] = probability(z[own], fit_word_scale(z[~own], right[~own]))
    metrics = {"eval/ece": calibration_error(probability(z, UNCHANGED), right)}
    metrics["eval/ece_calibrated"] = calibration_error(calibrated, right)
    return metrics, fit_word_scale(z, right)
