"""Sizes shared by all parts of a plan: one stage of a run on one rank.

Letters: H hidden, I intermediate, A attention heads, K key-value heads, D head size, L layers; C causal dimensions
(word part C_w, number dimensions m), V vocabulary, v rows per rank, g ranks of a vocabulary group, R ranks of the
world; B sequences of T tokens in a micro-batch, N = B T (over the ranks of a sequence group); w bytes per backbone
value.
"""

from typing import Any

from cqwen_dist.config import Config, Stage
from cqwen_dist.config.shape import number_parameters
from cqwen_dist.config.trainable import feature_counts, trains_features
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.sizes.flops import Flops, Work

FP32 = 4
FASTEST = {"cpu": "chunked", "cuda": "triton"}  # implementation of the word loss
# DeepSpeed's ZeRO-3 defaults: most parameters that stay gathered, and size below which they are never partitioned.
MAX_LIVE, PERSISTENT_BELOW = 1_000_000_000, 100_000


class Sizes:
    """A stage of a config on the rank with the most work.

    kind: cuda or cpu. sequences: number of sequences per epoch; None: unknown. text: length of packed texts (sum of
    squares over sum); None: a full row.
    """

    def __init__(
        self,
        config: Config,
        base: Architecture,
        world: int,
        kind: str,
        stage: Stage,
        sequences: int | None = None,
        text: float | None = None,
    ) -> None:
        self.config, self.base, self.world, self.kind, self.stage = config, base, world, kind, stage
        self.sequences_in_data = sequences
        # The batch
        self.sequence = config.parallel.sequence_group_size  # ranks that share each sequence
        self.global_batch, micro_batch = config.batch_sizes(stage)
        share = ceil_div(self.global_batch, world // self.sequence)  # sequences per step on this rank
        self.accumulation = ceil_div(share, micro_batch)  # micro-batches per step
        self.length = stage.sequence_length or config.data.sequence_length  # T
        self.tokens = min(micro_batch, share) * ceil_div(self.length, self.sequence)  # N
        self.attended = min(text or self.length, self.length) if config.data.pack else float(self.length)
        self.step_tokens = self.global_batch * self.length  # tokens of all ranks per optimizer step
        # The trained groups. The engine is never rebuilt, so memory of a group that trains in any stage is permanent
        self.trainable = stage.groups
        self.ever_trainable = config.trained
        until_now = config.stages[: 1 + [each.name for each in config.stages].index(stage.name)]
        self.reached = frozenset[str]().union(*(each.groups for each in until_now))  # groups with Adam moments
        self.graph = trains_features(self.trainable)  # whether gradients run through the backbone
        self.checkpointing = config.model.gradient_checkpointing
        # The backbone, the heads, the layout
        self.width = 2 if config.train.precision == "bf16" else FP32  # w
        self.words = config.model.causal_size or base.hidden  # C_w
        self.causal = self.words + config.number_dims  # C
        self.zero = config.parallel.zero_stage
        self.group = config.parallel.vocab_group_size  # g
        self.loss_impl = FASTEST[kind]
        self.rows = ceil_div(base.vocab, self.group)  # v, largest over the ranks
        c, h = self.causal, base.hidden
        # Sizes of replicated parts of the heads
        self.abduction = [(c, h)] * 2  # its matrices
        abduction = sum(rows * (columns + 1) for rows, columns in self.abduction)
        regression = number_parameters(config.candidates, self.words, c)
        self.whole_heads = {"abduction": abduction, "regression": regression, "noise": c}
        # Names of maps with an adapter; parameters of DeepSpeed's engine by group
        adapted = "lora" in self.ever_trainable
        self.adapters = base.adapted(config.model.lora.target_modules) if adapted else frozenset[str]()
        self.engine_parameters = feature_counts(config, base, self.ever_trainable)
        self.trained_features = sum(self.engine_parameters.values())

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the stage (maximum with `until`); None if they depend on data of unknown size."""
        if self.stage.steps is not None:
            return self.stage.steps
        if self.stage.until is not None:
            return self.stage.until.max_steps
        if self.sequences_in_data is None or self.stage.epochs is None:
            return None
        return max(1, round(self.stage.epochs * ceil_div(self.sequences_in_data, self.global_batch)))

    @property
    def cached(self) -> bool:
        """Whether z comes from the feature cache: no feature group trains, and the stage is longer than one epoch.

        In auto mode, a stage given in steps over data of unknown size counts as uncached.
        """
        if self.graph or self.config.train.feature_cache.mode == "never" or self.sequence > 1:
            return False
        if self.sequences_in_data is None:
            return self.stage.epochs is not None and self.stage.epochs > 1
        return (self.steps or 0) > ceil_div(self.sequences_in_data, self.global_batch)

    def row_columns(self, groups: frozenset[str]) -> list[int]:
        """Columns of each trained tensor with one row per word."""
        return [self.words] * ("classifier" in groups) + [1] * ("thresholds" in groups)

    def row_numbers(self, groups: frozenset[str]) -> int:
        """Number of trained values in this rank's rows."""
        return self.rows * sum(self.row_columns(groups))

    def matrices(self, groups: frozenset[str]) -> list[tuple[int, int]]:
        """(rows, columns) of trained replicated matrices, whose step is sharded."""
        return self.abduction if "abduction" in groups else []

    def vectors(self, groups: frozenset[str]) -> int:
        """Number of trained values of the heads every rank steps by itself."""
        return self.whole_head(groups) - sum(rows * columns for rows, columns in self.matrices(groups))

    def stepped_head(self, groups: frozenset[str]) -> int:
        """Number of head values that a rank steps and has moments for (`training.optim`)."""

        def kept(rows: int, ranks: int) -> int:
            return rows // ranks + rows % ranks

        matrices = sum(kept(rows, self.world) * columns for rows, columns in self.matrices(groups))
        rows = kept(self.rows, self.world // self.group) * sum(self.row_columns(groups))
        return matrices + self.vectors(groups) + rows

    def whole_head(self, groups: frozenset[str]) -> int:
        """Number of trained replicated values of the heads."""
        return sum(size for name, size in self.whole_heads.items() if name in groups)

    def head(self, groups: frozenset[str]) -> int:
        """Number of trained values of the heads over all ranks."""
        return sum(self.row_columns(groups)) * self.base.vocab + self.whole_head(groups)

    def over(self, stage: int) -> int:
        """Number of ranks over which ZeRO shards state that it shards from `stage` on."""
        return self.world if self.zero >= stage else 1

    def zero_setting(self, key: str, default: int) -> int:
        """A stage-3 setting: the user's, or DeepSpeed's default."""
        return int(self.config.deepspeed.get("zero_optimization", {}).get(key, default))


def stage_sizes(config: Config, base: Architecture, *, world: int, kind: str, **known: Any) -> list[Sizes]:
    """The `Sizes` of each stage; arguments as in `Sizes`. Raises `UserError` if groups do not fit."""
    config.parallel.refuse_ranks(world)
    return [Sizes(config, base, world, kind, stage, **known) for stage in config.stages]


def masked(s: Sizes) -> bool:
    """Whether attention uses a mask: for packed documents or a limited window. Plain causal attention needs none. With
    `model.attention: varlen` only a window needs a mask, if no kernel supports it."""
    if s.config.data.pack and s.config.attention == "mask":
        return True
    kernel = s.config.attention == "varlen" and s.kind == "cuda" and s.width < FP32
    return s.base.window is not None and s.attended >= s.base.window and not kernel


def ceil_div(count: int, parts: int) -> int:
    """The largest of `parts` even shares of a count."""
    return -(-count // parts)


def work_of(s: Sizes) -> Work:
    """The work of a stage."""
    return s.base.work(s.config, s.words, sum(rows * columns for rows, columns in s.abduction))


def flops(s: Sizes) -> Flops:
    """Operations per token in this stage."""
    row = s.length if masked(s) else None
    return work_of(s).flops(s.attended, s.trainable, cached=s.cached, checkpointing=s.checkpointing, row=row)
