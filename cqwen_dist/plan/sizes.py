"""The numbers that every part of a plan shares: one stage of a run on one rank.

H hidden, I intermediate, A attention heads, K key-value heads, D head size, L layers; C causal dimension (word part
C_w, number dimensions m), V vocabulary, v rows of it on a rank, g ranks of a vocabulary group, R ranks of the world;
B sequences of T tokens in a micro-batch, N = B T; w bytes of a backbone number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from cqwen_dist.config import Config, Stage, refuse_ranks
from cqwen_dist.plan.architecture import Architecture

FP32 = 4
Kind = Literal["cuda", "cpu"]
# DeepSpeed's ZeRO-3 defaults: what stays gathered, and which parameters are never partitioned.
MAX_LIVE, PERSISTENT_BELOW = 1_000_000_000, 100_000


@dataclass(frozen=True)
class Sizes:
    """A stage of a config on the rank that has most to do."""

    config: Config
    base: Architecture
    world: int
    kind: Kind
    stage: Stage
    sequences_in_data: int | None = None  # of an epoch, where that is known

    @cached_property
    def batch(self) -> tuple[int, int]:
        """(global, micro) batch size of the stage."""
        return self.config.batch_sizes(self.stage)

    @cached_property
    def share(self) -> int:
        """Sequences of a step on the rank that has most."""
        return -(-self.batch[0] // self.world)

    @cached_property
    def sequences(self) -> int:
        """B."""
        return min(self.batch[1], self.share)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return -(-self.share // self.batch[1])

    @cached_property
    def length(self) -> int:
        """T."""
        return self.stage.sequence_length or self.config.data.sequence_length

    @cached_property
    def tokens(self) -> int:
        """N."""
        return self.sequences * self.length

    @cached_property
    def step_tokens(self) -> int:
        """Tokens of all ranks in an optimizer step."""
        return self.batch[0] * self.length

    @cached_property
    def trainable(self) -> frozenset[str]:
        """The groups that train in this stage."""
        return self.stage.groups

    @cached_property
    def ever_awake(self) -> frozenset[str]:
        """The groups that any stage trains: no engine is rebuilt, so what they hold stays."""
        return frozenset[str]().union(*(stage.groups for stage in self.config.stages))

    @cached_property
    def graph(self) -> bool:
        """Whether gradients run through the backbone."""
        return bool(self.trainable & {"embedding", "lora"})

    @cached_property
    def cached(self) -> bool:
        """Whether z comes from the feature cache: nothing before it trains, and the stage is longer than one pass.

        In auto mode a stage given in steps, over data of unknown size, is counted as computing it.
        """
        mode = self.config.train.feature_cache.mode
        if self.graph or mode == "never":
            return False
        if mode == "require":
            return True
        if self.stage.epochs is not None:
            return self.stage.epochs > 1
        steps = self.stage.steps or (self.stage.until.max_steps if self.stage.until else 0)
        return self.sequences_in_data is not None and steps * self.batch[0] > self.sequences_in_data

    @cached_property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed."""
        return self.config.model.gradient_checkpointing

    @cached_property
    def width(self) -> int:
        """w."""
        return 2 if self.config.train.precision == "bf16" else FP32

    @cached_property
    def words(self) -> int:
        """C_w, the dimensions of U that words see."""
        return self.config.model.causal_size or self.base.hidden

    @cached_property
    def causal(self) -> int:
        """C."""
        return self.words + self.config.number_dims

    @cached_property
    def group(self) -> int:
        """g."""
        return self.config.parallel.vocab_group_size

    @cached_property
    def rows(self) -> int:
        """v, of the rank that has most."""
        return -(-self.base.vocab // self.group)

    @cached_property
    def zero(self) -> int:
        """ZeRO stage of the engine."""
        return self.config.parallel.zero_stage

    @cached_property
    def adapters(self) -> frozenset[str]:
        """Names of the linear maps that have an adapter (none unless a stage trains `lora`)."""
        if "lora" not in self.ever_awake:
            return frozenset()
        targets = self.config.model.lora.target_modules
        return frozenset(self.base.linears if targets == "all-linear" else targets)

    @cached_property
    def per_word(self) -> bool:
        """Whether C is one number a word, and learns."""
        return self.config.train.thresholds == "per-word"

    def row_tensors(self, groups: frozenset[str]) -> list[int]:
        """Trained numbers of this rank's rows, a tensor each, where `groups` are trainable."""
        train, found = self.config.train, []
        if "classifier" in groups:
            found.append(self.rows * self.words)
            if train.train_class_bias:
                found.append(self.rows)
        if "thresholds" in groups and self.per_word:
            found.append(self.rows)
        return found

    @property
    def regressions(self) -> int:
        """Rows of W_reg: of the values of a number, or of each type its value and its score."""
        data = self.config.data
        return 2 * len(data.types) if data.types else 1 + len(data.more_values)

    def whole_head(self, groups: frozenset[str]) -> int:
        """Trained numbers of the heads that every rank holds whole, where `groups` are trainable."""
        c, h = self.causal, self.base.hidden
        scalar = self.config.train.thresholds == "scalar" and "thresholds" in groups
        sizes = {"abduction": 2 * (c * h + c), "regression": self.regressions * (c + 1), "noise": c}
        return sum(size for name, size in sizes.items() if name in groups) + scalar

    @cached_property
    def engine_parameters(self) -> dict[str, int]:
        """Trained parameters that DeepSpeed's engine holds, by part; the embedding's two vectors always are."""
        found = {"embedding of numbers": 2 * self.base.hidden}
        if "lora" in self.ever_awake:
            lora = self.config.model.lora
            found["LoRA"] = self.base.lora_parameters(lora.r, lora.target_modules, lora.dora)
            if lora.dora:
                found["LoRA"] += self.base.layers * sum(self.base.linears[name][1] for name in self.adapters)
        return found

    @cached_property
    def trained_features(self) -> int:
        """All of them."""
        return sum(self.engine_parameters.values())

    def over(self, stage: int) -> int:
        """Over how many ranks ZeRO spreads what it shards from `stage` on."""
        return self.world if self.zero >= stage else 1

    def zero_setting(self, key: str, default: int) -> int:
        """A stage-3 setting, the user's or DeepSpeed's default."""
        section = self.config.deepspeed.get("zero_optimization", {})
        value = section.get(key, default) if isinstance(section, dict) else default
        return int(value)


def stage_sizes(
    config: Config, base: Architecture, *, world: int, kind: Kind, sequences: int | None = None
) -> list[Sizes]:
    """One for every stage. Raises `UserError` where the ranks and the vocabulary groups do not fit."""
    refuse_ranks(config.parallel.vocab_group_size, world)
    return [Sizes(config, base, world, kind, stage, sequences) for stage in config.stages]
