"""Config sections for the base model: which model, how it becomes causal, how it is pretrained."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cqwen_dist.config.architectures import LINEARS, architecture
from cqwen_dist.config.custom import import_path
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Count, Positive, Section, refused
from cqwen_dist.config.training import LoraConfig
from cqwen_dist.config.yaml_text import leaves

Columns = Annotated[int, Field(ge=0, multiple_of=4, strict=True)]
Some = Annotated[Columns, Field(gt=0)]
Own = Annotated[str, AfterValidator(import_path)]
TRAIN_TOKENIZER = "train"  # model.tokenizer: build one from the data


class PretrainConfig(Section):
    """Short cross-entropy pretraining of a base built from `architecture`. This is not a stage."""

    steps: Positive = 400
    """Optimizer steps of next-token cross-entropy, each on 32 sequences."""


class ModelConfig(Section):
    """The base model, and how it becomes causal."""

    name_or_path: str | None = None
    """Folder or hub name of the base (docs/bases.md lists supported ones). Omit it if `architecture` describes a model
    to build."""
    architecture: dict[str, Any] | None = None
    """A transformers config (model_type, hidden_size, ...) for a base with random weights."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; default: the base's; `train`: train one on the data."""
    pretrain: PretrainConfig | None = None
    """Pretrain a base built from `architecture`; null: no pretraining."""
    num_token_id: Count | None = None
    """Row of <NUM>; default: len(tokenizer), the first reserved row."""
    causal_size: Positive | None = None
    """C, the size of U's word part; default: the hidden size H (seed S0). If it is below H, the word head is the best
    approximation of that rank, and the run's base metrics belong to that head (`cqwen eval` measures the base
    model)."""
    wide: Columns | tuple[Some, Count] | tuple[Some, Count, Count] = 0
    """Columns of the wide part's tables; 0: no wide part. It adds a linear function of the words and numbers so far to
    a number's location and log scale. The calibrated start fits it in closed form to the training and held-out texts;
    evaluation reads each held-out text by a fit without it (docs/tables.md). A list [columns, R] also has R random
    Fourier features of the numbers so far, each identified by the words before it on its line, which affect the next
    number jointly and smoothly. [262144, 6144] suits tables with some thousand rows. A third entry, such as 4, also has
    the base's states at that many depths and their means over the text, which help with free text."""
    candidates: Literal["none", "arithmetic"] | None = None
    """Exact values that a number may have, each with a one-vs-rest probability. arithmetic: the last 24 numbers of the
    text, the value of the expression just written, operations on the last two numbers, and the commonest numbers of the
    data. The likeliest is written if its P exceeds a bar that held-out numbers set, so where candidates help no number
    none is written. Default: arithmetic with start: calibrated, a named base and no target_field, else none."""
    abduction: Literal["linear"] | Own = "linear"
    """Network from features to U; or your class as package.module:Name (docs/training.md)."""
    number_head: Literal["cauchy", "laplace", "student", "auto"] | Own | None = None
    """The law of a number's value; or your class as package.module:Name (docs/training.md). student: a t, whose degrees
    of freedom are fitted. auto: the law of least CRPS on numbers left out of the calibrated start, which all but cauchy
    need. Default: cauchy, or the law of a warm start."""
    start_numbers: Count | None = None
    """About how many numbers the calibrated start is fitted to; default: 2,000, with candidates 5,000, at most those in
    65,536 tokens. Too few are worse than none: rows of W_loc fitted to 60 numbers turn every later change of z into a
    large change of the number (docs/measurements.md)."""
    gradient_checkpointing: bool = False
    """Recompute the backbone's activations in the backward pass: less memory, more time."""
    compile_layers: bool = False
    """Compile the backbone's layers with torch.compile. Takes a minute at the start; then training is faster and needs
    less GPU memory, especially with small micro-batches."""
    attention: Literal["mask", "varlen"] | None = None
    """How packed texts are separated (data.pack). mask: a [T, T] mask per row. varlen: a variable-length kernel on a
    GPU (bf16; at 1,024 tokens slower than the mask), text by text elsewhere. Both are equal up to rounding. Default:
    varlen with parallel.sequence_group_size above 1, else mask."""
    trust_remote_code: bool = False
    """Allow transformers to run code from the model's folder."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Keep the frozen backbone's linear maps in 8 or 4 bits (QLoRA); needs bitsandbytes. Adapters, token table and
    heads are not rounded. Exports use the full base (docs/training.md)."""
    lora: LoraConfig = LoraConfig()
    """Adapters for stages that train `lora`."""
    warm_start: str | None = None
    """Initialise weights from this folder: another run, a checkpoint, or an adapter saved by PEFT. Optimizers and
    stages start fresh."""

    @property
    def own_head(self) -> str | None:
        """The import path of a number head class."""
        return self.number_head if ":" in (self.number_head or "") else None

    @property
    def wide_size(self) -> tuple[int, int, int]:
        """The wide part's columns, random features and depths of the base; (0, 0, 0) without it."""
        columns, features, depths = (*((self.wide,) if isinstance(self.wide, int) else self.wide), 0, 0)[:3]
        return columns, features, depths

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if (self.name_or_path is None) == (self.architecture is None):
            found = Said("neither" if self.architecture is None else "both")
            raise refused("name_or_path/architecture", found, "exactly one of the two (set the other to null)")
        if self.pretrain is not None and self.architecture is None:
            raise refused("pretrain", Said("needs model.architecture, because only random weights are pretrained"))
        if self.architecture is not None:
            try:
                architecture(self.architecture.get("model_type"), "architecture.model_type")
            except UserError as error:
                raise refused(error.key, error.found, error.allowed) from None
        targets = self.lora.target_modules
        for name in [] if targets == "all-linear" else targets:
            if name not in LINEARS:
                raise refused("lora.target_modules", name, f"names out of {', '.join(LINEARS)}, or all-linear")
        return self

    @field_validator("architecture")
    @classmethod
    def _finite(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key, item in leaves(value or {}, lists=True):
            if isinstance(item, float) and not math.isfinite(item):
                raise refused(key, item, "a finite number")
        return value
