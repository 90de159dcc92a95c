"""The charts of a report, their order, and the sentence that goes with each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cqwen_dist.config import GROUPS

RIDGE = "eval/ridge_mdae"  # known for the quickstart's bundled data alone
SUM = "dist/ovr_prob_sum_median_standard"
SUM_OF_ONE = "dist/ovr_prob_sum_median_causal"
Series = tuple[tuple[str, str], ...]  # (metric, label)


@dataclass(frozen=True)
class Chart:
    """Curves in one frame.

    unit: of the y axis. series: a metric that a run does not have is left out. say: what to look for. log: the axis is
    logarithmic at first. at: (value, label) of lines to compare with.
    """

    title: str
    unit: str
    series: Series
    say: str = ""
    log: bool = False
    percent: bool = False
    at: tuple[tuple[float, str], ...] = ()


def _family(prefix: str, labels: dict[str, str]) -> Series:
    return tuple((f"{prefix}_{key}", label) for key, label in labels.items())


BANDS = {
    "1_100": "100 most frequent",
    "101_1000": "to 1,000",
    "1001_10000": "to 10,000",
    "10001_up": "rarer",
    "unseen": "unseen",
}
STATISTICS = {"mean": "mean", "median": "median", "std": "deviation", "iqr": "quartiles apart"}

LEARNING = (
    Chart(
        "Total loss",
        "Loss",
        (("train/total_loss", "training"),),
        "What the optimizer sees: words plus λ times numbers.",
    ),
    Chart(
        "Word loss",
        "Nats a token",
        (("train/cls_loss_mean", "training"), ("eval/cls_loss_mean", "held out")),
        "One-vs-rest, summed over the vocabulary. A low loss alone does not mean a working model: see accuracy.",
        log=True,
    ),
    Chart(
        "Words right",
        "Share of tokens",
        (("train/accuracy", "training"), ("eval/accuracy", "held out"), ("eval/base_accuracy", "base model")),
        "argmax P at every label position, compared with the base model's own top-1.",
        percent=True,
    ),
    Chart(
        "Perplexity, held out",
        "Perplexity",
        (
            ("eval/perplexity", "softmax of loc_S"),
            ("eval/perplexity_ovr", "P / ΣP"),
            ("eval/base_perplexity", "base model"),
        ),
        "The first is measured as for the base model, the second as this model decides.",
        log=True,
    ),
    Chart(
        "Sum of all P",
        "ΣP",
        (("train/prob_sum_mean", "training, mean"), (SUM, "held out, median"), (SUM_OF_ONE, "for one individual")),
        "One word comes next, so 1 is calibrated.",
        log=True,
        at=((1.0, "calibrated"),),
    ),
    Chart(
        "Right, by how often training has the word",
        "Share of tokens",
        _family("eval/accuracy_words", BANDS),
        "Held-out accuracy by the label's rank in the training texts.",
        percent=True,
    ),
    Chart(
        "Thresholds C, by how often training has the word",
        "C",
        _family("dist/C_words", BANDS),
        "Expected to fall for frequent words and to rise for rare ones.",
    ),
)
NUMBERS = (
    Chart(
        "Number loss",
        "Nats a number",
        (("train/reg_loss_effective", "training, gated"), ("eval/reg_nll", "held out, ungated")),
        "Cauchy negative log likelihood in the target's unit.",
    ),
    Chart(
        "Absolute error, held out",
        "The number's unit",
        (
            ("eval/reg_mdae", "median"),
            ("eval/reg_mae", "mean"),
            ("eval/baseline_mdae", "always the median: median"),
            (RIDGE, "ridge regression: median"),
        ),
        "A mean far above the median: few extreme errors.",
        log=True,
    ),
    Chart(
        "Telling <NUM> from words",
        "Share",
        (("eval/num_precision", "precision"), ("eval/num_recall", "recall"), ("eval/num_f1", "F1")),
        "Held out.",
        percent=True,
    ),
    Chart(
        "P of <NUM> where it is right",
        "P",
        (("train/p_num_mean", "training, mean"),),
        "The gate of the regression. If it falls towards 0, the model forgets to predict numbers.",
        percent=True,
    ),
    Chart(
        "What 90 % intervals hold",
        "Share of numbers",
        (("eval/coverage_90", "the Cauchy's own"), ("eval/coverage_90_conformal", "recalibrated")),
        "Held out. Recalibrated ones are measured on numbers that did not calibrate them.",
        percent=True,
        at=((0.9, "90 %"),),
    ),
    Chart(
        "CRPS, held out",
        "CRPS",
        (("eval/crps", "raw unit"), ("eval/crps_target", "target's unit")),
        "Smaller is better.",
        log=True,
    ),
)
INDIVIDUAL = (
    Chart(
        "Locations of U",
        "Location",
        _family("dist/U_loc", STATISTICS),
        "Mean against median: skew. Deviation against quartiles: tails.",
    ),
    Chart(
        "Scales of U",
        "Scale",
        _family("dist/U_scale", STATISTICS),
        "How unsure the model is of the individual.",
        log=True,
    ),
    Chart(
        "KL from the start",
        "Nats a dimension",
        (("train/kl", "mean"), ("train/kl_over_eps", "share beyond ε")),
        "KL between U now and U before training: it guards against forgetting.",
        log=True,
    ),
    Chart(
        "Drift of U's location",
        "Spreads",
        (("train/kl_drift", "in units of its spread"),),
        "Distance from its place before training.",
    ),
)
OPTIMIZER = (
    Chart(
        "Gradient norm",
        "Norm",
        (("train/grad_norm", "before clipping"),),
        "Of all trainable parameters, over all ranks.",
        log=True,
    ),
    Chart(
        "Learning rate",
        "Rate",
        (("train/lr", "of the stage"), *((f"rate/{group}", group) for group in (*GROUPS, "b_scale"))),
        "Per group; b_noise's is relative to its start.",
        log=True,
    ),
    Chart("λ", "λ", (("train/reg_weight", "reg_weight"),), "Weight of the numbers' loss."),
    Chart(
        "Tokens per second", "Tokens/s", (("perf/tokens_per_s", "all ranks"),), "Without evaluations and checkpoints."
    ),
    Chart(
        "Seconds per step",
        "Seconds",
        (("perf/step_s", "whole step"), ("perf/data_wait_s", "waiting for data")),
        log=True,
    ),
    Chart(
        "Model FLOP/s used",
        "Share of the peak",
        (("perf/mfu", "of the peak"),),
        "Useful products of one rank over its device's peak.",
        percent=True,
    ),
    Chart(
        "Peak memory, GiB",
        "GiB",
        (("perf/peak_memory_gib", "rank 0"),),
        "Of the allocator on a GPU, of the process on a CPU.",
    ),
)


def watched_names(metrics: Iterable[str]) -> list[str]:
    """The names of `data.watch` among the metrics of a run."""
    return sorted({name.split("/")[1] for name in metrics if name.startswith("watch/")})


def sections(metrics: Collection[str]) -> list[tuple[str, str, tuple[Chart, ...]]]:
    """(key, title, charts) for runs with these metrics."""
    watched = tuple(
        Chart(
            f"Kept: {name}",
            "Share of tokens",
            ((f"watch/{name}/accuracy", "right"), (f"watch/{name}/base_accuracy", "base model")),
            "Words right in texts that are not trained on. A falling curve means forgetting.",
            percent=True,
        )
        for name in watched_names(metrics)
    )
    return [
        ("words", "Words", (*LEARNING, *watched)),
        ("numbers", "Numbers", NUMBERS),
        ("individual", "The individual U", INDIVIDUAL),
        ("machine", "Optimizer and machine", OPTIMIZER),
    ]


# (label, metric, format, whether a larger value is better; None: neither)
GLANCE: tuple[tuple[str, str, str, bool | None], ...] = (
    ("Words right", "eval/accuracy", "percent", True),
    ("… the base model's", "eval/base_accuracy", "percent", None),
    ("Perplexity (softmax of loc_S)", "eval/perplexity", "number", False),
    ("… the base model's", "eval/base_perplexity", "number", None),
    ("<NUM> F1", "eval/num_f1", "percent", True),
    ("Median absolute error", "eval/reg_mdae", "number", False),
    ("… always the median's", "eval/baseline_mdae", "number", None),
    ("… ridge regression's", RIDGE, "number", None),
    ("Mean absolute error", "eval/reg_mae", "number", False),
    ("CRPS", "eval/crps", "number", False),
    ("90 % interval holds, raw", "eval/coverage_90", "percent", None),
    ("90 % interval holds, recalibrated", "eval/coverage_90_conformal", "percent", None),
    ("Width of it, recalibrated", "eval/width_90_conformal", "number", False),
    ("ΣP, median", SUM, "number", None),
    ("KL from the start", "train/kl", "number", None),
    ("Tokens per second", "perf/tokens_per_s", "number", True),
    ("Peak memory, GiB", "perf/peak_memory_gib", "number", False),
)

# (label, metric, format, metrics to compare with and their labels)
TILES: tuple[tuple[str, str, str, Series], ...] = (
    ("Words right", "eval/accuracy", "percent", (("eval/base_accuracy", "base model"),)),
    ("Perplexity, P / ΣP", "eval/perplexity_ovr", "number", (("eval/base_perplexity", "base model"),)),
    ("F1, number or word", "eval/num_f1", "percent", ()),
    (
        "Median absolute error",
        "eval/reg_mdae",
        "number",
        (("eval/baseline_mdae", "always the median"), (RIDGE, "ridge")),
    ),
    ("In recalibrated 90 % intervals", "eval/coverage_90_conformal", "percent", (("eval/coverage_90", "raw"),)),
    ("Sum of all P", SUM, "number", ((SUM_OF_ONE, "one individual"),)),
    ("KL from the start, nats", "train/kl", "number", ()),
    ("Tokens per second", "perf/tokens_per_s", "number", ()),
)
