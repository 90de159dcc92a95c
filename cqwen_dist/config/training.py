"""The config's sections about learning: adapters, losses, the constraint, stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cqwen_dist.config.architectures import LINEARS
from cqwen_dist.config.custom import import_path
from cqwen_dist.config.errors import Said
from cqwen_dist.config.fields import Above0, Count, NonNegative, Positive, Section, Share, Unit, WordId, refused

Group = Literal["embedding", "abduction", "classifier", "noise", "regression", "thresholds", "lora"]
GROUPS: tuple[str, ...] = get_args(Group)
# `heads` in a stage's `train` stands for these five.
HEADS: tuple[str, ...] = ("abduction", "classifier", "noise", "regression", "thresholds")
# A metric whose name ends so is better when higher; any other when lower.
_RISING = ("accuracy", "precision", "recall", "f1")


def _off(value: object) -> object:
    """YAML 1.1 reads a bare off as false."""
    return "off" if value is False else value


def rises(metric: str) -> bool:
    """Whether a higher value of a metric is better, by its name."""
    return metric.endswith(_RISING)


# How the names of an evaluation's metrics begin: on held-out texts, on the texts of data.watch.
JUDGED = ("eval/", "watch/")


class LoraConfig(Section):
    """PEFT's adapters on the backbone; injected from the start, trainable in the stages that train `lora`."""

    r: Positive = 8
    """Rank of the adapters."""
    alpha: Positive = 16
    """Scaling numerator: adapters are scaled by alpha / r."""
    dropout: Share = 0.0
    """Dropout before the adapters."""
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = Field(list(LINEARS))
    """Linear maps of every layer that get an adapter, or all-linear."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead (rank-stabilised LoRA)."""
    dora: bool = False
    """Learn the magnitude of each weight apart from its direction (DoRA)."""
    lr_ratio: Above0 = 1.0
    """LoRA+: the rate of the B matrices as a multiple of A's."""


class ConstraintConfig(Section):
    """KL(U || U at the start) against forgetting (seed S3 2.3): a mean over dimensions and tokens, in nats."""

    mode: Annotated[Literal["off", "monitor", "hinge", "dual"], BeforeValidator(_off)] = "monitor"
    """off; monitor: report; hinge: add beta times each token's excess over eps; dual: a multiplier, adapted at every
    step, holds the mean at or below eps."""
    eps: Above0 = 0.1
    """Bound on KL, in nats a dimension."""
    beta: Above0 = 10.0
    """Weight of the hinge; in dual, where the multiplier begins."""
    unit: Above0 | Literal["spread", "scale"] = "spread"
    """What a shift of U's location is measured in: spread, its deviation over tokens at the start by dimension; scale,
    the laws' own scales (the literal KL); or a number."""
    rate: Share = 0.1
    """dual: how fast the multiplier's logarithm moves, a step."""
    every: Positive = 10
    """monitor: steps between looks; once features have trained, one costs a second forward pass."""


class LossConfig(Section):
    """L = L_cls + reg_weight * L_reg (seed S0 5.3); each divided by its own global count."""

    alpha: Unit = 0.0
    """Gate floor: m (alpha + (1-alpha) P_NUM)."""
    gate: Literal["alpha", "soft", "hard"] | Annotated[str, AfterValidator(import_path)] = "alpha"
    """Gate formula (seeds S0 5.2, S4 4.7.3, 4.2.4), or a class of your own as package.module:Name
    (docs/training.md)."""
    gate_grad: Literal["stop", "full"] = "stop"
    """Whether the gate passes gradients to P_NUM."""
    reg_weight: NonNegative = 1.0
    """lambda, the weight of the regression loss."""
    value_weights: list[NonNegative] | None = None
    """w_i of the number's own NLL and of each of data.more_values' (S4 4.7.1); default: 1 each."""
    class_weights: dict[WordId, NonNegative] | Literal["frequency"] | None = None
    """Weights by word id, words not named weighing 1; or frequency: count^-power, 1 on average over the training data's
    words, within a factor of class_weight_limit."""
    class_weight_power: Unit = 0.5
    """Exponent of class_weights: frequency; 0 weighs all alike."""
    class_weight_limit: Annotated[float, Field(ge=1, strict=True)] = 10.0
    """class_weights: frequency: no word weighs more than this, or less than its inverse."""
    target_transform: Literal["standardise", "none", "signed_log", "standardise_log"] | None = None
    """Unit of the regression: by median and IQR/2, raw, logarithms, or logarithms by their median and IQR/2 (numbers of
    many sizes); default: standardise when calibrated, none in the seed presets."""
    cls_denominator: Literal["valid", "attention"] = "valid"
    """What L_cls is divided by."""
    vocab_reduction: Literal["sum", "mean"] = "sum"
    """Reduction of the word terms; mean divides L_cls by their number V (or the used ones): reg_weight weighs V times
    more against it (reg_weight / V keeps what it is under sum), and for V in the ten thousands W_cls's gradients fall
    below AdamW's eps of 1e-8."""
    negatives: Literal["full", "used", "sampled"] = "full"
    """All V_full rows, or only the used ones and <NUM>; sampled: a random part of all rows at each training step, an
    unbiased estimate of the loss and gradients of full (evaluations take them all)."""
    negatives_share: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """negatives: sampled: the part of the rows that a step computes; default: 0.25."""
    slope_limit: NonNegative | None = None
    """Cut of the gradient of a word's loss with respect to its loc_S, 1/nat; 0: none; default: 1 when start is
    calibrated, 0 in the seed presets."""
    impl: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """OvR implementation; auto: triton on CUDA, else chunked."""
    constraint: ConstraintConfig = ConstraintConfig()
    """The bound on how far U may move from where it began."""

    @model_validator(mode="after")
    def _share_of_sampled(self) -> LossConfig:
        if self.negatives != "sampled" and self.negatives_share is not None:
            raise refused("negatives_share", self.negatives_share, f"none with negatives: {self.negatives} (sampled)")
        return self

    @property
    def sampled_share(self) -> float | None:
        """`negatives_share`, resolved; None where every step computes all its rows."""
        return None if self.negatives != "sampled" else self.negatives_share or 0.25


