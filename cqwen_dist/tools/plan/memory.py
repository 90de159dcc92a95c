"""Bytes per rank, part by part, in the phases of a step where memory may peak.

The counts are exact: permanent tensors (weights, masters, Adam moments), tensors saved for backward, and buffers in the
fused loss. docs/planner.md derives every term. `plan.stage_sizes` defines the letters.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from cqwen_dist.config.shape import CANDIDATES, NONE
from cqwen_dist.config.trainable import FEATURE_GROUPS, trains_features
from cqwen_dist.tiles import CANDIDATE_BUFFERS, CANDIDATE_BYTES, CHUNK_BYTES, WORK_BUFFERS, tile_shape
from cqwen_dist.tools.plan import activations
from cqwen_dist.tools.plan.stage_sizes import FP32, MAX_LIVE, Sizes, ceil_div
from cqwen_dist.wings import from_wing

GIB, MIB = 2**30, 2**20
ADAM_MOMENTS = 2 * FP32
CHUNKS = 4  # live buffers with `tiles.CHUNK_BYTES` each while the best words are found (`ops.ovr.seen`)
# fp32 tensors [N, C] for KL(U || U at the start), including its backward.
KL_TENSORS = 8
# Memory outside tensors. GPU: the CUDA context with loaded kernels, NCCL buffers per communicator, maths library
# workspaces (in torch's allocator), and fragmentation. CPU: the Python process with libraries.
CONTEXT, NCCL, WORKSPACE, PROCESS = 600 * MIB, 160 * MIB, 64 * MIB, 900 * MIB
# Bytes of a weight, and of an output's scale. nf4: a block of 64 weights has an 8-bit scale, 256 of these an fp32 one.
ROUNDED = {"int8": (1, FP32), "nf4": (0.5 + 1 / 64 + FP32 / (64 * 256), 0)}
FRAGMENTATION = 0.04  # of the tensors, on a GPU


@dataclass(frozen=True)
class Part:
    """A named amount of memory on a rank, and how it is computed."""

    name: str
    bytes: int
    how: str
    place: Literal["device", "host"] = "device"


def kept(s: Sizes) -> Iterator[Part]:
    """The permanent memory in a stage: weights, masters, Adam moments. Parts may be empty."""
    yield from _frozen(s)
    yield from _engine(s)
    yield from _heads(s)


def of_run(stages: Iterable[Sizes]) -> int:
    """Bytes on the device that each further run of a job keeps: all but the base, in the stage where it is most."""
    return max(sum(part.bytes for part in (*_engine(s), *_heads(s)) if part.place == "device") for s in stages)


def phases(s: Sizes) -> dict[str, tuple[Part, ...]]:
    """The phases of a step where memory may peak, each with the parts in addition to `kept`. Parts may be empty."""
    gradients, apart = _head_gradients(s) + _feature_gradients(s), _kept_apart(s)
    before = (_head_gradients(s) + (apart or _feature_gradients(s))) * (s.accumulation > 1)
    earlier = Part("accumulated gradients", before, "of earlier micro-batches")
    held = (_activations(s), earlier, _gathered(s, s.graph))
    found: dict[str, tuple[Part, ...]] = {
        "the loss": (*held, *_loss(s)),
        "backward of the heads": (*held, *_heads_backward(s)),
        "optimizer step": (_step_gradients(s),),
    }
    if s.config.constraint.mode == "monitor":
        found["a look at the constraint"] = (*held[:2], *_heads_backward(s, looking=True))
    if s.graph:
        layer = Part("one layer's backward", activations.layer_backward(s), "gradients of its widest tensors")
        own = Part("gradients", gradients + apart, "fp32; features of this micro-batch in the weights' dtype")
        found["backward of the last layer"] = (held[0], held[2], own, layer, _dense(s))
    else:  # also with cached z: the forward pass that fills the cache needs this memory
        layer = Part("activations", activations.layer_forward(s), "one layer: no gradient runs through the backbone")
        found["forward"] = (earlier, layer, _gathered(s, True), _dense(s))
    return found


def outside_tensors(s: Sizes, tensors: int) -> Iterator[Part]:
    """The memory that a rank needs in addition to its `tensors` bytes of tensors."""
    if s.kind == "cpu":
        yield Part("process", PROCESS, "Python, torch and their libraries")
        return
    yield Part("CUDA context", CONTEXT, "driver, loaded kernels")
    if s.world > 1:
        groups = 1 + (s.group > 1) + (1 < s.group < s.world) + (s.sequence > 1) + 1
        yield Part("communication buffers", groups * NCCL, f"NCCL, {groups} communicators")
    lost = f"{FRAGMENTATION:.0%} of the tensors: what the allocator cannot use"
    yield Part("fragmentation", round(FRAGMENTATION * tensors), lost)


def _frozen(s: Sizes) -> Iterator[Part]:
    a, over = s.base, s.over(3)
    how = f"{s.width} bytes each" + (f", over {over} ranks (ZeRO-3)" if over > 1 else "")
    if (kind := s.config.model.quantize) in ROUNDED:
        weight, output = ROUNDED[kind]
        linear = sum(count * each.entries for count, each in a.all_maps())
        packed = sum(count * (each.entries * weight + each.columns * output) for count, each in a.all_maps())
        rest = (a.backbone_parameters - linear) * s.width
        yield Part("backbone (frozen)", round(packed) + rest, f"linear maps in {kind}, with their scales")
    else:
        yield Part("backbone (frozen)", ceil_div(a.backbone_parameters * s.width, over), how)
    yield Part("token embedding (frozen)", ceil_div(a.embedding_parameters * s.width, over), f"V H, {how}")


def _engine(s: Sizes) -> Iterator[Part]:
    for group, count in s.engine_parameters.items():
        name, trained = FEATURE_GROUPS[group].title, ADAM_MOMENTS if group in s.reached else 0
        whole = count if s.zero < 3 or s.over(3) == 1 else ceil_div(count, s.over(3))
        whole *= FEATURE_GROUPS[group].added  # a base's own weights count among the base's
        yield Part(f"{name}: weights", whole * s.width, f"{count:,} x {s.width} bytes")
        if s.zero == 3:  # ZeRO-3 allocates one flat gradient buffer and never frees it
            yield Part(f"{name}: gradients", ceil_div(count, s.world) * s.width + count * s.width, "ZeRO-3's buffers")
        yield Part(
            f"{name}: optimizer",
            ceil_div(count * (FP32 + trained), s.over(1)),
            f"{count:,} x ({FP32} master + {trained} moments)" + (f" / {s.over(1)}" if s.over(1) > 1 else ""),
            "host" if s.config.parallel.offload == "optimizer" else "device",
        )


def wide_part(s: Sizes) -> int:
    """Numbers of the wide part."""
    model = s.config.model
    return from_wing("size of model.wide")(model, s.base.vocab, s.base.hidden) if model.wide else 0


def _heads(s: Sizes) -> Iterator[Part]:
    """The fp32 heads, which a separate AdamW trains outside the engine. Ranks with equal copies share its moments."""
    v, words = s.rows, s.words
    for name, count in s.whole_heads.items():
        yield Part(name, count * FP32, f"{count:,} x 4 bytes")
    spread = f", over {s.group} ranks" if s.group > 1 else ""
    yield Part("W_cls", v * words * FP32, f"v C = {v:,} x {words:,}, 4 bytes{spread}")
    yield Part("b_cls and C", 2 * v * FP32, "fp32")
    wide = wide_part(s)
    yield Part("wide part (frozen)", wide * FP32, f"{wide:,} x 4 bytes, whole on every rank")
    stepped = s.stepped_head(s.reached)
    yield Part(
        "moments of the heads",
        stepped * ADAM_MOMENTS,
        f"{stepped:,} x 8 bytes" + (f": a part of rows and matrices, over {s.world} ranks" if s.world > 1 else ""),
        "host" if s.config.parallel.offload == "optimizer" else "device",
    )
    yield Part("abduction at the start", s.whole_heads["abduction"] * FP32, "a copy, for KL(U || U at the start)")


def _activations(s: Sizes) -> Part:
    if not s.graph:
        return Part("activations", activations.batch(s), "the batch: the backbone keeps no activations")
    what = "layer inputs (recomputed in backward)" if s.checkpointing else "what autograd keeps of every layer"
    return Part("activations", activations.saved(s), f"L = {s.base.layers} layers of N = {s.tokens:,}: {what}")


def _gathered(s: Sizes, held: bool) -> Part:
    """Weights that ZeRO-3 has gathered in forward. held: whether it keeps them until backward.

    ZeRO-3 prefetches until its limit is reached, and the last matrix may exceed it. Without a backward pass (also in
    the look at the constraint) it releases each weight after use. After backward no weight stays gathered.
    """
    live = s.zero_setting("stage3_max_live_parameters", MAX_LIVE)
    largest = max(size for _, layer in s.base.stack for size in s.base.tensors(layer))
    everything = s.base.backbone_parameters + s.trained_features
    numbers = min(live + largest // 2, everything) if held and s.over(3) > 1 else 0
    return Part("gathered by ZeRO-3", numbers * s.width, f"whole weights in use, at most {live:,} and half a matrix")


def _dense(s: Sizes) -> Part:
    kind, largest = s.config.model.quantize, max(each.entries for _, each in s.base.all_maps())
    scaled = 2 * FP32 * (kind == "int8" and s.kind == "cpu" and s.width < FP32)  # a CPU multiplies by scales in fp32
    size = largest * (s.width + scaled) * (kind in ROUNDED)
    return Part("a dequantised weight", size, "the largest linear map, while its product is computed")


def _head_gradients(s: Sizes) -> int:
    return FP32 * (s.row_numbers(s.trainable) + s.whole_head(s.trainable))


def _feature_gradients(s: Sizes) -> int:
    return s.trained_features * s.width * (s.graph and s.zero < 3)


def _kept_apart(s: Sizes) -> int:
    """Bytes of the separate fp32 buffer that accumulates engine gradients over micro-batches (`zero.patches`).

    ZeRO-2 accumulates this rank's share, ZeRO-1 in 16 bits everything. Other settings accumulate in place.
    """
    if not s.graph or s.accumulation == 1 or s.zero == 3:
        return 0
    if s.zero == 2:
        return ceil_div(s.trained_features, s.world) * FP32
    return s.trained_features * FP32 * (s.width < FP32 and s.config.parallel.offload != "optimizer")


def _features_and_u(s: Sizes, forward: bool) -> int:
    """Bytes of z, U, U' and the tensors for their backward. forward: while the loss is computed, with the U scale."""
    n, c, w = s.tokens, s.causal, s.width
    differentiated = s.graph or "abduction" in s.trainable
    tensors = 2 + differentiated + forward  # loc, scale with noise; before softplus; scale
    size = n * w * s.base.hidden + tensors * n * c * FP32
    if w < FP32:
        size += 2 * n * s.words * w  # loc and scale, rounded for the matrix products
        size += 2 * w * c * s.base.hidden * s.graph  # the two rounded matrices, kept for the gradient of z
    if s.group > 1:
        size += s.group * n * (2 * s.words * w + 12)
    if s.config.constraint.mode != "off" and trains_features(s.reached):
        size += n * w * s.base.hidden  # z as it was at the start
    return size


