"""The sections that say what is learnt: adapters, losses, the constraint, stages."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from cqwen_dist.config.errors import Said
from cqwen_dist.config.fields import (
    Above0,
    Count,
    NonNegative,
    Positive,
    Section,
    Share,
    Unit,
    WordId,
    refused,
)

Group = Literal["embedding", "abduction", "classifier", "noise", "regression", "thresholds", "lora"]
GROUPS: tuple[str, ...] = get_args(Group)
# `heads` in a stage's `train` stands for these five.
HEADS: tuple[str, ...] = ("abduction", "classifier", "noise", "regression", "thresholds")


class LoraConfig(Section):
    """PEFT's adapters on the backbone; injected from the start, awake in the stages that train `lora`."""

    r: Positive = Field(8, description="Rank of the adapters.")
    alpha: Positive = Field(16, description="Scaling numerator: adapters are scaled by alpha / r.")
    dropout: Share = Field(0.0, description="Dropout before the adapters.")
    target_modules: Annotated[list[str], Field(min_length=1)] | Literal["all-linear"] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="Module names that get an adapter, or all-linear.",
    )


class LossConfig(Section):
    """L = L_cls + reg_weight * L_reg (seed S0 5.3); each divided by its own global count."""

    alpha: Unit = Field(0.0, description="Gate floor: m (alpha + (1-alpha) P_NUM).")
    gate: Literal["alpha", "soft", "hard"] = Field("alpha", description="Gate formula (seeds S0 5.2, S4 4.7.3, 4.2.4).")
    gate_grad: Literal["stop", "full"] = Field("stop", description="Whether the gate passes gradients to P_NUM.")
    reg_weight: NonNegative = Field(1.0, description="lambda, the weight of the regression loss.")
    class_weights: dict[WordId, NonNegative] | None = Field(
        None, description="Weights by word id; words not named weigh 1."
    )
    target_transform: Literal["standardise", "none", "signed_log"] | None = Field(
        None, description="Unit of the regression; default: standardise when calibrated, none in the seed presets."
    )
    cls_denominator: Literal["valid", "attention"] = Field("valid", description="What L_cls is divided by.")
    vocab_reduction: Literal["sum", "mean"] = Field(
        "sum",
        description="Reduction of the word terms; mean divides L_cls by their number V (or the used ones): reg_weight "
        "weighs V times more against it (reg_weight / V keeps what it is under sum), and for V in the ten thousands "
        "W_cls's gradients fall below AdamW's eps of 1e-8.",
    )
    negatives: Literal["full", "used"] = Field("full", description="All V_full rows, or only the used ones and <NUM>.")
    impl: Literal["auto", "reference", "chunked", "triton"] = Field("auto", description="OvR implementation.")


class Stage(Section):
    """One stage: what trains, for how long, how fast."""

    name: str = Field(min_length=1, description="Shown in metrics and on the console.")
    train: list[Group | Literal["heads"]] = Field(
        min_length=1,
        description=f"Groups that train: {', '.join(GROUPS)}; heads stands for {', '.join(HEADS)}.",
    )
    steps: Positive | None = Field(None, description="Optimizer steps; or give epochs.")
    epochs: Above0 | None = Field(None, description="Passes over the data; or give steps.")
    lr: Above0 = Field(3e-4, description="Peak learning rate of every group not named below.")
    lr_groups: dict[Group | Literal["scales"], Above0] = Field(
        {}, description="Peak learning rates by group; scales ({b_scale, b_noise, C}) defaults to 1e-2."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    warmup_steps: Count = Field(0, description="Steps of linear warm-up.")
    min_lr_ratio: Unit = Field(0.1, description="Where the decay ends, as a share of lr.")
    reg_weight: NonNegative | None = Field(None, description="lambda in this stage; default: loss.reg_weight.")

    @model_validator(mode="after")
    def _length(self) -> Stage:
        if (self.steps is None) == (self.epochs is None):
            found = Said("neither steps nor epochs" if self.steps is None else "both steps and epochs")
            raise refused("steps", found, "exactly one of steps and epochs (set the other to null)")
        return self

    @property
    def groups(self) -> frozenset[str]:
        """The awake groups, `heads` spelled out."""
        return frozenset(g for name in self.train for g in (HEADS if name == "heads" else (name,)))