class Ramp(Section):
    """A weight that moves over a stage's steps (seed S4 4.5.3: small at first, larger later)."""

    start: NonNegative
    """At the stage's first step."""
    end: NonNegative
    """Where it arrives and stays."""
    steps: Positive | None = None
    """Steps it takes; default: the whole stage."""
    shape: Literal["linear", "cosine"] = "linear"
    """How it moves."""


class Until(Section):
    """The end of a stage: when a held-out metric stops improving."""

    max_steps: Positive
    """Where the stage ends at the latest; the learning rate decays over it."""
    metric: str = "eval/cls_loss_mean"
    """The metric of an evaluation to look at: eval/..., watch/..."""
    better: Literal["lower", "higher"] | None = None
    """Which way is better; default: higher for accuracy, precision, recall, f1, else lower."""
    patience: Positive = 3
    """Evaluations in a row without improvement that end the stage."""
    min_delta: NonNegative = 0.0
    """A smaller change is no improvement."""

    @model_validator(mode="after")
    def _held_out(self) -> Until:
        if not self.metric.startswith(JUDGED):
            raise refused("metric", self.metric, "a metric of an evaluation, such as eval/cls_loss_mean")
        return self

    @property
    def higher_is_better(self) -> bool:
        """`better`, or by the metric's name."""
        return rises(self.metric) if self.better is None else self.better == "higher"


class Stage(Section):
    """One stage: what trains, for how long, how fast."""

    name: str = Field(min_length=1)
    """Shown in metrics and on the console."""
    train: list[Group | Literal["heads"]] = Field(
        min_length=1,
        description=f"Groups that train: {', '.join(GROUPS)}; heads stands for {', '.join(HEADS)}.",
    )
    steps: Positive | None = None
    """Optimizer steps; or give epochs, or until."""
    epochs: Above0 | None = None
    """Passes over the data; or give steps, or until."""
    until: Until | None = None
    """Until evaluation no longer improves; or give steps, or epochs."""
    lr: Above0 = 2e-5
    """Peak learning rate of every group not named below; 0.012 / H suits W_loc, a dense map."""
    lr_groups: dict[Group | Literal["scales"], Above0] = Field({})
    """Peak learning rates by group; scales ({b_scale, b_noise, C}) defaults to 1e-2. High ones of classifier and
    thresholds, what each word has of its own, forget words that the data does not have."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Decay after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    min_lr_ratio: Unit = 0.1
    """Where the decay ends, as a share of lr."""
    reg_weight: NonNegative | Ramp | None = None
    """lambda in this stage, a number or {start, end}; default: loss.reg_weight."""
    sequence_length: Positive | None = None
    """Longest sequence in this stage; default: data.sequence_length."""
    global_batch_size: Positive | None = None
    """Sequences per optimizer step in this stage; default: train.global_batch_size."""
    micro_batch_size: Positive | None = None
    """Sequences per rank and forward in this stage; default: train.micro_batch_size."""

    @model_validator(mode="before")
    @classmethod
    def _unmerged(cls, given: Any) -> Any:
        """`merge` is no key: refuse it with the reason."""
        if isinstance(given, dict) and given.get("merge"):
            allowed = (
                "no merging between stages: KL and forgetting are measured with the adapters off, and a merged "
                "backbone would be rounded to train.precision and saved whole (afterwards: cqwen export --merge)"
            )
            raise refused("merge", given["merge"], allowed)
        return given

    @model_validator(mode="after")
    def _length(self) -> Stage:
        given = [key for key in ("steps", "epochs", "until") if getattr(self, key) is not None]
        if len(given) != 1:
            found = Said("both " * (len(given) == 2) + " and ".join(given) if given else "neither steps nor epochs")
            raise refused("steps", found, "exactly one of steps, epochs and until (set the others to null)")
        return self

    @property
    def groups(self) -> frozenset[str]:
        """The groups that train, `heads` spelled out."""
        return frozenset(g for name in self.train for g in (HEADS if name == "heads" else (name,)))