def _candidates(s: Sizes) -> Part:
    every = s.tokens * CANDIDATES * s.words * CANDIDATE_BUFFERS * FP32 * (s.config.candidates != NONE)
    return Part("candidates' rows", min(every, CANDIDATE_BYTES[s.kind]), "of some numbers at once")


def _loss(s: Sizes) -> Iterator[Part]:
    yield Part("features and U", _features_and_u(s, True), "z, and four [N, C] in fp32")
    yield _candidates(s)
    if not s.config.learns_words:
        return
    n, c = s.group * s.tokens, s.words
    need_u = s.graph or bool(s.trainable & {"abduction", "noise"})
    rows = FP32 * s.row_numbers(s.trainable)
    gap = FP32 * s.rows * (1 + ("thresholds" in s.trainable))
    yield Part("gradients of U", need_u * 2 * n * c * (FP32 + (s.width if s.width < FP32 else 0)), "two [g N, C]")
    yield Part("gradients of the rows", rows + gap, "fp32, made in forward")
    t, words = tile_shape(n, s.rows, c, s.kind)
    low = s.width < FP32
    tiles = t * words * FP32 * WORK_BUFFERS[s.loss_impl] + low * 2 * t * words * s.width
    blocks = words * c * ((2 * s.width if low else FP32) + FP32 * ("classifier" in s.trainable))
    best = CHUNKS * min(t * words * FP32, CHUNK_BYTES[s.kind]) + 16 * n * ceil_div(s.rows, words)
    yield Part("best words", best, "for the accuracy, of each block of words")
    yield Part("loss tiles", tiles + blocks + 16 * n, f"tiles of {t:,} tokens x {words:,} words ({s.loss_impl})")


