"""Parameters and moments of a DeepSpeed ZeRO engine, by name and whole, for any stage and number of ranks.

On each rank DeepSpeed holds a group's fp32 masters as one flat tensor, with a piece of each parameter. Its own
accessors (`safe_get_full_*`) fail before the first step, and for a second parameter group in stages 1 and 2. So the
pieces are read here from the flat optimizer state. They are small: adapters, w_num, <NUM>'s row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.training.optim import MOMENTS


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter on this rank: its numbers [start, start+numel), at `offset` of the flat master."""

    flat: Tensor
    offset: int
    start: int
    numel: int


def flat_masters(engine: Any) -> list[tuple[int, Tensor]]:
    """(parameter group index, this rank's flat fp32 master) of every flat tensor of the engine's optimizer."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        to_group = optimizer.sub_group_to_group_id
        return [(to_group[i], flat) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    return list(enumerate(optimizer.single_partition_of_fp32_groups))


def discard_gradients(engine: Any) -> None:
    """Drop a step's accumulated gradients, as DeepSpeed itself does on an overflow."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_overflow_clean_up"):  # ZeRO-3
        optimizer._overflow_clean_up(optimizer.loss_scale)
        return
    optimizer.zero_grad(set_to_none=True)
    if optimizer.cpu_offload:  # DeepSpeed would leave a NaN in the masters' gradients and in these buffers
        optimizer.reset_cpu_buffers()
        for master in optimizer.single_partition_of_fp32_groups:
            if master.grad is not None:
                master.grad.zero_()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))


def _pieces(engine: Any) -> Iterator[tuple[nn.Parameter, _Piece | None]]:
    """Every trainable parameter with this rank's piece of it (None: other ranks hold it)."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        rank = engine.global_rank
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            offset = 0
            for p in group:
                size = p.partition_numel()
                start = rank * size
                numel = max(0, min(size, p.ds_numel - start))
                yield p, _Piece(flat, offset, start, numel) if numel else None
                offset += size
        return
    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        for p in group:
            mapping = p._hp_mapping
            if mapping is None:
                yield p, None
                continue
            whole, piece = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            yield p, _Piece(flat, whole.start, piece.start, piece.numel)


def whole_shape(p: nn.Parameter) -> torch.Size:
    """The parameter's shape, also where ZeRO-3 has partitioned it."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _state(engine: Any, flat: Tensor) -> dict[str, Any]:
    """Adam's state of a flat master; zeros and step 0 before the first step."""
    state = engine.optimizer.optimizer.state[flat]
    if not state:
        state["step"] = torch.tensor(0.0)
        for key in MOMENTS:
            state[key] = torch.zeros_like(flat)
    return state


def reset_moments(engine: Any, group_indices: set[int]) -> None:
    """Zero moments and Adam step of parameter groups that begin to train."""
    for index, flat in flat_masters(engine):
        if index in group_indices:
            state = _state(engine, flat)
            state["step"] = torch.zeros_like(state["step"])
            for key in MOMENTS:
                state[key].zero_()


def read_state(engine: Any, names: dict[nn.Parameter, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, moments) whole, fp32, on the CPU; moments as `<name>.exp_avg`. Collective over the world."""
    parameters: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    pieces = list(_pieces(engine))
    shapes = [whole_shape(p) for p, _ in pieces]
    for key in (None, *MOMENTS):
        # Every rank puts its pieces into zeros; the sum over ranks is whole
        buffer = torch.zeros(sum(shape.numel() for shape in shapes), device=engine.device)
        wholes = [
            part.view(shape) for part, shape in zip(buffer.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        for (_, piece), whole in zip(pieces, wholes, strict=True):
            if piece is not None:
                source = piece.flat if key is None else _state(engine, piece.flat)[key]
                values = source.detach().narrow(0, piece.offset, piece.numel)
                whole.view(-1)[piece.start : piece.start + piece.numel] = values.to(buffer)
        sum_over(buffer)
        for (p, _), whole in zip(pieces, wholes, strict=True):
            if key is None:
                parameters[names[p]] = whole.cpu().clone()
            else:
                moments[f"{names[p]}.{key}"] = whole.cpu().clone()
    return parameters, moments


@torch.no_grad()
def write_state(
    engine: Any, names: dict[nn.Parameter, str], parameters: dict[str, Tensor], moments: dict[str, Tensor]
) -> None:
    """Put whole tensors back into this rank's pieces and into the parameters themselves."""
    for p, piece in _pieces(engine):
        name = names[p]
        value = parameters[name]
        partitioned = hasattr(p, "ds_tensor")
        if not partitioned:
            p.copy_(value.to(p))
        if piece is None:
            continue
        part = slice(piece.start, piece.start + piece.numel)
        if partitioned:
            p.ds_tensor[: piece.numel] = value.flatten()[part].to(p.ds_tensor)  # type: ignore[attr-defined]
        state = _state(engine, piece.flat)
        for flat, whole in ((piece.flat, value), *((state[key], moments[f"{name}.{key}"]) for key in MOMENTS)):
            flat.narrow(0, piece.offset, piece.numel).copy_(whole.flatten()[part])


def read_steps(engine: Any) -> dict[int, int]:
    """Adam's step by parameter group index."""
    return {index: int(_state(engine, flat)["step"]) for index, flat in flat_masters(engine)}


def write_steps(engine: Any, steps: dict[int, int]) -> None:
    """Set Adam's step by parameter group index, each in a tensor of its own: a shared one would step twice."""
    for index, flat in flat_masters(engine):
        if index in steps:
            _state(engine, flat)["step"] = torch.tensor(float(steps[index]))
