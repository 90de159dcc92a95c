"""Rules that explain a run's metrics in sentences: those of S3 5.3, 5.4 and S1 6.1, 6.2, and additional ones."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cqwen_dist.tools.report.run_data import RunData, watched_names

LEVELS = ("bad", "warn", "note", "good")  # the worst first

FEW_WORDS = 0.2  # accuracy; a pretrained model reaches 0.3 to 0.7 on familiar kinds of text
SUM, SUM_OF_ONE = "dist/ovr_prob_sum_median_standard", "dist/ovr_prob_sum_median_causal"
# The model has learned numbers if its median error is below this fraction of the error of always predicting the median.
USEFUL = 0.9
HARDLY = 0.97


@dataclass(frozen=True)
class Finding:
    """A finding about a run: level, headline, and the meaning or a remedy."""

    level: str
    title: str
    text: str


bad, warn, note, good = (partial(Finding, level) for level in LEVELS)


def diagnose(run: RunData) -> list[Finding]:
    """All findings, worst first."""
    found: list[Finding] = []
    for rule, *metrics in RULES:
        if run.last.keys() >= set(metrics) and not (run.of_table and rule in ABOUT_WORDS):
            found += rule(run, *(run.last[name] for name in metrics))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _knows_numbers(run: RunData) -> bool:
    """Whether the model predicts numbers clearly better than always predicting the training median."""
    return run.last.get("eval/reg_mdae", 0.0) < USEFUL * run.last.get("eval/baseline_mdae", math.inf)


def _alarms(run: RunData) -> Iterator[Finding]:
    for alarm in run.alarms:
        kind, samples = alarm.get("kind"), ", ".join(map(str, alarm.get("samples") or []))
        mild = kind in ("loss-spike", "kl-above-bound")
        named = f" Samples: {samples}." if samples and kind == "loss-spike" else ""
        yield (warn if mild else bad)(f"Alarm at step {alarm.get('step')}: {kind}", f"{alarm.get('text')}.{named}")


def _words(run: RunData, accuracy: float, base: float) -> Iterator[Finding]:
    gap = 100 * (accuracy - base)
    if gap < -1.0:
        held = run.config.constraint.mode == "dual"
        hold = "a smaller loss.constraint.eps" if held else "hold U near its start (loss.constraint.mode: dual)"
        advice = f"knowledge was lost. Lower the learning rates, or {hold}."
        if projected := run.start.get("projection_error"):
            advice = f"model.causal_size leaves out {projected:.0%} of the base's logits; a larger one keeps more."
        yield bad(
            f"It predicts {-gap:.1f} points fewer words right than its base model",
            f"{accuracy:.1%} against {base:.1%}: {advice}",
        )
    elif accuracy < FEW_WORDS:
        model = run.config.model
        if model.architecture is None:
            cause = "Are the texts of a kind, and in the template, that the base knows (data.prompt_template)?"
        elif model.pretrain is None:
            cause = "The base has random weights (model.architecture): name a pretrained one (model.name_or_path)."
        else:
            cause = f"The base was pretrained for {model.pretrain.steps} steps only (model.pretrain.steps)."
        yield bad(f"Words: only {accuracy:.1%} right", f"Its base model has {base:.1%}. {cause}")
    else:
        how = f"{gap:+.1f} points against" if abs(gap) >= 0.05 else "as many as"
        yield good(f"Words: {accuracy:.1%} right", f"{how} the base model's own {base:.1%}.")


def _forgotten(run: RunData) -> Iterator[Finding]:
    trained = " and ".join(f"`{group}`" for group in ("classifier", "thresholds") if run.config.trains(group))
    remedy = "Lower the rates (lr_groups), train for fewer steps, or mix such texts into data.train."
    if trained:
        lower = "or lower their rates (lr_groups): they follow only the training texts."
        remedy = f"Freeze {trained} (a stage's train), {lower}"
    for name in watched_names(run.last):
        accuracy, base = run.last.get(f"watch/{name}/accuracy"), run.last.get(f"watch/{name}/base_accuracy")
        if accuracy is None or not base:
            continue
        gap = 100 * (accuracy - base)
        if gap < -max(1.0, 10 * base):
            yield warn(f"It forgets {name}: {-gap:.1f} points of the base model's {base:.1%}", remedy)
        else:
            finding = good if accuracy >= FEW_WORDS else note
            yield finding(f"Kept of {name}: {accuracy:.1%} right", f"{gap:+.1f} points against {base:.1%}.")


def _overfit(run: RunData) -> Iterator[Finding]:
    losses = run.raw.get("eval/cls_loss_mean", [])
    if len(losses) >= 4 and losses[-1] > 1.05 * min(losses) and min(losses) > 0:
        # A long run's curve has one point per stretch, so fewer points than `losses`: map the index onto it.
        steps = run.curves["eval/cls_loss_mean"].x
        at = steps[losses.index(min(losses)) * len(steps) // len(losses)]
        yield warn(
            "The held-out word loss was lower before",
            f"{min(losses):.3g} at step {at:.0f}, {losses[-1]:.3g} at the end: it overfits. Stop earlier "
            f"(stages' until), or more dropout (model.lora.dropout is {run.config.model.lora.dropout:g}).",
        )


def _convergence(run: RunData) -> Iterator[Finding]:
    """S1 6.2: if a loss does not fall, check the data statistics and the first regression predictions."""
    known, errors = run.start.get("statistics") or {}, run.raw.get("eval/reg_mdae", [])
    first = f"{errors[0]:.4g}" if errors else "unknown"
    check = {
        "words": ("eval/cls_loss_mean", "Look at the rates, and at the labels of the data (`cqwen prepare`)."),
        "numbers": (
            "eval/reg_nll",
            f"Are these the numbers that you mean (`cqwen prepare`)? Their median is {known.get('median')}, half their "
            f"interquartile range {known.get('scale')}; the median error at the start was {first}.",
        ),
    }
    for what, (name, advice) in check.items():
        losses = run.raw.get(name, [])
        if len(losses) >= 2 and min(losses[1:]) >= losses[0]:
            text = f"Held out: {losses[0]:.4g} at the start, never lower, {losses[-1]:.4g} at the end."
            found = bad
            if what == "numbers" and _knows_numbers(run):
                found, advice = note, "The start's closed forms are the better fit: lower rates, or fewer steps."
            yield found(f"The loss of {what} never fell", f"{text} {advice}")


def _num(run: RunData, f1: float, mdae: float) -> Iterator[Finding]:
    if f1 < 0.8:
        precision, recall = run.last.get("eval/num_precision", 0.0), run.last.get("eval/num_recall", 0.0)
        which = "it misses numbers" if recall <= precision else "it predicts numbers in place of words"
        yield warn(
            f"Telling numbers from words: F1 {f1:.2f}",
            f"Precision {precision:.2f}, recall {recall:.2f}: {which}. The gate of the regression depends on it.",
        )


def _errors(run: RunData, mae: float, mdae: float) -> Iterator[Finding]:
    baseline = run.last.get("eval/baseline_mdae")
    if baseline is not None and mdae >= HARDLY * baseline:
        reads = run.config.data.target_field is not None and not run.config.model.wide
        advice = (
            " Try model.wide: 1024, which starts from a fit to the words and numbers of each text." if reads else ""
        )
        yield bad(
            "Numbers are hardly better than always saying the median",
            f"Median absolute error {mdae:.4g}, always the training median's {baseline:.4g}.{advice}",
        )
    elif baseline is not None:
        useful = _knows_numbers(run)
        yield (good if useful else warn)(
            f"Numbers: median absolute error {mdae:.4g}",
            f"{'' if useful else 'Only '}{1 - mdae / baseline:.0%} less than always saying the training median "
            f"({baseline:.4g}).",
        )
    if mae > 5 * mdae > 0:
        logs = run.config.target_transform.endswith("_log")
        yield note(
            "A few extreme errors",
            f"The mean absolute error, {mae:.4g}, is {mae / mdae:.0f} times the median one, {mdae:.4g}: a few "
            "predictions are far off, most are not."
            + ("" if logs else " Numbers of very different size? Try loss.target_transform: signed_log."),
        )


def _recalibrated_intervals(run: RunData, conformal: float, count: float) -> Iterator[Finding]:
    if count < 1:
        return
    # Coverage of 0.9 on `count` numbers has variance 0.9 * 0.1 / count; 2.576 standard deviations cover 99 %.
    reach = 2.576 * math.sqrt(0.09 / count)
    inside = abs(conformal - 0.9) <= reach
    if _knows_numbers(run) or not inside:  # guessed numbers need wide intervals, which cover easily
        yield (good if inside else warn)(
            f"Recalibrated 90 % intervals contain {conformal:.0%}",
            f"Measured on {count:.0f} numbers that did not calibrate them. Chance alone gives "
            f"{max(0.9 - reach, 0):.0%} to {min(0.9 + reach, 1):.0%} (99 % of the time).",
        )


def _distributions(run: RunData) -> Iterator[Finding]:
    for name, what, meaning in (
        ("U_loc", "locations", "single tokens have representations of their own"),
        ("U_scale", "scales", "the model is much less sure of some tokens or dimensions"),
    ):
        mean, median, std, iqr = (run.last.get(f"dist/{name}_{k}") for k in ("mean", "median", "std", "iqr"))
        if mean is None or median is None or std is None or not iqr:
            continue
        # A normal law's interquartile range is 1.349 standard deviations, so `tails` is 1 for a normal law.
        skew, tails = (mean - median) / iqr, std / (iqr / 1.349)
        if abs(skew) > 0.5:
            yield note(
                f"The {what} of U are skewed",
                f"Mean {mean:.3g}, median {median:.3g}, quartiles {iqr:.3g} apart: some tokens or dimensions pull to "
                f"the {'high' if skew > 0 else 'low'} side.",
            )
        if tails > 3:
            yield note(
                f"The {what} of U have heavy tails",
                f"Their deviation, {std:.3g}, is {tails:,.1f} times that of a normal law with these quartiles: "
                f"{meaning}.",
            )


def _kl(run: RunData, kl: float, eps: float) -> Iterator[Finding]:
    """S3 2.3: KL(U, U at the start) <= eps."""
    if kl > eps:
        hold = "lower rates for abduction and scales" if run.config.constraint.mode == "dual" else "mode: dual holds it"
        yield warn(
            f"U moved further from its start than allowed: KL {kl:.2g}, bound {eps:g}",
            f"The bound, loss.constraint.eps, guards what the base knows ({hold}).",
        )
    else:
        yield good(f"U stayed near its start: KL {kl:.2g}, bound {eps:g}", "In nats a dimension; loss.constraint.eps.")


def _prob_sum(run: RunData, total: float) -> Iterator[Finding]:
    if 0.7 <= total <= 1.5:
        text, finding = "One word comes next, so 1 is calibrated.", good
        if run.last.get("eval/accuracy", 1.0) < FEW_WORDS:
            text += " The sum is near 1 too if every word has the same probability: see how many words are right."
            finding = note
        yield finding(f"The probabilities add up to {total:.2f}", text)
    else:
        yield (warn if total < 0.3 or total > 3 else note)(
            f"The probabilities of all words add up to {total:.2f}",
            "One word comes next, so it should be near 1: "
            + ("too many words are likely (scales too wide)." if total > 1 else "no word is likely."),
        )


def _prob_sum_of_one(run: RunData, total: float, causal: float) -> Iterator[Finding]:
    if causal > 0 and total > 0 and abs(math.log(causal)) > abs(math.log(total)) + 0.2:
        yield note(
            f"For one fixed individual they add up to {causal:.2f}",
            f"That should be nearer to 1 than the {total:.2f} over all individuals: draws from U are far from its "
            "location, or b_noise decides little.",
        )


def _gradients(run: RunData) -> Iterator[Finding]:
    norms = run.raw.get("train/grad_norm", [])
    if len(norms) < 10:
        return
    clipped = statistics.fmean(run.raw.get("train/clipped", [0.0]))
    median = statistics.median(norms)
    if max(norms) > 1000 * median > 0:
        yield warn(
            "Gradients exploded at times",
            f"The largest norm was {max(norms):.3g}, the median {median:.3g}. Look at <NUM>'s bias and the start of "
            "the heads.",
        )
    limit = run.config.max_grad_norm
    if clipped > 0.9 and limit is not None:
        yield warn(
            f"{clipped:.0%} of the steps were clipped",
            f"The median gradient norm is {median:.3g}, the limit (train.max_grad_norm) {limit:g}: only the gradient's "
            "direction matters. With `usual`, only unusually large gradients are clipped.",
        )


def _speed(run: RunData) -> Iterator[Finding]:
    seconds, waits = run.raw.get("perf/step_s", []), run.raw.get("perf/data_wait_s", [])
    if len(waits) >= 5 and sum(waits) > 0.1 * sum(seconds):
        yield warn(
            f"{sum(waits) / sum(seconds):.0%} of the time went into waiting for data",
            "Prepare the data once (`cqwen prepare`), or use a faster disk.",
        )
    refused = len(run.raw.get("train/refused", []))
    if refused:
        yield warn(f"{refused} steps were refused", "Their loss or gradient was not finite; see the alarms.")


ABOUT_WORDS = (_words, _overfit, _prob_sum, _prob_sum_of_one)  # a table does not teach them
# Each rule is followed by its metrics. It is called with their last values, and skipped if one is missing.
RULES: tuple[tuple[Any, ...], ...] = (
    (_alarms,),
    (_words, "eval/accuracy", "eval/base_accuracy"),
    (_forgotten,),
    (_overfit,),
    (_convergence,),
    (_num, "eval/num_f1", "eval/reg_mdae"),
    (_errors, "eval/reg_mae", "eval/reg_mdae"),
    (_recalibrated_intervals, "eval/coverage_90_conformal", "eval/conformal_numbers"),
    (_distributions,),
    (_kl, "train/kl", "train/kl_eps"),
    (_prob_sum, SUM),
    (_prob_sum_of_one, SUM, SUM_OF_ONE),
    (_gradients,),
    (_speed,),
)