def _heads_backward(s: Sizes, looking: bool = False) -> Iterator[Part]:
    n, c = s.tokens, s.causal
    yield Part("features and U", _features_and_u(s, False), "what their backward needs")
    yield Part("gradients", _head_gradients(s), "rows, abduction, regression")
    yield _candidates(s)
    wide = 2 * s.group * n * s.words * s.width + 3 * n * c * FP32 + (2 * n * c * s.width if s.width < FP32 else 0)
    if looking:  # after the loss, before any gradient is propagated further
        wide = 2 * s.group * n * s.words * s.width
    yield Part("gradients of U", wide, "as they came, as they are added up, through softplus")
    if looking or s.config.constraint.mode == "dual":
        yield Part("KL to the start", KL_TENSORS * n * c * FP32, f"{KL_TENSORS} tensors [N, C] in fp32")


def _step_gradients(s: Sizes) -> Part:
    rows = s.rows % (s.world // s.group) * sum(s.row_columns(s.trainable))
    whole = s.vectors(s.trainable) + sum(rows % s.world * columns for rows, columns in s.matrices(s.trainable))
    # Vectors, and remainders that the ranks cannot share evenly, are flattened for a single all-reduce.
    summed = FP32 * max(rows, whole) if s.world > 1 else 0
    features = 0 if not s.graph else s.trained_features * s.width + ceil_div(s.trained_features * FP32, s.over(1))
    return Part(
        "gradients", _head_gradients(s) + features + summed, "all of them, and those that are summed, in one piece"
    )
