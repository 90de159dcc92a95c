"""The schema of a run: a key is a type, a default, and one sentence below it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cqwen_dist.config import yaml_text
from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.base_model import TRAIN_TOKENIZER, ModelConfig
from cqwen_dist.config.data import DataConfig
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Above0, Count, NonNegative, Positive, Section, Seed, Share, no_bool, refused
from cqwen_dist.config.training import LossConfig, Stage


class ParallelConfig(Section):
    """How the run is spread over ranks."""

    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(no_bool)] = 1
    """DeepSpeed ZeRO stage of everything but the heads."""
    vocab_group_size: Positive = 1
    """Ranks that share the vocabulary's rows; 1: every rank holds all."""
    offload: Literal["none", "optimizer"] = "none"
    """Keep optimizer states in host memory, the engine's and the heads', and step there."""
    backend: Literal["auto", "gloo"] = "auto"
    """auto: NCCL between GPUs, gloo between CPUs; gloo: by way of the host, slow, but ranks may share a GPU."""
    timeout_min: Above0 = 30.0
    """Minutes a rank waits for the others before the run fails."""


class FeatureCacheConfig(Section):
    """Stages in which nothing before z trains: z is computed once and stored; the epochs train the heads from it."""

    mode: Literal["auto", "never", "require"] = "auto"
    """auto: where it is valid and saves time, or is there already; require: refuse the run where it is not."""
    dir: str | None = Field(None, min_length=1)
    """Folder that keeps it for other runs; default: in the run's, for its stage."""
    max_gib: Above0 | None = None
    """Largest cache in GiB; default: what the disk has free."""


class TrainConfig(Section):
    """The optimizer step."""

    global_batch_size: Positive = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Positive = 8
    """Sequences per rank and forward; accumulation follows."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Backbone and GEMMs; the heads' weights stay fp32."""
    max_grad_norm: Above0 | Literal["usual"] | None = None
    """Clip of the joint gradient norm: a number (S4 1.5.3: 1), or usual, three times the median of this stage's last 64
    steps; default: usual when start is calibrated, 1 in the seed presets."""
    weight_decay: NonNegative = 0.0
    """AdamW decay of matrices; biases, C and b_noise are never decayed."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW betas."""
    seed: Seed = 0
    """Seed of the initialisation and of the order of samples."""
    max_refused_steps: Positive = 3
    """Steps in a row that may be refused, because their loss or gradient is not finite, before the run stops; fewer are
    skipped, and named in alarms.jsonl."""
    check_ranks_every: Count = 100
    """Steps between comparisons of what all ranks must hold equal (`training.replicas`), as every save makes them; 0:
    never."""
    checkpoint_every: Positive = 200
    """Optimizer steps between checkpoints (also at stage ends)."""
    checkpoint_start: bool = False
    """Also a checkpoint of the start, before any step: a run that is killed soon does not calibrate again."""
    eval_every: Positive = 200
    """Optimizer steps between evaluations (also at stage ends)."""
    keep_checkpoints: Positive = 3
    """Newest checkpoints that are kept."""
    keep_best: Count = 1
    """Best checkpoints that are kept in addition; 0: none."""
    best_metric: str = Field("eval/cls_loss_mean", pattern="^(eval|watch)/.")
    """Metric of an evaluation at the checkpoint's own step that says which is best: the highest accuracy, precision,
    recall or f1, the lowest of any other."""
    keep_every: Count = 0
    """Keep every checkpoint whose step is a multiple of this; 0: none."""
    background_save: bool = True
    """Write checkpoints while training continues; false: wait for each."""
    thresholds: Literal["per-word", "scalar", "fixed"] = "per-word"
    """How C is learnt."""
    train_class_bias: bool = False
    """Train b_cls too (it moves loc_S; C does not)."""
    feature_cache: FeatureCacheConfig = FeatureCacheConfig()
    """z of stages that train the heads alone, computed once."""


