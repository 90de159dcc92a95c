"""Full parameters and moments of a DeepSpeed ZeRO engine by name, for any stage and number of ranks.

On each rank DeepSpeed keeps the fp32 masters of a group as one flat tensor with a piece of each parameter. DeepSpeed's
accessors (`safe_get_full_*`) fail before the first step, and for a second parameter group in stages 1 and 2. So this
module reads the pieces from the flat optimizer state. They are small: adapters, w_num, the <NUM> row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cqwen_dist.parallel.collectives import sum_over
from cqwen_dist.training.optim import MOMENTS


class FeatureState(NamedTuple):
    """State of all parameters that the engine trains, as full fp32 tensors on the CPU."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]  # `<name>.exp_avg`, ...
    steps: dict[str, int]  # Adam's, by slot


def masters(engine: Any) -> list[tuple[int, list[Any], Tensor]]:
    """(parameter group index, parameters, this rank's flat fp32 master) for each flat tensor of the optimizer."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        group_of, parameters = optimizer.sub_group_to_group_id, optimizer.fp16_groups
        return [(group_of[i], parameters[i], flat) for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)]
    parameters = optimizer.bit16_groups
    return [(i, parameters[i], flat) for i, flat in enumerate(optimizer.single_partition_of_fp32_groups)]


def _pieces(engine: Any) -> Iterator[tuple[nn.Parameter, Tensor, slice, slice]]:
    """(parameter, flat master, piece's slice in the master, piece's slice in the flattened parameter) for each
    trainable parameter. The slices are empty if other ranks have this parameter."""
    for _, parameters, flat in masters(engine):
        offset = 0
        for p in parameters:
            begin = start = numel = 0
            if hasattr(p, "ds_tensor"):  # ZeRO-3: each rank has an equal share; the last share is padded
                size = p.partition_numel()
                begin, start = offset, engine.global_rank * size
                numel = max(0, min(size, p.ds_numel - start))
                offset += size
            elif (mapping := p._hp_mapping) is not None:
                own, part = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                begin, start, numel = own.start, part.start, part.numel
            yield p, flat, slice(begin, begin + numel), slice(start, start + numel)


def discard_gradients(engine: Any) -> None:
    """Drop the accumulated gradients of a step, as DeepSpeed does on an overflow."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_overflow_clean_up"):  # ZeRO-3
        optimizer._overflow_clean_up(optimizer.loss_scale)
        return
    optimizer.zero_grad(set_to_none=True)
    if optimizer.cpu_offload:  # a NaN would stay in the masters' gradients and in these buffers
        optimizer.reset_cpu_buffers()
        for master in optimizer.single_partition_of_fp32_groups:
            if master.grad is not None:
                master.grad.zero_()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))


def whole_shape(p: nn.Parameter) -> torch.Size:
    """The full shape of a parameter, also if ZeRO-3 has partitioned it."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _state(engine: Any, flat: Tensor) -> dict[str, Any]:
    """Adam state of a flat master; creates zeros and step 0 before the first step."""
    state = engine.optimizer.optimizer.state[flat]
    if not state:
        state["step"] = torch.zeros((), device=flat.device)  # where the fused AdamW reads it
        for key in MOMENTS:
            state[key] = torch.zeros_like(flat)
    return state


def reset_moments(engine: Any, groups: set[int]) -> None:
    """Set moments and Adam step of these parameter groups to zero."""
    for group, _, flat in masters(engine):
        if group in groups:
            for value in _state(engine, flat).values():
                value.zero_()


def read_state(engine: Any, names: dict[nn.Parameter, str], slots: Sequence[str]) -> FeatureState:
    """Gather the full state. slots: the slot of each parameter group. Collective over the world."""
    # All pieces travel in one buffer: hundreds of small all-reduces would take longer than the sum
    steps = {slots[group]: int(_state(engine, flat)["step"]) for group, _, flat in masters(engine)}
    state = FeatureState({}, {}, steps)
    pieces = list(_pieces(engine))
    sizes = [whole_shape(p).numel() for p, *_ in pieces]
    for key in (None, *MOMENTS):
        # Each rank writes its pieces into zeros; the all-reduce sum is the full tensor
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
    """Write a `read_state` result to this rank's pieces and to the parameters."""
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
        if slots[group] in state.steps:  # one tensor per master: Adam would increment a shared one twice
            _state(engine, flat)["step"] = torch.tensor(float(state.steps[slots[group]]), device=flat.device)
