"""Counts the launched operations and host waits in a step, also without a GPU.

Eager PyTorch launches one or a few kernels per dispatched operation. Views and allocations launch no kernel. So the
number of dispatched operations determines the host time (16 us each on an H200 machine), and
it can be counted on a CPU. The host waits when it reads a number or a value-dependent shape, or copies without
`non_blocking`. A CPU run is treated as if the given batches were on the host and all other tensors on a device.

Compiled regions launch fewer kernels than operations. For them use the profiler (`parts.device_counts`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

# aten operations that only allocate or alias a tensor. Views are recognised by `is_view`.
_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_reshape_alias", "_unsafe_view"),
    *(
        "detach",
        "detach_",
        "alias",
        "promote_types",
        "lift_fresh",
        "set_",
        "resize_",
        "record_stream",
        "is_pinned",
        "_pin_memory",
    ),
}
# Operations that return a value to the host, or a shape that depends on values.
_READS = {
    *("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"),
    *("unique_consecutive", "unique_dim_consecutive", "bincount"),
}
# (file suffix, function) of code that runs only for CPU tensors, where reading a value does not block.
_CPU_ALONE = {
    ("ovr/loss.py", "_check"),
    *(("ovr/one_pass.py", name) for name in ("backward", "_labels_near")),
    ("ovr/tile.py", "_columns_above"),
}
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class Launches(TorchDispatchMode):
    """Counts operations and waits by part of the step while it is active.

    host: tensors to treat as host tensors. In a CPU run all other tensors count as device tensors.
    """

    def __init__(self, host: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.operations: dict[str, Counter[str]] = {}
        self.waits: dict[str, Counter[str]] = {}
        self._now: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._host: Any = WeakIdKeyDictionary()
        for tensor in host:
            self.on_host(tensor)

    def end(self, part: str) -> None:
        """Assigns the counts since the last call to `part`."""
        for found, now in zip((self.operations, self.waits), self._now, strict=True):
            found.setdefault(part, Counter()).update(now)
            now.clear()

    def on_host(self, tensor: Tensor) -> None:
        """Treats the tensor as a host tensor from now on."""
        self._host[tensor] = True

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda or (
            tensor.device.type == "cpu" and tensor not in self._host and not torch.cuda.is_available()
        )

    def move(self, tensor: Tensor, to_host: bool) -> Tensor:
        """Simulates a transfer in a CPU run: a copy that counts as a host or device tensor."""
        copy = tensor.detach().clone() if not tensor.requires_grad else tensor.clone()
        if to_host:
            self.on_host(copy)
        else:
            self._host.pop(copy, None)
        return copy

    def wait(self, what: str) -> None:
        """Records a host wait at the current code location."""
        place = _place()
        if not any(f"{file}:" in place and place.endswith(f" {name}") for file, name in _CPU_ALONE):
            self._now[1][f"{what} at {place}"] += 1

    def totals(self) -> dict[str, dict[str, int]]:
        """{"operations": {part: count}, "waits": {part: count}}."""
        found = {"operations": self.operations, "waits": self.waits}
        return {name: {part: counts.total() for part, counts in parts.items()} for name, parts in found.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = any(map(self.on_device, inputs)) if inputs else True
        name = func.overloadpacket.__name__
        if here and _reads(name, args, kwargs):
            self.wait(name)
        result = func(*args, **kwargs)
        if not here:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.on_host(tensor)
        elif not func.is_view and name not in _NO_KERNEL and func.namespace != "profiler":
            self._now[0][name] += 1
        return result


class _Moves(TorchFunctionMode):
    """Intercepts transfers between host and device, which in a CPU run dispatch no operation."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, launches = kwargs or {}, self.launches
        if func is Tensor.to and isinstance(next(iter(args[1:]), kwargs.get("device")), (torch.device, str)):
            return self._to_device(func(*args, **kwargs), args[0], kwargs)
        if func is Tensor.cpu and launches.on_device(args[0]):
            launches.wait("cpu")
            return func(*args, **kwargs) if args[0].is_cuda else launches.move(args[0], True)
        if func in _READING_METHODS and launches.on_device(args[0]):
            launches.wait(func.__name__)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and _is_new(func, args):
            if kwargs.get("device") is None:
                launches.on_host(result)
            elif func is torch.tensor:
                launches.wait("torch.tensor of Python numbers")
        return result

    def _to_device(self, moved: Tensor, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """The result of `source.to(device)`, which counts as a device tensor also in a CPU run."""
        if torch.cuda.is_available() or self.launches.on_device(source):
            return moved
        if not kwargs.get("non_blocking"):
            self.launches.wait("to(device)")
        return self.launches.move(moved, False)


def _is_new(func: Any, args: Sequence[Any]) -> bool:
    """Whether a function creates a tensor from Python numbers, so on the host unless a device is given."""
    return getattr(torch, getattr(func, "__name__", ""), None) is func and not any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(args)
    )


def _reads(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host needs the result of an operation."""
    if name in ("index", "index_put", "index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "repeat_interleave":  # only the overload with counts, which the remaining overloads call
        return len(args) == 1 and kwargs.get("output_size") is None
    return name in _READS


def _place() -> str:
    """The innermost caller outside torch and this file, as file:line function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    path = frame.f_code.co_filename.rsplit("/", 3)[1:]
    return f"{'/'.join(path)}:{frame.f_lineno} {frame.f_code.co_name}"


@contextmanager
def counting(host: Iterable[Tensor] = ()) -> Iterator[Launches]:
    """Counts the launches from this thread and its backward passes inside the context."""
    launches, accelerator = Launches(host), get_accelerator()
    accelerator.synchronize = lambda device_index=None: launches.wait("synchronize")  # DeepSpeed's name for it
    try:
        with _Moves(launches), launches:
            yield launches
    finally:
        del accelerator.synchronize