class RunConfig(Section):
    """The run's folder, name, and loggers."""

    dir: str = Field("runs/default", min_length=1)
    """The run's folder; the same command resumes it."""
    name: str | None = None
    """Shown in W&B; default: the folder's name."""
    resume: Literal["auto", "last-good", "never", "restart"] = "auto"
    """If the folder holds a checkpoint: auto resumes from it and refuses a damaged one, last-good takes the one before
    a damaged one, never refuses to resume, restart archives the folder and begins anew."""
    accept: list[Literal["data", "eval", "tokenizer", "base"]] = Field([])
    """Inputs that may differ from those that the checkpoint was trained with (texts, held-out texts, tokenizer, base);
    any other that does is refused."""
    stop_after: str | None = None
    """A stage after which the command ends without error and the run is paused. A command without this key, or with a
    later stage, resumes it: so jobs with different resources share a run."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases logging."""
    wandb_project: str = "cqwen"
    """W&B project."""
    tensorboard: bool = False
    """Also write TensorBoard events, to DIR/tensorboard (extra package)."""
    peak_tflops: Above0 | None = None
    """What one rank's device can do, for perf/mfu; default: the data sheet's dense bf16 peak of common GPUs, else no
    perf/mfu."""


# Found on SmolLM2-135M (docs/training.md, Rates).
_RATES: dict[Any, float] = {"classifier": 2e-6, "regression": 1e-3, "thresholds": 1e-3, "embedding": 1e-4, "lora": 2e-4}
DEFAULT_STAGES = [
    Stage(name="heads", train=["heads"], steps=1000, lr_groups=_RATES, warmup_steps=50),
    Stage(name="lora", train=["heads", "embedding", "lora"], steps=1000, lr_groups=_RATES, warmup_steps=100),
]


