"""Floating-point operations per token, by part. A product of [N, a] and [a, b] has 2 N a b operations.

The planner and a run create `Work` by `Architecture.work`. Useful operations follow from the formulas;
causal attention has half of [T, T]. Recomputed operations (gradient checkpointing, attention scores in backward) and
masked scores between packed texts are counted separately. MFU is useful FLOP/s divided by the hardware peak.
"""

import re
from dataclasses import dataclass

from cqwen_dist.config.trainable import trains_features

# Dense bf16 peaks in TFLOP/s from data sheets, by device name. The longest match wins.
PEAK_TFLOPS = {
    **dict.fromkeys(("A100", "A800"), 312.0),
    **dict.fromkeys(("H100", "H200", "H800", "GH200"), 989.0),
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A40": 150.0,
}


@dataclass(frozen=True)
class Flops:
    """Operations per token: useful operations by part, and recomputed operations."""

    backbone_forward: float
    backbone_backward: float
    abduction: float
    word_head: float
    recomputed: float
    between_texts: float = 0.0  # masked scores between packed texts, forward

    @property
    def backbone(self) -> float:
        """Operations of the backbone for each token."""
        return self.backbone_forward + self.backbone_backward

    @property
    def heads(self) -> float:
        """Operations of the heads for each token with a label."""
        return self.abduction + self.word_head

    @property
    def useful(self) -> float:
        """All operations except recomputed ones."""
        return self.backbone + self.heads


@dataclass(frozen=True)
class Work:
    """The sizes that determine the operations of a model."""

    matrices: int  # entries of the frozen matrices that a token is multiplied by, in all layers
    adapters: int  # entries of LoRA
    layers: int  # that attend
    attention: int  # A D, attention heads times their size
    abduction: int  # entries of its matrices
    words: int  # C_w, dimensions of the word part of U
    vocab: float  # V, times the sampled share
    recurrent: int = 0  # multiplications of a token with the state of linear attention, in all layers
    softmax: bool = False  # the words' loss has a softmax term, whose normaliser takes a product of its own

    def forward(self, length: float) -> float:
        """Forward pass of the backbone for a token in a text of `length` tokens, including adapters."""
        return 2.0 * (self.matrices + self.adapters + self.recurrent) + self.scores(length)

    def scores(self, length: float) -> float:
        """Attention scores and their product with v in all layers, for the causal half of [T, T]."""
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
        """Operations per token in a stage that trains the groups `trained`.

        length: text length in tokens (for different lengths: sum of squares over sum); cached: z comes from a cache;
        checkpointing: activations are recomputed; row: tokens per row if a mask is used for packed texts.
        Backward: one product per frozen matrix, two per trained adapter, and two per attention product, as both factors
        have a gradient.
        """
        graph = trains_features(trained)
        forward, scores = self.forward(length), self.scores(length)
        adapters = (4.0 if "lora" in trained else 2.0) * self.adapters
        words = 2 * 2.0 * self.words * self.vocab  # loc and scale
        tokens = graph or bool(trained & {"abduction", "noise"})
        return Flops(
            backbone_forward=0.0 if cached else forward,
            backbone_backward=graph * (2.0 * self.matrices + adapters + 4.0 * self.recurrent + 2 * scores),
            abduction=2.0 * self.abduction * (1 + ("abduction" in trained) + graph),
            word_head=words * (1 + tokens + ("classifier" in trained) + self.softmax / 2),
            recomputed=graph * (scores / 2 + checkpointing * forward),
            between_texts=0.0 if cached or row is None else 2 * self.scores(row) - scores,
        )


def peak_tflops(device_name: str) -> float | None:
    """The peak of a GPU by its driver name; None for an unknown GPU."""
    known = [key for key in PEAK_TFLOPS if re.search(rf"\b{key}\b", device_name)]  # "L4" must not match an L40
    return PEAK_TFLOPS[max(known, key=len)] if known else None
