"""Estimates the seconds of a step by part, with a roofline over stated or measured rates, and the hours of each stage.

Matrix products take operations / (peak x efficiency). Other kernels are bound by memory: bytes / (bandwidth x memory
efficiency). Kernels are launched one by one, so a micro-batch takes at least `LAUNCH` per kernel. Communication is a
ring over the slowest link between the ranks. docs/planner.md derives the terms.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from cqwen_dist.config.errors import UserError
from cqwen_dist.sizes.flops import PEAK_TFLOPS, Flops
from cqwen_dist.tools.plan.activations import SAVED, widest
from cqwen_dist.tools.plan.comm import Message, bytes_sent, feature_messages, step_messages
from cqwen_dist.tools.plan.stage_sizes import FP32, Sizes, flops

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    """Rates of one rank. Products reach `efficiency` of the peak; other operations are bound by memory."""

    name: str
    bf16: float  # flop/s, dense peak from the data sheet
    fp32: float  # flop/s, likewise (TF32 not used)
    memory: float  # bytes/s
    inside: float  # bytes/s that a rank sends within its node
    gib: float = 80.0  # memory
    between: float = 50 * GB  # bytes/s that a rank sends to other nodes
    efficiency: float = 0.70  # fraction of the peak in large products

    def peak(self, width: int) -> float:
        """Peak flop/s for numbers of `width` bytes."""
        return self.bf16 if width == 2 else self.fp32


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200", PEAK_TFLOPS["H200"] * TERA, 67 * TERA, 4800 * GB, 450 * GB, 139.0),
        Machine("h100", PEAK_TFLOPS["H100"] * TERA, 67 * TERA, 3350 * GB, 450 * GB),
        Machine("a100", PEAK_TFLOPS["A100"] * TERA, 19.5 * TERA, 2039 * GB, 300 * GB),
        Machine("l40s", PEAK_TFLOPS["L40S"] * TERA, 91 * TERA, 864 * GB, 32 * GB, 44.0),
        Machine("cpu", 0.1 * TERA, 0.1 * TERA, 10 * GB, 2 * GB, between=1 * GB, efficiency=1.0),
    )
}
# Bytes/s that each rank may send between nodes.
INTERCONNECTS = {"ib400": 50 * GB, "ib200": 25 * GB, "eth100": 12.5 * GB, "eth25": 3.125 * GB, "eth10": 1.25 * GB}


def machine(name: str, interconnect: str) -> Machine:
    """A machine by name, with its links. Raises `UserError`."""
    if name not in MACHINES:
        raise UserError("--gpu", name, f"one of {', '.join(MACHINES)}")
    if interconnect not in INTERCONNECTS:
        raise UserError("--interconnect", interconnect, f"one of {', '.join(INTERCONNECTS)}")
    return replace(MACHINES[name], between=INTERCONNECTS[interconnect])


# Equal for all machines
LATENCY_INSIDE, LATENCY_BETWEEN = 10e-6, 20e-6  # seconds per round of a collective, within a node and between nodes
HEAD_EFFICIENCY = 0.58  # fraction of the peak that the word head reaches with its fp32 sums
MEMORY_EFFICIENCY = 0.75  # fraction of the bandwidth in elementwise passes
HOST = 20 * GB  # bytes/s to host memory, and of AdamW there
# Measured on an H200 (docs/planner.md). LAUNCH: seconds to start a kernel from Python. TENSOR: seconds per trained
# tensor in DeepSpeed's optimizer loop. KERNELS, COMPILED_KERNELS, ADAPTER_KERNELS: kernels in the forward pass of a
# layer, a compiled layer, an adapter. Backward takes twice as long to start (compiled: equally long).
# COMPILED_PASSES: the share of elementwise memory traffic that remains in compiled layers.
LAUNCH, TENSOR = 16e-6, 20e-6
KERNELS, COMPILED_KERNELS = 60, 60
ADAPTER_KERNELS = {1: 2, 2: 2, 3: 6}  # by ZeRO stage; ZeRO-3 runs PEFT's slower adapter code (`model.layers`)
COMPILED_PASSES = 0.4
# Bytes read and written per (token, word) pair outside the products. The fused value is an estimate, not measured:
# 4 bytes, plus the arithmetic expressed as bytes.
PASSES = {"triton": 16, "chunked": 160}
ADAMW = 28 + 8 + 8  # bytes per trained number: AdamW in one pass, clipping, the gradient norm


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage."""

    stage: str
    time: dict[str, float]  # seconds per optimizer step on one rank, by part
    tokens: int  # per step, over all ranks
    steps: int | None  # None: the data size is unknown
    flops_per_token: Flops
    mfu: float
    bytes_sent: int  # per rank and step
    collectives: int
    bound: str  # the part that takes longest

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.time.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s over all ranks."""
        return self.tokens / self.seconds

    @property
    def hours(self) -> float | None:
        """Hours of the stage, without evaluations and checkpoints."""
        return None if self.steps is None else self.steps * self.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self) | {name: getattr(self, name) for name in ("seconds", "tokens_per_s", "hours")}
        found["flops_per_token"]["useful"] = self.flops_per_token.useful
        return found


def stage_cost(s: Sizes, m: Machine, ranks_per_node: int) -> StageCost:
    """The cost of one stage on a machine."""
    each, messages = flops(s), step_messages(s)
    time = {part: s.accumulation * seconds for part, seconds in micro_batch_times(s, m).items()}
    exposed = time.pop("exposed_launches")
    communication = sum(message_time(message, s, m, ranks_per_node) for message in messages)
    if s.zero == 3:  # ZeRO-3 gathers while layers compute, so a step waits only for the excess
        gathers = [x for x in feature_messages(s) if x.operation == "all-gather"]
        overlapped = sum(message_time(x, s, m, ranks_per_node) for x in gathers)
        communication -= min(overlapped, time["backbone_forward"] + time["backbone_backward"])
    time |= {"communication": communication, "optimizer": optimizer_time(s, m), "exposed_launches": exposed}
    return StageCost(
        stage=s.stage.name,
        time=time,
        tokens=s.step_tokens,
        steps=s.steps,
        flops_per_token=each,
        mfu=each.useful * s.step_tokens / s.world / (sum(time.values()) * m.peak(s.width)),
        bytes_sent=bytes_sent(messages),
        collectives=len(messages),
        bound=max(time, key=lambda part: time[part]).replace("_", " "),
    )


def micro_batch_times(s: Sizes, m: Machine) -> dict[str, float]:
    """Seconds per micro-batch on one rank, by part. exposed_launches: launch time that no computation hides."""
    each, n = flops(s), s.tokens
    rate, memory = m.peak(s.width) * m.efficiency, m.memory * MEMORY_EFFICIENCY
    compiled = s.config.model.compile_layers
    passes = layer_bytes(s) * (COMPILED_PASSES if compiled else 1)
    between = each.between_texts
    forward = n * ((each.backbone_forward + between) / rate + (0 if s.cached else passes / memory))
    # Attention backward: gradients of both factors in both products (2), recomputed scores (0.5), the layer again.
    again = s.graph * (2.5 + s.checkpointing)
    backward = n * ((each.backbone_backward + each.recomputed + again * between) / rate)
    backward += n * s.graph * (2 + s.checkpointing) * passes / memory
    words = s.base.vocab * PASSES[s.loss_impl] * s.config.learns_words + 15 * s.causal * FP32
    operations = each.word_head + each.abduction
    heads = n * (operations / (m.peak(s.width) * HEAD_EFFICIENCY) + words / memory)
    exposed = 0.0
    if s.kind == "cuda":
        adapters = sum(count for count, _ in s.base.all_maps(s.adapters))
        layers = s.base.layers * (COMPILED_KERNELS if compiled else KERNELS)
        start = LAUNCH * (layers if compiled else layers + ADAPTER_KERNELS[s.zero] * adapters)
        exposed += max(0.0, start - forward) * (not s.cached)
        exposed += max(0.0, start * ((1 if compiled else 2) + s.checkpointing) - backward) * s.graph
    return {
        "backbone_forward": forward,
        "backbone_backward": backward,
        "heads": heads,
        "exposed_launches": exposed,
    }


def layer_bytes(s: Sizes) -> float:
    """Bytes that elementwise kernels read and write per token in forward, over all layers.

    These are the norms, residuals, rotations, the activation, and the adapters.
    """
    a, w, total = s.base, s.width, 0
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    for count, layer in a.stack:
        each = 6 * w * a.hidden
        for block in layer:
            each += 32 * a.hidden
            if block.kind == "attention":
                each += 10 * w * (q + kv) + 32 * (q + kv) * block.qk_norm
            elif block.kind == "recurrence":  # written once and read once, in forward and in backward each
                each += 2 * round(SAVED[block.kind](s, block))
        total += count * (each + 5 * w * widest(s, layer))
    return float(total + sum(count * w * (each.rows + 6 * each.columns) for count, each in a.all_maps(s.adapters)))


def optimizer_time(s: Sizes, m: Machine) -> float:
    """Seconds of AdamW, gradient norm and clipping for the heads and this rank's share of the features."""
    heads = s.stepped_head(s.trainable)
    features = s.trained_features * s.graph / s.over(1)
    offloaded = s.config.parallel.offload == "optimizer"
    # DeepSpeed's step loops over the tensors in Python. `zero.patches` updates one flat buffer instead.
    looped = s.kind == "cuda" and s.graph and (s.zero == 3 or offloaded)
    tensors = 2 * sum(count for count, _ in s.base.all_maps(s.adapters)) * TENSOR * looped
    here = 0.0 if offloaded else ADAMW * (heads + features) / (m.memory * MEMORY_EFFICIENCY)
    host = (features * (ADAMW + 2 * s.width) + heads * (ADAMW + 3 * FP32)) / HOST if offloaded else 0.0
    return here + tensors + host


def message_time(message: Message, s: Sizes, m: Machine, ranks_per_node: int) -> float:
    """Seconds of one collective: a ring over the slowest link in the group."""
    spans = {"vocabulary": s.group, "sequence": s.sequence}.get(message.group, s.world)
    rate, latency = (m.between, LATENCY_BETWEEN) if spans > ranks_per_node else (m.inside, LATENCY_INSIDE)
    rounds = (2 if message.operation == "all-reduce" else 1) * max(1, (message.ranks - 1).bit_length())
    return message.wire_bytes / rate + latency * rounds
