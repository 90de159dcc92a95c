"""The schema of a run: each key has a type, a default, and a one-sentence description below it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cqwen_dist.config import yaml_text
from cqwen_dist.config.architectures import architecture
from cqwen_dist.config.base_model import TRAIN_TOKENIZER, ModelConfig
from cqwen_dist.config.bases import POLICY_FILE
from cqwen_dist.config.data import DataConfig, NumberPolicy
from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.config.fields import Above0, NonNegative, Positive, Section, Seed, refused, unless
from cqwen_dist.config.shape import ARITHMETIC, NONE
from cqwen_dist.config.training import ConstraintConfig, LossConfig, ParallelConfig, RunConfig, Stage

NO_FP16 = "fp16 needs a loss scale, which the heads outside DeepSpeed do not have; bf16 has the range of fp32"


class FeatureCacheConfig(Section):
    """For stages that train nothing before z: compute z once, store it, and train the heads on it."""

    mode: Literal["auto", "never"] = "auto"
    """auto: use the cache if it exists, or if it is possible and worthwhile."""
    dir: str | None = Field(None, min_length=1)
    """Folder for a cache shared by multiple runs; default: in the run folder, for one stage."""


class Trace(Section):
    """A trace of some steps by torch's profiler, on rank 0, in DIR/profile; the costliest operators are printed."""

    start: Positive = 20
    """First step of the trace."""
    steps: Positive = 3
    """Number of steps."""


class TrainConfig(Section):
    """Optimizer steps, evaluation and checkpoints."""

    global_batch_size: Positive = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: Positive = 8
    """Sequences per rank and forward pass; accumulation follows from it."""
    precision: Annotated[Literal["fp32", "bf16"], unless({"fp16": f"fp32 or bf16 ({NO_FP16})"})] = "fp32"
    """Precision of backbone and matrix products; head weights stay fp32."""
    max_grad_norm: Above0 | Literal["usual"] | None = None
    """Maximum joint gradient norm: a number (S4 1.5.3: 1), or usual for three times the median over this stage's last
    64 steps; default: usual if start is calibrated, 1 in the seed presets."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay for matrices; biases, C and b_noise have none."""
    seed: Seed = 0
    """Seed for initialisation and sample order."""
    checkpoint_every: Positive = 200
    """Optimizer steps between checkpoints (also at the end of each stage)."""
    eval_every: Positive = 200
    """Optimizer steps between evaluations (also at the end of each stage)."""
    keep_checkpoints: Positive = 3
    """Number of newest checkpoints to keep, besides the best one."""
    best_metric: str | None = Field(None, pattern="^(eval|watch)/.")
    """Evaluation metric that ranks checkpoints: highest for accuracy, precision, recall or f1, lowest for all
    others. Default: eval/cls_loss_mean, or eval/crps_target if loss.words is none."""
    feature_cache: FeatureCacheConfig = FeatureCacheConfig()
    """Cached z for stages that train only the heads."""
    profile: Trace | None = None
    """Trace these steps; null: none."""


# Tuned on SmolLM2-135M (docs/training.md, Rates).
_RATES: dict[Any, float] = {"classifier": 2e-6, "regression": 1e-3, "thresholds": 1e-3, "embedding": 1e-4, "lora": 5e-4}
DEFAULT_STAGES = [
    Stage(name="heads", train=["heads"], steps=1000, lr_groups=_RATES, warmup_steps=50),
    Stage(name="lora", train=["heads", "embedding", "lora"], steps=1000, lr_groups=_RATES, warmup_steps=100),
]


