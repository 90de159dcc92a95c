"""gloo collectives of GPU tensors, copied through the host, so that the ranks of a test may share a GPU.

gloo supports GPU memory in some collectives only; its coalesced all-gather would read a device address as a host
address. So each collective here copies its tensors to the host, runs to completion, and copies the result back. CPU
tensors pass through unchanged. All calls are synchronous: a returned work object is complete.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "cqwen_staged"
# Collectives as methods of a process group. Each writes to its first argument. (torch 2.13 renames three of them.)
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "gather"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "scatter"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)


def on_host(tensor: Tensor) -> bool:
    """Whether gloo can read the tensor directly."""
    return tensor.device.type == "cpu"


class StagedGroup(dist.ProcessGroup):
    """A process group that forwards each collective to `inner`, a gloo group of the same ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner._set_default_backend(kind)
        self.inner._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))

    # As torch asks for them to set a timeout
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        return self.inner.barrier()

    def getBackendName(self) -> str:
        return BACKEND


def _staged(name: str) -> Callable[..., Any]:
    """The method of this name: copy to the host, run to completion, copy back."""

    def call(self: StagedGroup, *args: Any, **options: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []
        written, *read = [_to_host(each, pairs if i == 0 else []) for i, each in enumerate(args)]
        work = getattr(self.inner, name)(written, *read, **options)
        work.wait()
        for tensor, copy in pairs:
            tensor.copy_(copy)
        return work

    call.__name__ = name
    return call


def _to_host(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Copy the device tensors of a value to the host; append each (tensor, copy) to `pairs`."""
    if isinstance(value, (list, tuple)):
        return [_to_host(each, pairs) for each in value]
    if not isinstance(value, Tensor) or on_host(value):
        return value
    copy = value.detach().to("cpu", copy=True)
    pairs.append((value, copy))
    return copy


for _name in _METHODS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(StagedGroup, _name, _staged(_name))

if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
