"""Floating-point operations a token, by part: a product of [N, a] and [a, b] is 2 N a b.

A plan and a run (`telemetry.perf`) make `Work` from a config. Useful operations are those of the formulas: causal
attention looks at half of [T, T]. What is computed again (gradient checkpointing; the scores, in attention's backward),
or made between packed texts and hidden by a mask, is counted separately. MFU is useful operations over the hardware's
peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from cqwen_dist.sizes.stage_sizes import Sizes, masked


@dataclass(frozen=True)
class Flops:
    """Operations of one token: the useful ones by part, and those that are done again."""

    backbone_forward: float
    backbone_backward: float
    abduction: float
    word_head: float
    recomputed: float
    between_texts: float = 0.0  # scores that a mask of packed rows makes and hides, forward

    @property
    def backbone(self) -> float:
        """Operations of the backbone, for every token."""
        return self.backbone_forward + self.backbone_backward

    @property
    def heads(self) -> float:
        """Operations of the heads, for a token with a label."""
        return self.abduction + self.word_head

    @property
    def useful(self) -> float:
        """All operations except those that are done again."""
        return self.backbone + self.heads


@dataclass(frozen=True)
class Work:
    """What a model's operations depend on."""

    matrices: int  # entries of all layers' frozen matrices
    adapters: int  # entries of LoRA
    layers: int
    attention: int  # A D, attention heads times their size
    hidden: int  # H
    causal: int  # C
    words: int  # C_w, the dimensions of U that words see
    vocab: float  # V, or its share that a step computes

    def forward(self, length: float) -> float:
        """One pass through the backbone of a token among `length`, adapters included."""
        return 2.0 * (self.matrices + self.adapters) + self.scores(length)

    def scores(self, length: float) -> float:
        """Attention's scores and their use, of all layers: the half of [T, T] that a token may see."""
        return 2.0 * self.layers * self.attention * length

    def flops(
        self,
        length: float,
        trained: frozenset[str],
        *,
        cached: bool,
        checkpointing: bool = False,
        row: float | None = None,
    ) -> Flops:
        """Operations of a token in a stage that trains the groups `trained`.

        length: tokens of its text (of several: the sum of their squares over their sum); cached: z was computed before;
        checkpointing: activations are computed again; row: tokens of a row whose every score a mask makes.
        Backward: frozen matrices pass gradients on (one product each), adapters that train also learn (two), both
        factors of attention's products have a gradient.
        """
        graph = bool(trained & {"embedding", "lora"})
        forward, scores = self.forward(length), self.scores(length)
        adapters = (4.0 if "lora" in trained else 2.0) * self.adapters
        abduction = 2 * 2.0 * self.causal * self.hidden  # two matrices [C, H]
        words = 2 * 2.0 * self.words * self.vocab  # loc and scale
        tokens = graph or bool(trained & {"abduction", "noise"})
        return Flops(
            backbone_forward=0.0 if cached else forward,
            backbone_backward=graph * (2.0 * self.matrices + adapters + 2 * scores),
            abduction=abduction * (1 + ("abduction" in trained) + graph),
            word_head=words * (1 + tokens + ("classifier" in trained)),
            recomputed=graph * (scores / 2 + checkpointing * forward),
            between_texts=0.0 if cached or row is None else 2 * self.scores(row) - scores,
        )


def of_stage(s: Sizes) -> Work:
    """The work of a stage, from its sizes."""
    lora = s.config.model.lora
    return Work(
        matrices=s.base.layers * sum(rows * columns for rows, columns, _ in s.base.linears.values()),
        adapters=s.base.lora_parameters(lora.r, lora.target_modules) if "lora" in s.ever_trainable else 0,
        layers=s.base.layers,
        attention=s.base.heads * s.base.head_dim,
        hidden=s.base.hidden,
        causal=s.causal,
        words=s.words,
        vocab=s.base.vocab,
    )


def flops(s: Sizes) -> Flops:
    """Operations of one token in this stage."""
    row = s.length if masked(s) else None
    return of_stage(s).flops(s.attended, s.trainable, cached=s.cached, checkpointing=s.checkpointing, row=row)


def softmax_head_ratio(s: Sizes) -> float:
    """Tokens/s that operations predict for this stage over those of the same backbone with a trained softmax head."""
    each = flops(s)
    return (each.backbone + 6 * s.base.hidden * s.base.vocab) / each.useful


def cache_ratio(s: Sizes) -> float:
    """Tokens/s that operations predict with z from the cache over those with the backbone's forward pass."""
    heads = flops(s).heads
    return (of_stage(s).forward(s.attended) + heads) / heads
