"""Parameters and moments of a DeepSpeed ZeRO engine, by name and whole, for any stage and number of ranks.

On each rank DeepSpeed holds a group's fp32 masters as one flat tensor, with a piece of each parameter. Its own
accessors (`safe_get_full_*`) fail before the first step, and for a second parameter group in stages 1 and 2. So the
pieces are read here from the flat optimizer state. They are small: adapters, w_num, <NUM>'s row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.training.moments import MOMENTS


class FeatureState(NamedTuple):
    """What the engine trains, in whole tensors, fp32, on the CPU."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]  # `<name>.exp_avg`, ...
    steps: dict[str, int]  # Adam's, by slot


def masters(engine: Any) -> list[tuple[int, list[Any], Tensor]]:
    """(parameter group index, its parameters, this rank's flat fp32 master) of every flat tensor of the optimizer."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        group_of, parameters = optimizer.sub_group_to_group_id, optimizer.fp16_groups
        return [(group_of[i], parameters[i], flat) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    parameters = optimizer.bit16_groups
    return [(i, parameters[i], flat) for i, flat in enumerate(optimizer.single_partition_of_fp32_groups)]


def _pieces(engine: Any) -> Iterator[tuple[nn.Parameter, Tensor, slice, slice]]:
    """Every trainable parameter, the flat master with this rank's piece of it, the piece's place in both (flattened);
    an empty piece where other ranks hold it."""
    for _, parameters, flat in masters(engine):
        offset = 0
        for p in parameters:
            begin = start = numel = 0
            if hasattr(p, "ds_tensor"):  # ZeRO-3: every rank has an equal share, the last one padded
                size = p.partition_numel()
                begin, start = offset, engine.global_rank * size
                numel = max(0, min(size, p.ds_numel - start))
                offset += size
            elif (mapping := p._hp_mapping) is not None:
                own, part = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                begin, start, numel = own.start, part.start, part.numel
            yield p, flat, slice(begin, begin + numel), slice(start, start + numel)


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


def whole_shape(p: nn.Parameter) -> torch.Size:
    """The parameter's shape, also where ZeRO-3 has partitioned it."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _state(engine: Any, flat: Tensor) -> dict[str, Any]:
    """Adam's state of a flat master; zeros and step 0 before the first step."""
    state = engine.optimizer.optimizer.state[flat]
    if not state:
        state["step"] = torch.zeros((), device=flat.device)  # where the fused AdamW reads it
        for key in MOMENTS:
            state[key] = torch.zeros_like(flat)
    return state


def reset_moments(engine: Any, groups: set[int]) -> None:
    """Zero moments and Adam's step of these parameter groups, which begin to train."""
    for group, _, flat in masters(engine):
        if group in groups:
            for value in _state(engine, flat).values():
                value.zero_()


def read_state(engine: Any, names: dict[nn.Parameter, str], slots: Sequence[str]) -> FeatureState:
    """The whole state. slots: of each parameter group. Collective over the world."""
    steps = {slots[group]: int(_state(engine, flat)["step"]) for group, _, flat in masters(engine)}
    state = FeatureState({}, {}, steps)
    pieces = list(_pieces(engine))
    sizes = [whole_shape(p).numel() for p, *_ in pieces]
    for key in (None, *MOMENTS):
        # Every rank puts its pieces into zeros; the sum over ranks is whole
        buffer = torch.zeros(sum(sizes), device=engine.device)
        for (_, flat, in_flat, in_parameter), whole in zip(pieces, buffer.split(sizes), strict=True):
            source = flat if key is None else _state(engine, flat)[key]
            whole[in_parameter] = source.detach()[in_flat].to(buffer)
        sum_over(buffer)
        for (p, *_), whole in zip(pieces, buffer.cpu().split(sizes), strict=True):
            value = whole.view(whole_shape(p)).clone()
            if key is None:
                state.parameters[names[p]] = value
            else:
                state.moments[f"{names[p]}.{key}"] = value
    return state


@torch.no_grad()
def write_state(engine: Any, names: dict[nn.Parameter, str], slots: Sequence[str], state: FeatureState) -> None:
    """Put what `read_state` returned back into this rank's pieces and into the parameters themselves."""
    for p, flat, in_flat, in_parameter in _pieces(engine):
        name = names[p]
        value = state.parameters[name]
        if hasattr(p, "ds_tensor"):
            own = value.flatten()[in_parameter]
            p.ds_tensor[: len(own)] = own.to(p.ds_tensor)
        else:
            p.copy_(value.to(p))
        adam = _state(engine, flat)
        for part, whole in ((flat, value), *((adam[key], state.moments[f"{name}.{key}"]) for key in MOMENTS)):
            part[in_flat].copy_(whole.flatten()[in_parameter])
    for group, _, flat in masters(engine):
        if slots[group] in state.steps:  # a tensor each: a shared one would step twice
            _state(engine, flat)["step"] = torch.tensor(float(state.steps[slots[group]]), device=flat.device)