class Config(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    start: Literal["calibrated", "seed", "seed-100"] = "calibrated"
    """Start of the heads: from data, or the seeds' constants with C = 0 or 100."""
    loss: LossConfig = LossConfig()
    stages: Annotated[list[Stage], Field(min_length=1)] = DEFAULT_STAGES
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()
    deepspeed: dict[str, Any] = Field({})
    """Additions to DeepSpeed's configuration; what contradicts the rest is refused by name."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.global_batch_size % self.train.micro_batch_size:
            raise refused(
                "train.global_batch_size",
                self.train.global_batch_size,
                f"a multiple of train.micro_batch_size ({self.train.micro_batch_size})",
            )
        names = [stage.name for stage in self.stages]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise refused(f"stages.{index}.name", name, "a name that no other stage has")
        for index, stage in enumerate(self.stages):
            if self.train.thresholds == "fixed" and stage.groups == {"thresholds"}:
                allowed = "a group that learns (train.thresholds is fixed), or train.thresholds per-word or scalar"
                raise refused(f"stages.{index}.train", stage.train, allowed)
            self._check_lengths(index, stage)
        context = (self.model.architecture or {}).get("max_position_embeddings")
        for key, length in self.sequence_lengths().items():
            if isinstance(context, int) and length > context:
                raise refused(key, length, f"at most {context}, model.architecture.max_position_embeddings")
        if self.run.stop_after not in (None, *names):
            raise refused("run.stop_after", self.run.stop_after, f"a stage: {', '.join(names)}")
        self._check_heads()
        self._check_adapters()
        return self

    def _check_heads(self) -> None:
        """Keys with an entry for each value, or for each word, have the right number of entries."""
        fitted = self.start == "calibrated" and self.number_dims and ":" not in self.model.abduction
        if self.model.wide and not fitted:
            allowed = "0, or start calibrated, model.number_dims above 0 and model.abduction linear or two_layer"
            raise refused("model.wide", self.model.wide, allowed)
        for key in ("random_features", "wide_from_eval"):
            if getattr(self.model, key) and not self.model.wide:
                raise refused(f"model.{key}", getattr(self.model, key), "its default, or model.wide above 0")
        if self.model.wide_from_eval and not (self.data.eval or self.data.eval_fraction):
            raise refused("model.wide_from_eval", Said("it without held-out data"), "data.eval or data.eval_fraction")
        if self.loss.value_weights is not None and len(self.loss.value_weights) != 1 + len(self.data.more_values):
            allowed = f"{1 + len(self.data.more_values)} weights, of the number and of each of data.more_values"
            raise refused("loss.value_weights", self.loss.value_weights, allowed)
        if self.train.thresholds == "scalar" and isinstance(self.model.threshold_init, str):
            raise refused(
                "model.threshold_init", self.model.threshold_init, "a number where train.thresholds is scalar"
            )

    def _check_lengths(self, index: int, stage: Stage) -> None:
        """What a stage sets for itself fits the rest."""
        size, micro = self.batch_sizes(stage)
        if size % micro:
            own = "micro_batch_size" if stage.global_batch_size is None else "global_batch_size"
            found = micro if stage.global_batch_size is None else size
            allowed = f"global_batch_size ({size}) to be a multiple of micro_batch_size ({micro}) in this stage"
            raise refused(f"stages.{index}.{own}", found, allowed)
        if stage.until is not None and not (self.data.eval or self.data.eval_fraction or self.data.watch):
            raise refused(f"stages.{index}.until", Said("it without held-out data"), "data.eval or data.eval_fraction")

    def _check_adapters(self) -> None:
        """Combinations of adapters and a partitioned or quantized base that cannot work."""
        if self.parallel.zero_stage == 3 and self.model.compile_layers:
            allowed = "false under parallel.zero_stage 3 (it gathers weights inside the layers), or 1, 2"
            raise refused("model.compile_layers", True, allowed)
        if self.parallel.zero_stage == 3 and self.model.lora.dora and self.trains("lora"):
            allowed = "false under parallel.zero_stage 3 (DoRA reads whole weights outside their own layers), or 1, 2"
            raise refused("model.lora.dora", True, allowed)
        if self.parallel.zero_stage == 3 and self.model.quantize != "none":
            allowed = "none under parallel.zero_stage 3 (4-bit weights cannot be partitioned), or 1, 2"
            raise refused("model.quantize", self.model.quantize, allowed)
        if self.train.precision != "bf16" and self.model.quantize != "none":
            allowed = "none with train.precision fp32 (4-bit weights are read in bf16), or bf16"
            raise refused("model.quantize", self.model.quantize, allowed)
        if self.model.architecture is not None:
            try:
                self.fit_to(str(self.model.architecture["model_type"]))
            except UserError as error:
                raise refused(error.key, error.found, error.allowed) from None

    def fit_to(self, model_type: str) -> list[str]:
        """Raises `UserError` for a key that asks what this kind of base does not support; returns notes on what is
        experimental with it.
        """
        base, model, targets = architecture(model_type), self.model, self.model.lora.target_modules
        for name in [] if targets == "all-linear" or not self.trains("lora") else targets:
            if name not in base.linears:
                allowed = f"names out of {', '.join(base.linears)}, or all-linear"
                raise UserError("model.lora.target_modules", name, allowed)
        asked = (
            ("varlen", "model.attention", model.attention, model.attention == "varlen"),
            ("compiled_layers", "model.compile_layers", True, model.compile_layers),
            ("gradient_checkpointing", "model.gradient_checkpointing", True, model.gradient_checkpointing),
            ("quantize", "model.quantize", model.quantize, model.quantize != "none"),
            ("zero_3", "parallel.zero_stage", 3, self.parallel.zero_stage == 3),
        )
        notes = [base.require(capability, key, value) for capability, key, value, wanted in asked if wanted]
        return [note for note in notes if note]

    def batch_sizes(self, stage: Stage) -> tuple[int, int]:
        """(global, micro) batch size of a stage."""
        return (
            stage.global_batch_size or self.train.global_batch_size,
            stage.micro_batch_size or self.train.micro_batch_size,
        )

    def batch_shapes(self) -> list[tuple[int, int, int]]:
        """(sequence length, global batch size, micro-batch size) of each stage."""
        usual = self.data.sequence_length
        return [(stage.sequence_length or usual, *self.batch_sizes(stage)) for stage in self.stages]

    def sequence_lengths(self) -> dict[str, int]:
        """Every sequence length of the run by its key."""
        named = {f"stages.{i}.sequence_length": stage.sequence_length for i, stage in enumerate(self.stages)}
        return {"data.sequence_length": self.data.sequence_length, **{k: v for k, v in named.items() if v is not None}}

    @property
    def last_stage(self) -> int:
        """Index of the stage after which this command ends."""
        names = [stage.name for stage in self.stages]
        return len(names) - 1 if self.run.stop_after is None else names.index(self.run.stop_after)

    def trains(self, group: str) -> bool:
        """Whether any stage trains the group."""
        return any(group in stage.groups for stage in self.stages)

    @property
    def base_folder(self) -> str:
        """The base model: the one named, or the folder in the run where the run builds it."""
        return self.model.name_or_path or str(Path(self.run.dir) / "base")

    @property
    def tokenizer_source(self) -> str:
        """The tokenizer: the one named, else the base's."""
        named = self.model.tokenizer
        return self.base_folder if named is None or named == TRAIN_TOKENIZER else named

    @property
    def tokenizer_key(self) -> str:
        """The key that names it."""
        return "model.name_or_path" if self.model.tokenizer is None else "model.tokenizer"

    def _by_start(self, given: Any, calibrated: Any, seed: Any) -> Any:
        """The value of a key; if it is not given, the default of a calibrated start or of the seed presets."""
        return given if given is not None else calibrated if self.start == "calibrated" else seed

    @property
    def number_dims(self) -> int:
        """m, the number dimensions added to U, resolved."""
        return self._by_start(self.model.number_dims, 8, 0)

    @property
    def w_num_scale(self) -> float | None:
        """The factor on the start of w_num, resolved; None: from the norm of the digits' rows."""
        given = self.model.w_num_scale
        return given if self.num_row_init == "digits" else self._by_start(given, 0.2, 1.0)

    @property
    def num_row_init(self) -> str:
        """How <NUM>'s rows start, resolved: a base that this run pretrained has seen <NUM>."""
        unseen = self.model.architecture is None
        return self._by_start(self.model.num_row_init, "digits" if unseen else "inherit", "inherit")

    @property
    def max_grad_norm(self) -> float | None:
        """The limit of the joint gradient norm, resolved; None: three times the usual one."""
        limit = self._by_start(self.train.max_grad_norm, "usual", 1.0)
        return None if limit == "usual" else limit

    @property
    def slope_limit(self) -> float:
        """The limit of the slope of a word's loss, resolved; 0: none."""
        return self._by_start(self.loss.slope_limit, 1.0, 0.0)

    @property
    def target_transform(self) -> str:
        """The regression's unit, resolved."""
        return self._by_start(self.loss.target_transform, "standardise", "none")

    def to_yaml(self) -> str:
        """The config as resolved; loading it again gives an equal config."""
        return yaml_text.dump(self.model_dump())


def refuse_ranks(vocab_group_size: int, world: int) -> None:
    """Raises `UserError` where vocabulary groups of a size do not divide `world` ranks."""
    if world % vocab_group_size:
        divisors = ", ".join(str(d) for d in range(1, min(world, 1024) + 1) if world % d == 0)
        ranks = f"the {world} rank{'s' * (world > 1)}"
        raise UserError("parallel.vocab_group_size", vocab_group_size, f"a divisor of {ranks}: {divisors}")
