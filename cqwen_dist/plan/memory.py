"""How many bytes each rank needs, part by part; every part says its formula.

H hidden, C causal dimension (number dimensions included), V vocabulary, v rows of it on a rank, L layers, N tokens of
a micro-batch (sequence_length x its sequences), g ranks of a vocabulary group. Weights and optimizer states are
exact counts; activations are an estimate (attention that never forms [T, T] is assumed: SDPA or flash). Every group
that any stage trains is counted, as no engine is rebuilt between stages. A pretraining of the base is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cqwen_dist.config import Config, UserError
from cqwen_dist.plan.architecture import Architecture
from cqwen_dist.plan.comm import head_messages

GIB = 2**30
FP32 = 4
MOMENTS = 2 * FP32
# What stays taken beside tensors: the context, communication buffers, the allocator's slack.
RESERVE_GIB = {"gpu": 1.5, "cpu": 1.0}
# The fused loss works in tiles: this many buffers of at most this many bytes. The reference keeps [N, v] tensors alive.
TILE_BUFFERS, TILE_BYTES = 5, 128 * 2**20
REFERENCE_TENSORS = 9


@dataclass(frozen=True)
class Part:
    """One user of memory on a rank."""

    name: str
    bytes: int
    how: str
    place: Literal["device", "host"] = "device"


@dataclass(frozen=True)
class Plan:
    """What a rank needs, against what it has."""

    nodes: int
    gpus_per_node: int
    world: int
    gpu_memory_gib: float
    accumulation: int
    base_parameters: int
    trainable_parameters: int
    head_bytes_sent: int  # by a rank for the heads in an optimizer step
    head_bytes_sent_unsharded: int  # the same with the whole head on every rank
    parts: tuple[Part, ...]
    advice: str

    @property
    def device_gib(self) -> float:
        """All parts on the device of one rank."""
        return sum(part.bytes for part in self.parts if part.place == "device") / GIB

    @property
    def host_gib(self) -> float:
        """All parts that one rank keeps in host memory."""
        return sum(part.bytes for part in self.parts if part.place == "host") / GIB

    @property
    def fits(self) -> bool:
        """Whether a rank's parts stay within its memory."""
        return self.device_gib <= self.gpu_memory_gib

    @property
    def reason(self) -> str:
        """The verdict in one sentence."""
        need = f"{self.device_gib:.2f} GiB of {self.gpu_memory_gib:g} GiB a rank"
        if self.fits:
            return f"fits: {need}"
        largest = max((part for part in self.parts if part.place == "device"), key=lambda part: part.bytes)
        return (
            f"does not fit: {need}; the largest part is {largest.name} ({largest.bytes / GIB:.2f} GiB). {self.advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "parts": [{**asdict(part), "gib": round(part.bytes / GIB, 4)} for part in self.parts],
            "device_gib": round(self.device_gib, 4),
            "host_gib": round(self.host_gib, 4),
            "fits": self.fits,
            "reason": self.reason,
        }


def plan(
    config: Config, *, nodes: int, gpus_per_node: int, gpu_memory_gib: float, architecture: dict[str, Any]
) -> Plan:
    """Memory of one rank (the largest one). `gpus_per_node` 0 means one CPU rank a node, its memory in host RAM.

    `architecture` is the base's transformers config (`read_architecture`). Raises `UserError`.
    """
    if nodes < 1:
        raise UserError("--nodes", nodes, "at least 1")
    if gpus_per_node < 0:
        raise UserError("--gpus-per-node", gpus_per_node, "0 (CPU) or more")
    if not (math.isfinite(gpu_memory_gib) and gpu_memory_gib > 0):
        raise UserError("--gpu-memory-gib", gpu_memory_gib, "a number above 0")
    world = nodes * max(1, gpus_per_node)
    if world % config.parallel.vocab_group_size:
        allowed = f"a divisor of the number of ranks ({world})"
        raise UserError("parallel.vocab_group_size", config.parallel.vocab_group_size, allowed)
    sizes = _Sizes(config, Architecture.of(architecture), world)
    reserve = int(RESERVE_GIB["gpu" if gpus_per_node else "cpu"] * GIB)
    parts = (
        *_frozen(sizes),
        *_engine(sizes),
        *_heads(sizes),
        *_activations(sizes),
        Part("reserve", reserve, "context, communication, allocator"),
    )
    return Plan(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        world=world,
        gpu_memory_gib=gpu_memory_gib,
        accumulation=sizes.accumulation,
        base_parameters=sizes.base.base_parameters,
        trainable_parameters=sum(sizes.engine_parameters.values())
        + sum(trained for _, trained in sizes.replicated_parameters.values())
        + sizes.trained_rows * sizes.base.vocab,
        head_bytes_sent=_head_bytes_sent(sizes, sizes.group),
        head_bytes_sent_unsharded=_head_bytes_sent(sizes, 1),
        parts=tuple(part for part in parts if part.bytes),
        advice=_advice(config, parts),
    )


