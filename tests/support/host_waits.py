"""Where the host would wait for a GPU, found without one.

On a GPU an operation only joins a queue, until somebody asks for its result: a number as a Python value (`item`,
`bool`, `tolist`), a tensor on the host, or a shape that depends on values (`nonzero`, a boolean index). The same calls
are made on a CPU, where this sees them. What is inside a compiled graph or a custom operation is not seen.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# aten's own names, without overload
READS = {"_local_scalar_dense", "equal"}
SHAPED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
COPIES = {"tolist", "cpu", "numpy", "__array__"}  # on a CPU they never reach aten


class Wait(NamedTuple):
    """An operation, and the calls that led to it, the innermost first: `file.py:line function`."""

    op: str
    stack: list[str]

    def inside(self, file: str) -> bool:
        """Whether one of the calls is in this file."""
        return any(place.startswith(f"{file}:") for place in self.stack)


@contextmanager
def host_waits() -> Iterator[list[Wait]]:
    """The waits inside, in their order."""
    found: list[Wait] = []
    with _Calls(found), _Operations(found):
        yield found


def _stack() -> list[str]:
    frames = reversed(traceback.extract_stack())
    places = ((frame.filename.rpartition("/")[2], frame) for frame in frames if "/torch/" not in frame.filename)
    return [f"{name}:{frame.lineno} {frame.name}" for name, frame in places if name != "host_waits.py"]


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[Wait]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        lengths = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None and len(args) == 1
        moved = name in ("_to_copy", "copy_") and self._to_host(name, args, kwargs or {})
        if name in READS | SHAPED_BY_VALUES or masks or lengths or moved:
            self.found.append(Wait(name, _stack()))
        return func(*args, **(kwargs or {}))

    def _to_host(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a copy goes from a device to the host, where there is a device."""
        if name == "copy_":
            return bool(args[0].device.type == "cpu" != args[1].device.type and not (len(args) > 2 and args[2]))
        return bool(args[0].device.type != "cpu" and str(kwargs.get("device", "")) == "cpu")


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[Wait]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in COPIES:
            self.found.append(Wait(func.__name__, _stack()))
        return func(*args, **(kwargs or {}))
