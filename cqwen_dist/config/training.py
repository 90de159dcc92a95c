"""Config sections for training: ranks, adapters, losses, the constraint, stages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cqwen_dist.config.architectures.base_architecture import USUAL_TARGETS
from cqwen_dist.config.custom import import_path
from cqwen_dist.config.errors import Said, UserError, refuse_ranks
from cqwen_dist.config.fields import Above0, Count, NonNegative, Positive, Section, Share, no_bool, refused, unless
from cqwen_dist.config.trainable import GROUPS, HEADS, OF_WORDS

if TYPE_CHECKING:
    Group = str
else:
    Group = Literal[GROUPS]
# A mapping key. JSON keys are text, so digits as text are accepted.
WordId = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]
# Metrics with these endings are better when higher, the remaining ones when lower.
_RISING = ("accuracy", "precision", "recall", "f1")


def rises(metric: str) -> bool:
    """Whether a higher metric is better, by its name."""
    return metric.endswith(_RISING)


# Prefixes of evaluation metrics: held-out texts, data.watch texts.
JUDGED = ("eval/", "watch/")

NO_STAGE_0 = "1 takes the same steps with less memory; in stage 0 the heads' gradients cannot enter DeepSpeed's norm"


class RunConfig(Section):
    """Run folder, name, and loggers."""

    dir: str = Field("runs/default", min_length=1)
    """Run folder. The same command resumes the run in it."""
    name: str | None = None
    """Name in W&B; default: the folder's name."""
    resume: Literal["auto", "last-good", "never", "restart"] = "auto"
    """If the folder has a checkpoint: auto resumes and rejects a damaged one; last-good replaces a damaged one with the
    previous one; never rejects resuming; restart archives the folder and starts again."""
    accept: list[Literal["data", "eval", "tokenizer", "base"]] = Field([])
    """Inputs that may differ from the checkpoint's (texts, held-out texts, tokenizer, base); others are refused."""
    stop_after: str | None = None
    """Stage after which this command ends successfully and the run pauses. A command without this key, or with a later
    stage, resumes the run, so jobs with different resources can share it."""
    mirror: str | None = None
    """URL of an object store (s3://BUCKET/RUN, gs://, ...) that gets each checkpoint; a start on an empty disk resumes
    from it."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases logging mode. Project, team, group, tags and notes: W&B's own variables (docs/wandb.md)."""
    tensorboard: bool = False
    """Also write metrics as TensorBoard events into DIR/tensorboard."""


class ParallelConfig(Section):
    """How the run is distributed over ranks."""

    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(no_bool), unless({0: f"1, 2 or 3 ({NO_STAGE_0})"})] = 1
    """DeepSpeed ZeRO stage for everything except the heads."""
    vocab_group_size: Positive = 1
    """Number of ranks that share the vocabulary's rows; 1: every rank has all rows."""
    sequence_group_size: Positive = 1
    """Number of ranks that share the positions of each text, for texts too long for one rank; 1: every rank has whole
    texts."""
    offload: Literal["none", "optimizer"] = "none"
    """What is kept in host memory. optimizer: optimizer states, also the heads', which step there."""

    def refuse_ranks(self, world: int) -> None:
        """Raises `UserError` if a group's size does not divide the number of ranks."""
        refuse_ranks(world, self.vocab_group_size, self.sequence_group_size)

    def fit_heads(self, architecture: Mapping[str, Any]) -> None:
        """Raises `UserError` for a sequence group that cannot share a base's attention. architecture: its config."""
        key, size = "parallel.sequence_group_size", self.sequence_group_size
        if size == 1 or (heads := architecture.get("num_attention_heads")) is None:
            return
        plain = {"full_attention", "sliding_attention"}
        if other := sorted(set(architecture.get("layer_types") or ()) - plain):
            raise UserError(key, size, f"1: the base has layers of {other[0]}, which read positions in order")
        if heads % size:
            raise UserError(key, size, f"a divisor of the base's {heads} attention heads")
        kv_heads = architecture.get("num_key_value_heads") or heads
        if kv_heads % size and size % kv_heads:
            raise UserError(key, size, f"a divisor or a multiple of the base's {kv_heads} key-value heads")


class LoraConfig(Section):
    """PEFT adapters in the backbone. Present from the start, trained in stages with `lora`."""

    r: Positive = 8
    """Rank of the adapters."""
    alpha: Positive = 16
    """Scaling numerator: adapters are scaled by alpha / r."""
    dropout: Share = 0.0
    """Dropout before the adapters."""
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = Field(list(USUAL_TARGETS))
    """Linear layers that get an adapter, or all-linear. The default means the base's layers in attention, linear
    attention, MLP and shared experts."""
    dora: bool = False
    """Learn each weight's magnitude separately from its direction (DoRA)."""


class ConstraintConfig(Section):
    """KL(U || U at the start) against forgetting (seed S3 2.3): mean over dimensions and tokens, in nats."""

    # YAML 1.1 reads a bare off as false
    mode: Annotated[
        Literal["off", "monitor", "dual"] | None,
        BeforeValidator(lambda value: "off" if value is False else value),
    ] = None
    """off; monitor: report every 10 steps; dual: a multiplier, updated every step, keeps the mean at or below eps.
    Default: dual if calibrated from a pretrained base, else monitor."""
    eps: Above0 = 0.1
    """Bound on KL, in nats per dimension."""


