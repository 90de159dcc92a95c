"""Floating-point operations a token, by part: a product of [N, a] and [a, b] is 2 N a b. Letters: `plan.sizes`.

"Useful" operations are those that the mathematics asks for: causal attention looks at half of [T, T], and what
gradient checkpointing computes again is not counted. MFU divides useful operations by the hardware's peak.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cqwen_dist.plan.sizes import Sizes

ATTENTION_BACKWARD = 2.5  # five products (one of them the scores again) against two forward


@dataclass(frozen=True)
class Flops:
    """Of one token, useful ones; `recomputed` beside them."""

    backbone_forward: float
    backbone_backward: float
    abduction: float
    word_head: float
    recomputed: float

    @property
    def useful(self) -> float:
        """All but what is computed twice."""
        return self.backbone_forward + self.backbone_backward + self.abduction + self.word_head

    def to_dict(self) -> dict[str, float]:
        """Plain values, for JSON."""
        return {**asdict(self), "useful": self.useful}


def linear_parameters(s: Sizes) -> int:
    """Entries of all matrices of all layers, without adapters."""
    return s.base.layers * sum(rows * columns for rows, columns, _ in s.base.linears.values())


def attention_forward(s: Sizes, causal: bool = True) -> float:
    """Scores and their use, a token of all layers; causal: the half that a token may see."""
    whole = s.base.layers * 4 * s.base.heads * s.base.head_dim * s.length
    return whole / 2 if causal else whole


def adapter_parameters(s: Sizes) -> int:
    """Entries of the adapters, where there are any."""
    return s.engine_parameters.get("LoRA", 0)


def backbone_forward(s: Sizes, causal: bool = True) -> float:
    """One pass of a token, adapters included; 0 where z comes from the cache."""
    if s.cached:
        return 0.0
    return 2 * linear_parameters(s) + 2 * adapter_parameters(s) + attention_forward(s, causal)


def backbone_backward(s: Sizes, causal: bool = True) -> float:
    """Frozen matrices pass gradients on (one product each); adapters also learn (two)."""
    if not s.graph:
        return 0.0
    adapters = (4 if "lora" in s.awake else 2) * adapter_parameters(s)
    return 2 * linear_parameters(s) + adapters + ATTENTION_BACKWARD * attention_forward(s, causal)


def abduction(s: Sizes) -> float:
    """Two matrices [C, H]: forward, gradients of themselves, gradient of z."""
    product = 2 * 2 * s.causal * s.base.hidden
    return product * (1 + ("abduction" in s.awake) + s.graph)


def word_head(s: Sizes) -> float:
    """Six products of [N, C_w] and [C_w, V]: loc and scale forward, of each the gradients of tokens and of rows."""
    product = 2 * s.words * s.base.vocab
    tokens = 2 if s.graph or s.awake & {"abduction", "noise"} else 0
    return product * (2 + tokens + 2 * ("classifier" in s.awake))


def flops(s: Sizes) -> Flops:
    """Of one token in this stage."""
    forward = backbone_forward(s)
    return Flops(
        backbone_forward=forward,
        backbone_backward=backbone_backward(s),
        abduction=abduction(s),
        word_head=word_head(s),
        recomputed=forward if s.graph and s.checkpointing else 0.0,
    )


def softmax_head_ratio(s: Sizes) -> float:
    """Tokens/s that operations predict for this stage over those of the same backbone with a trained softmax head."""
    backbone = backbone_forward(s) + backbone_backward(s)
    return (backbone + 6 * s.base.hidden * s.base.vocab) / flops(s).useful


def cache_ratio(s: Sizes) -> float:
    """Tokens/s that operations predict with z from the cache over those with the backbone's forward pass."""
    forward = 2 * linear_parameters(s) + 2 * adapter_parameters(s) + attention_forward(s)
    rest = abduction(s) + word_head(s)
    return (forward + rest) / rest
