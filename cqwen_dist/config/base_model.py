"""The config's sections about the base model: which one, how it is turned causal, how it is pretrained."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cqwen_dist.config.architectures import LINEARS, architecture
from cqwen_dist.config.custom import import_path
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Above0, Count, NonNegative, Positive, Real, Section, refused
from cqwen_dist.config.training import LoraConfig

TRAIN_TOKENIZER = "train"  # model.tokenizer: build one from the data


class PretrainConfig(Section):
    """A short cross-entropy pretraining of a base model that was built from `architecture`; no stage."""

    steps: Positive = 400
    """Optimizer steps of next-token cross-entropy."""
    lr: Above0 = 3e-3
    """Peak learning rate (cosine to zero)."""
    batch_size: Positive = 32
    """Sequences per step."""


class ModelConfig(Section):
    """The base model and how it is turned causal."""

    name_or_path: str | None = None
    """A base's folder or hub name (docs/bases.md says which); omit when `architecture` describes a model to build."""
    architecture: dict[str, Any] | None = None
    """A transformers config (model_type, hidden_size, ...): built with random weights."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; default: the model's own; `train`: one built from the data."""
    pretrain: PretrainConfig | None = None
    """Pretrain a built base model first; null: do not."""
    num_token_id: Count | None = None
    """Row used for <NUM>; default: len(tokenizer), the first reserved row."""
    causal_size: Positive | None = None
    """C, the size of U's word part; default: the hidden size H (seed S0). Below H the words' head is the nearest of
    that rank, and base metrics of the run are those of that head (`cqwen eval` measures the base itself)."""
    number_dims: Count | None = None
    """Dimensions added to U for numbers alone; default: 8 when start is calibrated, else 0."""
    wide: Count = Field(0, multiple_of=4)
    """Columns of the wide part's tables, 0: none. With it the number's location and the logarithm of its scale have a
    linear part in the words and numbers so far, fitted in closed forms by the calibrated start (docs/tables.md); 262144
    suits tables of some thousand rows."""
    wide_from_eval: bool = False
    """Whether the wide part is also fitted to data.eval. A text of it is then read in evaluations as a training text
    is, by the fit that left it out, so metrics and recalibrated intervals stay honest."""
    copies: Annotated[int, Field(ge=0, le=64)] = 0
    """K: a number may be a copy of one of the last K numbers of its text. Each has a probability of its own, one
    against the rest. The likeliest is written as it stands, if above 1/2. 8 suits worked solutions; 0: none."""
    random_features: Count = 0
    """Random Fourier features of the wide part: the numbers so far, known by the words before them in their line, act
    on the next one together and in any smooth way; 6144 suits tables. It needs model.wide."""
    abduction: Literal["linear", "two_layer"] | Annotated[str, AfterValidator(import_path)] = "linear"
    """The network from features to U; two_layer is nonlinear and starts as the linear one; or a class of your own as
    package.module:Name (docs/training.md)."""
    number_head: Annotated[str, AfterValidator(import_path)] | None = None
    """A class of your own that says what a number is, as package.module:Name (docs/training.md); null: the one that
    data.number_types and data.more_values ask for, or one value a number."""
    threshold_init: Real | str | None = None
    """Start of C: a number for every word, or a .safetensors file that holds `threshold` [V]; default: by `start`."""
    gamma_init: Above0 | None = None
    """Start of U's total scale for words, noise included; default: by `start`."""
    level_logits: bool = True
    """Let calibration subtract one vector from every row of W_cls, which changes no softmax, so that P ranks words as
    the base does; false: W_cls stays the base's head to the bit."""
    reg_gain: Above0 = 1.0
    """Gain of W_reg's Xavier start (seed S1 5: 0.1 for layers without heritage)."""
    scale_activation: Literal["softplus", "exp"] = "softplus"
    """What keeps scale_U positive (softplus: seeds S0, S3; exp: S1)."""
    w_num_scale: NonNegative | None = None
    """Factor on the start of w_num; 0: no value is read at first; default: when calibrated 0.2, or where <NUM> inherits
    from digits 0.08 of their rows' norm; 1 in the seed presets (some five points)."""
    value_periods: list[Above0] = Field([])
    """Periods whose sines and cosines of a value enter the embedding too, each by a row of w_num; [10, 100, 1000] tells
    three digits apart. Default: none, as in the seeds."""
    b_noise_init: NonNegative | None = None
    """Start of |b_noise|; default: half of the calibrated scale or of gamma_init, or 0.1 in the seed presets."""
    num_row_init: Literal["digits", "inherit", "mean", "small"] | None = None
    """Start of <NUM>'s rows. digits: at the input the mean of the digits' rows, at the output a row fitted to where the
    base would write a numeral; inherit, mean, small: the output's is the reserved row, the mean row, or a small random
    one. Default: digits when start is calibrated and the base never saw <NUM>, else inherit."""
    num_bias_init: Real = 0.0
    """Start of <NUM>'s class bias."""
    start_numbers: Count = 0
    """About how many numbers the calibrated start of the regression is fitted to; default: those of 4,096 tokens, which
    are few in a table with long rows."""
    gradient_checkpointing: bool = False
    """Recompute the backbone's activations in backward."""
    compile_layers: bool = False
    """The backbone's layers by torch.compile: a minute more at the start, then faster and smaller on a GPU, most so
    where a micro-batch is small."""
    attention: Literal["mask", "varlen"] = "mask"
    """What keeps packed texts apart (data.pack). mask: a mask [T, T] for each row. varlen: each text attends to itself
    alone, by a variable-length kernel on a GPU (bf16; not yet measured there), text by text elsewhere; equal up to
    rounding."""
    trust_remote_code: bool = False
    """Let transformers run code from the model's folder."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: the frozen backbone in 4 bits by bitsandbytes (a GPU only; not yet measured on one)."""
    lora: LoraConfig = LoraConfig()
    """Adapters of the stages that train `lora`."""
    warm_start: str | None = None
    """Begin with the weights of another run, checkpoint, or adapter folder that PEFT saved: the folder; optimizers and
    stages begin anew."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.name_or_path is None) == (self.architecture is None):
            found = Said("neither" if self.architecture is None else "both")
            raise refused("name_or_path/architecture", found, "exactly one of the two (set the other to null)")
        if self.pretrain is not None and self.architecture is None:
            raise refused("pretrain", Said("it with name_or_path"), "only with architecture, on random weights")
        if self.architecture is not None:
            try:
                architecture(self.architecture.get("model_type"), "architecture.model_type")
            except UserError as error:
                raise refused(error.key, error.found, error.allowed) from None
        total, noise = self.gamma_init, self.b_noise_init
        if total is not None and noise is not None and noise > total / 2:
            raise refused("b_noise_init", noise, f"at most {total / 2:g}, half of model.gamma_init (the total scale)")
        targets = self.lora.target_modules
        for name in [] if targets == "all-linear" else targets:
            if name not in LINEARS:
                raise refused("lora.target_modules", name, f"names out of {', '.join(LINEARS)}, or all-linear")
        return self

    @model_validator(mode="after")
    def _layers_fit(self) -> ModelConfig:
        if self.attention == "varlen" and self.compile_layers and self.gradient_checkpointing:
            allowed = "false with attention varlen and gradient_checkpointing (recomputed layers would not be compiled)"
            raise refused("compile_layers", True, allowed)
        return self

    @field_validator("threshold_init")
    @classmethod
    def _number_or_file(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str) and not value.endswith(".safetensors"):
            raise ValueError("a number, or a .safetensors file that holds `threshold` [V]")
        return value

    @field_validator("architecture")
    @classmethod
    def _finite(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        pairs = [] if value is None else list(value.items())
        while pairs:
            key, item = pairs.pop()
            if isinstance(item, dict):
                pairs += [(f"{key}.{name}", inner) for name, inner in item.items()]
            elif isinstance(item, list):
                pairs += [(f"{key}.{index}", inner) for index, inner in enumerate(item)]
            elif isinstance(item, float) and not math.isfinite(item):
                raise refused(key, item, "a finite number")
        return value