class LossConfig(Section):
    """L = L_cls + reg_weight * L_reg (seed S0 5.3). Each term is divided by its global count."""

    gate: Literal["alpha", "soft", "hard"] | Annotated[str, AfterValidator(import_path)] = "alpha"
    """Gate of a number's loss (seeds S0 5.2, S4 4.7.3, 4.2.4): P(<NUM>) by default. Or your class as
    package.module:Name (docs/training.md)."""
    reg_weight: NonNegative = 1.0
    """lambda, the weight of the regression loss."""
    class_weights: dict[WordId, NonNegative] | Literal["frequency"] | None = None
    """Weights by word id (others have weight 1); or frequency: count^-0.5, with mean 1 over the training words,
    between 0.1 and 10."""
    target_transform: Literal["standardise", "none", "signed_log", "standardise_log"] | None = None
    """Unit of the regression: standardise by median and IQR/2, none (raw), signed_log, or standardise_log (logarithms
    by median and IQR/2, for numbers of many magnitudes). Default: standardise if calibrated, none in the seed
    presets."""
    slope_limit: NonNegative | None = None
    """Limit for the gradient of a word's loss with respect to loc_S, in 1/nat; 0: no limit; default: 1 if start is
    calibrated, 0 in the seed presets."""
    words: Literal["ovr+softmax", "ovr", "none"] | None = None
    """What words learn. ovr: one-vs-rest. ovr+softmax: also three times -log softmax(loc_S) of each word, from which C
    and the scales do not learn. none: nothing; the run learns numbers only, with a gate of 1, and its model answers
    with a number (docs/regression.md). Default: ovr+softmax if start is calibrated from a named base, else ovr
    (docs/decisions.md, D-softmax)."""
    constraint: ConstraintConfig = ConstraintConfig()
    """Limit on how far U moves from its start."""

    def terms(self, calibrated: bool, named: bool) -> dict[str, float]:
        """The fields of `ops.ovr.head.TermOptions`.

        calibrated: whether the start is; named: whether the base is a named one. They decide the defaults.
        """
        words = self.words or ("ovr+softmax" if calibrated and named else "ovr")
        slope = float(calibrated) if self.slope_limit is None else self.slope_limit
        return {"slope_limit": slope, "softmax_weight": 3.0 * (words == "ovr+softmax")}

    @model_validator(mode="after")
    def _consistent(self) -> "LossConfig":
        if self.words == "none" and self.class_weights is not None:
            raise refused("class_weights", self.class_weights, "null with words none")
        return self


class Ramp(Section):
    """A weight that changes linearly during a stage (seed S4 4.5.3: small at first, larger later)."""

    start: NonNegative
    """Value at the stage's first step."""
    end: NonNegative
    """Final value."""
    steps: Positive | None = None
    """Length of the ramp in steps; default: the stage's length."""


class Until(Section):
    """Ends a stage when a held-out metric stops improving."""

    max_steps: Positive
    """Maximum steps of the stage; the learning rate decays over them."""
    metric: str = "eval/cls_loss_mean"
    """Evaluation metric to watch: eval/..., watch/... Higher is better for accuracy, precision, recall, f1; lower for
    all others."""
    patience: Positive = 3
    """Consecutive evaluations without improvement before the stage ends."""

    @model_validator(mode="after")
    def _held_out(self) -> "Until":
        if not self.metric.startswith(JUDGED):
            raise refused("metric", self.metric, "a metric of an evaluation, such as eval/cls_loss_mean")
        return self


class Stage(Section):
    """A stage: trained groups, length, learning rates."""

    name: str = Field(min_length=1)
    """Name in metrics and on the console."""
    train: list[Group | Literal["heads"]] = Field(
        min_length=1, description=f"Groups that train: {', '.join(GROUPS)}; heads stands for {', '.join(HEADS)}."
    )
    steps: Positive | None = None
    """Optimizer steps; alternatively set epochs or until."""
    epochs: Above0 | None = None
    """Passes over the data; alternatively set steps or until."""
    until: Until | None = None
    """Train until an evaluation metric stops improving; alternatively set steps or epochs."""
    lr: Above0 = 2e-5
    """Peak learning rate for groups not listed in lr_groups; 0.012 / H suits W_loc, a dense map."""
    lr_groups: dict[Group | Literal["scales"], Above0] = Field({})
    """Peak learning rates by group; scales ({b_scale, b_noise, C}) defaults to 1e-2. High rates for classifier and
    thresholds, which have parameters per word, forget words that are missing from the data."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Decay after warm-up, to a tenth of the peak rate."""
    warmup_steps: Count = 0
    """Linear warm-up steps."""
    reg_weight: NonNegative | Ramp | None = None
    """lambda in this stage: a number or {start, end}; default: loss.reg_weight."""
    sequence_length: Positive | None = None
    """Maximum sequence length in this stage; default: data.sequence_length."""
    global_batch_size: Positive | None = None
    """Sequences per optimizer step in this stage; default: train.global_batch_size."""
    micro_batch_size: Positive | None = None
    """Sequences per rank and forward pass in this stage; default: train.micro_batch_size."""

    @model_validator(mode="after")
    def _length(self) -> "Stage":
        given = [key for key in ("steps", "epochs", "until") if getattr(self, key) is not None]
        if len(given) != 1:
            found = Said("both " * (len(given) == 2) + " and ".join(given) if given else "neither steps nor epochs")
            raise refused("steps", found, "exactly one of steps, epochs and until (set the others to null)")
        return self

    @property
    def groups(self) -> frozenset[str]:
        """Trained groups, with `heads` expanded."""
        return frozenset(g for name in self.train for g in (HEADS if name == "heads" else (name,)))

    def without_words(self, key: str) -> "Stage":
        """The stage without the groups that only words train, for which `heads` may stand. Raises as validators do."""
        if named := OF_WORDS.intersection(self.train):
            raise refused(key, min(named), "other groups with loss.words none: no word is learnt")
        return self.model_copy(update={"train": sorted(self.groups - OF_WORDS)})