class Config(Section):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    start: Literal["calibrated", "seed", "seed-100"] = "calibrated"
    """Initialisation of the heads: calibrated on data, or the seeds' constants with C = 0 or 100."""
    loss: LossConfig = LossConfig()
    stages: Annotated[list[Stage], Field(min_length=1)] = DEFAULT_STAGES
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()
    deepspeed: dict[str, Any] = Field({})
    """Settings of DeepSpeed's `zero_optimization` that no other key decides, such as bucket sizes."""

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        size, micro = self.train.global_batch_size, self.train.micro_batch_size
        if size % micro:
            raise refused("train.global_batch_size", size, f"a multiple of train.micro_batch_size ({micro})")
        names = [stage.name for stage in self.stages]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise refused(f"stages.{index}.name", name, "a name that no other stage has")
        for index, stage in enumerate(self.stages):
            self._check_lengths(index, stage)
        if self.run.stop_after not in (None, *names):
            raise refused("run.stop_after", self.run.stop_after, f"a stage: {', '.join(names)}")
        for excluded, key, found, allowed in self._exclusions():
            if excluded:
                raise refused(key, found, allowed)
        if self.model.architecture is not None:
            try:
                self.fit_sizes(self.model.architecture)
                self.fit_to(str(self.model.architecture["model_type"]))
            except UserError as error:
                raise refused(error.key, error.found, error.allowed) from None
        if not self.learns_words:
            own = [stage.without_words(f"stages.{i}.train") for i, stage in enumerate(self.stages)]
            object.__setattr__(self, "stages", own)  # past the freeze
        return self

    def _check_lengths(self, index: int, stage: Stage) -> None:
        size, micro = self.batch_sizes(stage)
        if size % micro:
            own = "micro_batch_size" if stage.global_batch_size is None else "global_batch_size"
            found = micro if stage.global_batch_size is None else size
            allowed = f"global_batch_size ({size}) to be a multiple of micro_batch_size ({micro}) in this stage"
            raise refused(f"stages.{index}.{own}", found, allowed)
        if stage.until is not None and not (self.data.eval or self.data.eval_fraction or self.data.watch):
            raise refused(f"stages.{index}.until", Said("needs data.eval or data.eval_fraction (or data.watch)"))

    def _exclusions(self) -> Iterator[tuple[Any, str, Any, str]]:
        """(whether, key, found, allowed) for settings that exclude each other."""
        model, compiled = self.model, self.model.compile_layers
        calibrated = self.calibrated and model.abduction == "linear"
        yield model.wide and not calibrated, "model.wide", model.wide, "0, or start calibrated and abduction linear"
        digits = "false with model.wide, which would read digits as words"
        yield model.wide and self.data.keep_digits, "data.keep_digits", True, digits
        inside = "false with three numbers in model.wide, whose last has states read between the layers"
        yield compiled and model.wide_size[2], "model.compile_layers", True, inside
        fitted = not self.calibrated and model.number_head in ("laplace", "student", "auto")
        yield fitted, "model.number_head", model.number_head, "cauchy, or start calibrated, which fits the law"
        watched, measures = not self.learns_words and self.data.watch, "none with loss.words none: it measures words"
        yield watched, "data.watch", Said("texts"), measures
        if self.attention == "varlen" and model.gradient_checkpointing:
            again = "false with model.attention varlen and gradient_checkpointing (recomputed, they run uncompiled)"
            yield compiled, "model.compile_layers", True, again
        if self.parallel.zero_stage == 3:
            under = "under parallel.zero_stage 3 ({}), or 1, 2".format
            yield compiled, "model.compile_layers", True, f"false {under('it gathers weights inside the layers')}"
            dora, whole = model.lora.dora and self.trains("lora"), "DoRA reads whole weights outside their own layers"
            yield dora, "model.lora.dora", True, f"false {under(whole)}"
            rounded, scales = model.quantize != "none", "scales are no parameters, so not partitioned"
            yield rounded, "model.quantize", model.quantize, f"none {under(scales)}"
            yield model.wide_size[2], "model.wide", model.wide, f"two numbers {under('its layers run one by one')}"
        if self.parallel.sequence_group_size > 1:  # a rank has no whole text
            under = "under parallel.sequence_group_size above 1 ({})".format
            masked, pairs = self.attention != "varlen", "a mask has an entry for each pair of positions"
            yield masked, "model.attention", self.attention, f"varlen {under(pairs)}"
            inside, earlier = "exchanges between ranks do not compile", "it may read earlier parts of a text"
            yield compiled, "model.compile_layers", True, f"false {under(inside)}"
            for key, value in (("wide", model.wide), ("candidates", model.candidates), ("number_head", model.own_head)):
                yield value not in (0, None, NONE), f"model.{key}", value, f"its default {under(earlier)}"

    def fit_sizes(self, architecture: Mapping[str, Any]) -> None:
        """Raises `UserError` for a sequence length or a sequence group that the base's sizes do not allow.

        architecture: its transformers config.
        """
        context = architecture.get("max_position_embeddings")
        named = {f"stages.{i}.sequence_length": stage.sequence_length for i, stage in enumerate(self.stages)}
        for key, length in {"data.sequence_length": self.data.sequence_length, **named}.items():
            if isinstance(context, int) and length is not None and length > context:
                raise UserError(key, length, f"at most {context}, the base's context")
        self.parallel.fit_heads(architecture)

    def fit_to(self, model_type: str) -> list[str]:
        """Notes: experimental features, and values that other keys chose. Raises `UserError` for a key that this base
        type does not support."""
        base, model, sequence = architecture(model_type), self.model, self.parallel.sequence_group_size
        if self.trains("lora"):
            base.check_targets(model.lora.target_modules)
        asked = (
            ("sequence_groups", "parallel.sequence_group_size", sequence, sequence > 1),  # it asks for varlen
            ("varlen", "model.attention", "varlen", self.attention == "varlen"),
            ("compiled_layers", "model.compile_layers", True, model.compile_layers),
            ("gradient_checkpointing", "model.gradient_checkpointing", True, model.gradient_checkpointing),
            ("quantize", "model.quantize", model.quantize, model.quantize != "none"),
            ("zero_3", "parallel.zero_stage", 3, self.parallel.zero_stage == 3),
            ("packing", "data.pack", True, self.data.pack),
        )
        notes = [base.require(capability, key, value) for capability, key, value, wanted in asked if wanted]
        if model.attention is None and sequence > 1:
            notes.append(f"model.attention is varlen, as parallel.sequence_group_size is {sequence}")
        return [note for note in notes if note]

    def batch_sizes(self, stage: Stage) -> tuple[int, int]:
        """(global, micro) batch size of a stage."""
        train = self.train
        return stage.global_batch_size or train.global_batch_size, stage.micro_batch_size or train.micro_batch_size

    def batch_shapes(self) -> list[tuple[int, int, int]]:
        """(sequence length, global batch size, micro-batch size) of each stage."""
        return [(s.sequence_length or self.data.sequence_length, *self.batch_sizes(s)) for s in self.stages]

    @property
    def last_stage(self) -> int:
        """Index of the last stage for this command."""
        names = [stage.name for stage in self.stages]
        return len(names) - 1 if self.run.stop_after is None else names.index(self.run.stop_after)

    def trains(self, group: str) -> bool:
        """Whether any stage trains the group."""
        return group in self.trained

    @property
    def learns_words(self) -> bool:
        """Whether words have a loss."""
        return self.loss.words != "none"

    @property
    def best_metric(self) -> str:
        """`train.best_metric`, resolved."""
        return self.train.best_metric or ("eval/cls_loss_mean" if self.learns_words else "eval/crps_target")

    @property
    def trained(self) -> frozenset[str]:
        """All groups that any stage trains."""
        return frozenset[str]().union(*(stage.groups for stage in self.stages))

    @property
    def base_folder(self) -> str:
        """The named base, or the run's folder for a base that it builds."""
        return self.model.name_or_path or str(Path(self.run.dir) / "base")

    @property
    def tokenizer_source(self) -> str:
        """The named tokenizer, else the base's."""
        named = self.model.tokenizer
        return self.base_folder if named is None or named == TRAIN_TOKENIZER else named

    @property
    def calibrated(self) -> bool:
        """Whether closed forms on the data start the heads, not the seeds' constants."""
        return self.start == "calibrated"

    @property
    def attention(self) -> str:
        """`model.attention`, resolved."""
        return self.model.attention or ("varlen" if self.parallel.sequence_group_size > 1 else "mask")

    @property
    def _on_texts(self) -> bool:
        """Whether texts, and no table, start a base from data that never saw <NUM> (one with a policy has)."""
        texts = self.data.target_field is None and not self.model.wide
        knows = self.model.architecture or (Path(self.base_folder).expanduser() / POLICY_FILE).is_file()
        return self.calibrated and texts and not knows

    @property
    def candidates(self) -> str:
        """`model.candidates`, resolved."""
        usual = self._on_texts and self.parallel.sequence_group_size == 1 and self.model.own_head is None
        return self.model.candidates or (ARITHMETIC if usual else NONE)

    @property
    def policy(self) -> NumberPolicy:
        """Which numerals become <NUM>, and whether their digits stay in view."""
        digits = self._on_texts if self.data.keep_digits is None else self.data.keep_digits
        return self.data.policy.model_copy(update={"digits": digits})

    @property
    def number_dims(self) -> int:
        """m, the number dimensions added to U."""
        return 8 if self.calibrated else 0

    @property
    def w_num_scale(self) -> float | None:
        """Factor for the initial w_num; None: derived from the digit rows' norm. At a factor of 1 the base loses 4 to 5
        points of top-1 accuracy; a base that this run pretrains has little to lose."""
        if self.num_row_init == "digits":
            return None
        return 0.2 if self.calibrated and self.model.pretrain is None else 1.0

    @property
    def num_row_init(self) -> str:
        """Initialisation of <NUM>'s rows. A base pretrained by this run has seen <NUM>."""
        return "digits" if self.calibrated and self.spells_numbers else "inherit"

    @property
    def spells_numbers(self) -> bool:
        """True if the base spells numbers: any digit counts as a number when it is measured."""
        return self.model.architecture is None

    @property
    def max_grad_norm(self) -> float | None:
        """Maximum joint gradient norm, resolved; None: three times its running median."""
        limit = self.train.max_grad_norm or ("usual" if self.calibrated else 1.0)
        return None if limit == "usual" else limit

    @property
    def word_terms(self) -> dict[str, float]:
        """The fields of `ops.ovr.head.TermOptions`, resolved."""
        return self.loss.terms(self.calibrated, self.model.architecture is None)

    @property
    def constraint(self) -> ConstraintConfig:
        """The limit on U, resolved. The seeds' scales have to shrink by more, a base of this run's cannot forget."""
        usual = "dual" if self.calibrated and self.model.architecture is None else "monitor"
        usual = usual if self.learns_words else "off"  # KL guards words
        return self.loss.constraint.model_copy(update={"mode": self.loss.constraint.mode or usual})

    @property
    def kl_bounded(self) -> bool:
        """True if alarms and pages compare KL with its eps; False if, by default, it is only measured (D31)."""
        return self.constraint.mode != "monitor" or self.loss.constraint.mode is not None

    @property
    def target_transform(self) -> str:
        """The regression's unit, resolved."""
        return self.loss.target_transform or ("standardise" if self.calibrated else "none")

    def model_shape(self) -> dict[str, Any]:
        """The fields of `CausalQwenConfig` that this run sets."""
        return {
            **self.model.model_dump(include={"causal_size", "abduction"}),
            "number_head": self.model.own_head,
            "candidates": self.candidates,
            **dict(zip(("wide", "random_features", "depths"), self.model.wide_size, strict=True)),
            "number_dims": self.number_dims,
            "word_terms": self.word_terms,
            "learns_words": self.learns_words,
        }

    def to_yaml(self) -> str:
        """The config with all defaults; loading it gives an equal config."""
        return yaml_text.dump(self.model_dump())