@dataclass(frozen=True)
class _Sizes:
    """The numbers that several parts share."""

    config: Config
    base: Architecture
    world: int

    @property
    def share(self) -> int:
        """Sequences of a step on the rank that has most."""
        return -(-self.config.train.global_batch_size // self.world)

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return -(-self.share // self.config.train.micro_batch_size)

    @property
    def awake(self) -> frozenset[str]:
        """The groups that any stage trains."""
        return frozenset[str]().union(*(stage.groups for stage in self.config.stages))

    @property
    def width(self) -> int:
        """Bytes of a backbone number."""
        return 2 if self.config.train.precision == "bf16" else FP32

    @property
    def causal(self) -> int:
        """C."""
        return (self.config.model.causal_size or self.base.hidden) + self.config.number_dims

    @property
    def words(self) -> int:
        """The dimensions of U that words see: C without the number dimensions."""
        return self.config.model.causal_size or self.base.hidden

    @property
    def group(self) -> int:
        """g."""
        return self.config.parallel.vocab_group_size

    @property
    def rows(self) -> int:
        """v, of the rank that has most."""
        return -(-self.base.vocab // self.group)

    @property
    def tokens(self) -> int:
        """N."""
        return min(self.config.train.micro_batch_size, self.share) * self.config.data.sequence_length

    @property
    def per_word(self) -> bool:
        """Whether C is one number a word."""
        return self.config.train.thresholds == "per-word"

    @property
    def trained_threshold(self) -> bool:
        """Whether C learns in any stage."""
        return "thresholds" in self.awake and self.config.train.thresholds != "fixed"

    @property
    def trained_rows(self) -> int:
        """Trained numbers for each word."""
        bias = self.config.train.train_class_bias and "classifier" in self.awake
        return self.words * ("classifier" in self.awake) + bias + (self.per_word and self.trained_threshold)

    @property
    def engine_parameters(self) -> dict[str, int]:
        """Trained parameters that DeepSpeed's engine holds, by part."""
        lora = self.config.model.lora
        sizes = {
            "LoRA": self.base.lora_parameters(lora.r, lora.target_modules) if "lora" in self.awake else 0,
            # w_num and the difference of <NUM>'s row
            "embedding of numbers": 2 * self.base.hidden if "embedding" in self.awake else 0,
        }
        return {name: size for name, size in sizes.items() if size}

    @property
    def replicated_parameters(self) -> dict[str, tuple[int, int]]:
        """(parameters, of which trained) of the heads that every rank holds whole, outside the engine, by part."""
        c, h = self.causal, self.base.hidden
        vectors = {"regression": c + 1, "noise": c}
        abduction = 2 * (c * h + c)
        return {
            "abduction": (abduction, abduction * ("abduction" in self.awake)),
            "regression and noise": (
                sum(vectors.values()),
                sum(size for name, size in vectors.items() if name in self.awake),
            ),
        }

    def over(self, stage: int) -> int:
        """Over how many ranks ZeRO spreads what it shards from `stage` on."""
        return self.world if self.config.parallel.zero_stage >= stage else 1


def _frozen(s: _Sizes) -> Iterator[Part]:
    how = f"{s.width} bytes each" + (f", over {s.world} ranks (ZeRO-3)" if s.over(3) > 1 else "")
    yield Part("backbone (frozen)", _share(s.base.backbone_parameters * s.width, s.over(3)), how)
    yield Part("token embedding (frozen)", _share(s.base.embedding_parameters * s.width, s.over(3)), f"V H, {how}")
    if s.over(3) > 1:
        gathered = 2 * s.base.layer_parameters + s.base.embedding_parameters
        yield Part("gathered by ZeRO-3", gathered * s.width, "two whole layers and the embedding, while in use")


def _engine(s: _Sizes) -> Iterator[Part]:
    """Weights, gradients, fp32 masters (of bf16 weights, or ZeRO's own partition) and two moments, by ZeRO stage."""
    for name, count in s.engine_parameters.items():
        width = s.width
        yield Part(f"{name}: weights", _share(count * width, s.over(3)), f"{count:,} x {width} bytes / {s.over(3)}")
        yield Part(f"{name}: gradients", _share(count * width, s.over(2)), f"{count:,} x {width} bytes / {s.over(2)}")
        master = FP32 if width < FP32 or s.config.parallel.zero_stage else 0
        yield Part(
            f"{name}: optimizer",
            _share(count * (master + MOMENTS), s.over(1)),
            f"{count:,} x ({master} master + {MOMENTS} moments) / {s.over(1)}",
            "host" if s.config.parallel.offload == "optimizer" else "device",
        )


def _heads(s: _Sizes) -> Iterator[Part]:
    """The heads lie outside the engine, in fp32, with an AdamW of their own: small ones whole, rows over the group."""
    for name, (count, trained_count) in s.replicated_parameters.items():
        size = count * FP32 + trained_count * (FP32 + MOMENTS)
        yield Part(name, size, f"{count:,} x 4 bytes, {trained_count:,} trained x 12 more (gradient, two moments)")
    v, c = s.rows, s.words
    trained = "classifier" in s.awake
    each = FP32 * (2 if trained else 1) + (MOMENTS if trained else 0)
    state = "master, gradient, two moments" if trained else "weight only (never trained)"
    yield Part("W_cls", v * c * each, f"v C = {v:,} x {c:,}, {each} bytes: {state}, over {s.group} ranks")
    bias = v * (FP32 * 2 + MOMENTS if trained and s.config.train.train_class_bias else FP32)
    threshold = (v if s.per_word else 1) * (FP32 * 2 + MOMENTS if s.trained_threshold else FP32)
    yield Part("b_cls and C", bias + threshold, "fp32; with gradient and two moments if trained")


def _activations(s: _Sizes) -> Iterator[Part]:
    a, n = s.base, s.tokens
    h, i, q, kv = a.hidden, a.intermediate, a.heads * a.head_dim, a.kv_heads * a.head_dim
    # Kept by autograd in one layer: inputs of adapters, q, k, v and the attention's output, four of the MLP's inner
    # tensors, and the two norms' inputs in fp32.
    layer = n * (s.width * (2 * h + 2 * q + 2 * kv + 4 * i) + 2 * FP32 * h)
    if not s.awake & {"embedding", "lora"}:
        yield Part("activations", n * s.width * (4 * h + 3 * i), "N (4H + 3I): one layer, no gradient through it")
    elif s.config.model.gradient_checkpointing:
        kept = a.layers * n * h * s.width
        yield Part("activations", kept + layer, "N L H (layer inputs) + one layer recomputed")
    else:
        yield Part("activations", a.layers * layer, "N L (w (2H + 2AD + 2KD + 4I) + 8H), w bytes a number")
    c = s.causal
    own = n * FP32 * (h + 5 * c)
    gathered = s.group * n * FP32 * 4 * c if s.group > 1 else 0
    how = "N (H + 5C) in fp32" + (f" + {s.group} N 4C gathered" if gathered else "")
    yield Part("features and U", own + gathered, how)
    scores = s.group * n * s.rows * FP32
    if s.config.loss.impl == "reference":
        yield Part("OvR loss", REFERENCE_TENSORS * scores, f"{REFERENCE_TENSORS} tensors [N, v] (loss.impl: reference)")
    else:
        tile = TILE_BUFFERS * min(TILE_BYTES, scores)
        second = s.rows * s.words * FP32 if "classifier" in s.awake and s.accumulation > 1 else 0
        yield Part("OvR loss", tile + second, "tiles" + (" + a micro-batch's own gradient of W_cls" if second else ""))


def _head_bytes_sent(s: _Sizes, group: int) -> int:
    """With vocabulary groups of `group` ranks, every position of a full batch kept."""
    rows = -(-s.base.vocab // group)
    messages = head_messages(
        [[s.tokens] * group] * s.accumulation,
        world=s.world,
        columns=s.words,
        gemm_bytes=s.width,
        row_tensors=[s.trained_rows * rows],
        replicated=sum(trained for _, trained in s.replicated_parameters.values()),
        full_gate_grad=s.config.loss.gate_grad == "full",
    )
    return round(sum(message.wire_bytes for message in messages))


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _advice(config: Config, parts: tuple[Part, ...]) -> str:
    """What to change first, by the largest part."""
    largest = max((part for part in parts if part.place == "device"), key=lambda part: part.bytes).name
    if largest in ("activations", "features and U"):
        checkpoint = "" if config.model.gradient_checkpointing else "model.gradient_checkpointing, "
        return f"Try {checkpoint}a smaller train.micro_batch_size or data.sequence_length."
    if largest == "OvR loss":
        return "Try loss.impl auto." if config.loss.impl == "reference" else "Try a larger parallel.vocab_group_size."
    if largest.startswith("W_cls"):
        return "Try a larger parallel.vocab_group_size."
    if config.train.precision == "fp32":
        return "Try train.precision bf16."
    if config.parallel.zero_stage < 3:
        return "Try parallel.zero_stage 3."
    return "Try more ranks, or a smaller base model."
