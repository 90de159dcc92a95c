"""Plans a run: whether it fits, and the memory, communication and duration."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cqwen_dist.config import Config, UserError
from cqwen_dist.sizes.architecture import Architecture
from cqwen_dist.tools.plan import memory
from cqwen_dist.tools.plan.comm import bytes_sent, head_messages
from cqwen_dist.tools.plan.cost import MACHINES, Machine, StageCost, stage_cost
from cqwen_dist.tools.plan.memory import ADAM_MOMENTS, FP32, GIB, Part
from cqwen_dist.tools.plan.stage_sizes import Sizes, stage_sizes

NOT_TENSORS = ("process", "CUDA context", "communication buffers", "fragmentation")


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and the costs of the run."""

    nodes: int
    gpus_per_node: int
    world: int
    gpu_memory_gib: float
    accumulation: int
    base_parameters: int
    trainable_parameters: int
    head_bytes_sent: int  # per rank and optimizer step, for the heads
    stage: str  # the stage where memory peaks
    moment: str  # the phase of a step where memory peaks
    parts: tuple[Part, ...]
    checkpoint_bytes: int  # size of one checkpoint on disk
    stages: tuple[StageCost, ...]
    machine: Machine
    price: float | None = None  # of a GPU-hour

    @property
    def hours(self) -> float | None:
        """The run's hours; None if a stage is given in epochs and the data size is unknown."""
        found = [stage.hours for stage in self.stages]
        return None if None in found else sum(hours for hours in found if hours is not None)

    @property
    def gpu_hours(self) -> float | None:
        """Hours times ranks; None if the hours are unknown."""
        return None if self.hours is None else self.hours * self.world

    @property
    def cost(self) -> float | None:
        """GPU-hours times the price; None if either is unknown."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s over all ranks in the slowest stage. Layouts are compared by it."""
        return min(stage.tokens_per_s for stage in self.stages)

    @property
    def device_gib(self) -> float:
        """Device memory per rank."""
        return tensor_bytes(self.parts) / GIB

    @property
    def host_gib(self) -> float:
        """Host memory per rank."""
        return sum(part.bytes for part in self.parts if part.place == "host") / GIB

    @property
    def fits(self) -> bool:
        """Whether the parts fit into the device memory."""
        return self.device_gib <= self.gpu_memory_gib

    @property
    def reason(self) -> str:
        """The verdict in one sentence."""
        need = f"{self.device_gib:.2f} GiB of {self.gpu_memory_gib:g} GiB a rank"
        if self.fits:
            return f"fits: {need}"
        part = max((part for part in self.parts if part.place == "device"), key=lambda part: part.bytes)
        return f"does not fit: {need}; the largest part is {part.name} ({part.bytes / GIB:.2f} GiB)"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. tensor_gib: the peak in torch's allocator."""
        tensors = tensor_bytes(part for part in self.parts if part.name not in NOT_TENSORS)
        return {
            **asdict(self),
            **{name: getattr(self, name) for name in ("hours", "gpu_hours", "cost", "fits", "reason")},
            "stages": [stage.to_dict() for stage in self.stages],
            "tensor_gib": round(tensors / GIB, 4),
            "parts": [{**asdict(part), "gib": round(part.bytes / GIB, 4)} for part in self.parts],
            "device_gib": round(self.device_gib, 4),
            "host_gib": round(self.host_gib, 4),
        }


def worst(sizes: list[Sizes]) -> tuple[Sizes, str, tuple[Part, ...]]:
    """The stage and phase where a rank's tensors need most memory, and the parts in that phase."""
    found: list[tuple[Sizes, str, tuple[Part, ...]]] = []
    for each in sizes:
        always = tuple(memory.kept(each))
        found += [(each, name, always + parts) for name, parts in memory.phases(each).items()]
    s, phase, parts = max(found, key=lambda item: tensor_bytes(item[2]))
    return s, phase, tuple(part for part in parts if part.bytes)


def tensor_bytes(parts: Iterable[Part]) -> int:
    """The total size of the device parts."""
    return sum(part.bytes for part in parts if part.place == "device")


def plan(
    config: Config,
    *,
    nodes: int,
    gpus_per_node: int,
    gpu_memory_gib: float | None = None,
    architecture: dict[str, Any],
    machine: Machine | None = None,
    sequences: int | None = None,
    text: float | None = None,
    price: float | None = None,
    beside: Sequence[Config] = (),
) -> Plan:
    """Plans the memory of the largest rank and the costs of the run. `gpus_per_node` 0 means one CPU rank per node.

    architecture: the base model's transformers config (`read_architecture`).
    machine: rates, and the memory if `gpu_memory_gib` is None; default: an H100, or a CPU.
    sequences: sequences per epoch, if known. text: as in `Sizes`. price: of a GPU-hour. beside: further runs of the
    job, of which this one has the peak; only their memory counts. Raises `UserError`.
    """
    if nodes < 1:
        raise UserError("--nodes", nodes, "at least 1")
    if gpus_per_node < 0:
        raise UserError("--gpus-per-node", gpus_per_node, "0 (CPU) or more")
    if price is not None and not gpus_per_node:
        raise UserError("--price", price, "with --gpus-per-node 1 or more: it is an hour's of a GPU")
    machine = machine or MACHINES["h100" if gpus_per_node else "cpu"]
    gib = machine.gib if gpu_memory_gib is None else gpu_memory_gib
    if not (math.isfinite(gib) and gib > 0):
        raise UserError("--gpu-memory-gib", gib, "a number above 0")
    ranks_per_node = max(1, gpus_per_node)
    base = Architecture.of(architecture)
    kind = "cuda" if gpus_per_node else "cpu"
    asked: dict[str, Any] = {"world": nodes * ranks_per_node, "kind": kind, "sequences": sequences, "text": text}
    sizes = stage_sizes(config, base, **asked)
    config.parallel.fit_heads(architecture)
    s, phase, parts = worst(sizes)
    if beside:
        more = sum(memory.of_run(stage_sizes(other, base, **asked)) for other in beside)
        parts += (Part("further runs", more, f"adapters, heads and moments of {len(beside)}"),)
    parts = (*parts, *memory.outside_tensors(s, tensor_bytes(parts)))
    trained = s.engine_parameters.keys() & s.ever_trainable
    return Plan(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        world=s.world,
        gpu_memory_gib=gib,
        accumulation=s.accumulation,
        base_parameters=base.base_parameters,
        trainable_parameters=s.head(s.ever_trainable) + sum(s.engine_parameters[group] for group in trained),
        head_bytes_sent=bytes_sent(head_messages(s)),
        stage=s.stage.name,
        moment=phase,
        parts=parts,
        checkpoint_bytes=checkpoint_bytes(sizes[-1]),
        stages=tuple(stage_cost(each, machine, ranks_per_node) for each in sizes),
        machine=machine,
        price=price,
    )


def checkpoint_bytes(s: Sizes) -> int:
    """Bytes of an fp32 checkpoint in the last stage.

    A checkpoint contains the adapters and the embedding with two moments, all heads, the wide part, and the moments for
    trained heads. The frozen backbone is not saved.
    """
    v = s.base.vocab
    heads = sum(s.whole_heads.values()) + v * (s.words + 2)
    heads += memory.wide_part(s)
    return (s.trained_features + heads) * FP32 + (s.trained_features + s.head(s.ever_trainable)) * ADAM_MOMENTS
