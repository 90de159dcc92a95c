"""A stand-in for a GPU: tensors in the CPU's memory that say they are on cuda:0.

    pytest --stand-in-gpu -m gpu tests/...                       tests that need a GPU, on it
    pytest --stand-in-gpus -m gpus tests/...                     tests that need two: it says it is both, gloo is NCCL
    PYTHONPATH=tests python -m support.stand_in_gpu train ...    any `cqwen` command, in this process

Programs take the branches that they take on a GPU, with values, and what a GPU refuses is refused: an operation on
tensors of both devices, numpy's view of a device tensor. Triton's kernels run in its interpreter, torch's attention of
texts of several lengths by its formula. Not shown: speed, memory, order (all is done when a call returns), compiled
code, NCCL, several devices. Where autograd calls Python by itself (hooks, gradient checkpointing), devices are the CPU.

A label lies on a storage. `_Api` answers what Python asks of a tensor's device and makes tensors on the device that is
asked for; `_Ops` sees every operation below that, refuses mixtures, and labels what the operation returns.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Before triton and torch's compiler are asked for anything
SETTINGS = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cuda"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_DEVICE, _IS_CUDA, _IS_CPU = Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_BETWEEN = ("copy_", "_to_copy", "set_", "result_type", "_has_compatible_shallow_copy_type")  # may see both devices
_BY_INDEX = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")  # indices may be on the CPU
_kept: list[Any] = []
ASKED = "CQWEN_TEST_STAND_IN"


def ask(devices: int = 1) -> None:
    """For this process and those that it starts; before triton is imported."""
    os.environ.update({**SETTINGS, ASKED: str(devices)})
    install_if_asked()


def install_if_asked() -> None:
    """In a process whose environment has `ASKED`: from here on."""
    if not os.environ.get(ASKED) or _kept:
        return
    _stand_in_for_torch_cuda()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _flash_forward, "CPU")
    library.impl("_flash_attention_backward", _flash_backward, "CPU")
    _kept.extend((library, _Api(), _Ops()))
    for mode in _kept[1:]:
        mode.__enter__()
    threading.Thread.run = _within_modes(threading.Thread.run)  # type: ignore[method-assign]


def device() -> torch.device:
    """Where a rank of a test trains: on the GPU that `support.ranks` gave it, or on the stand-in; else on the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if os.environ.get("DS_ACCELERATOR") == "cuda" else CPU


def _within_modes(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """A thread's work, seen as this one's is: torch's modes are of one thread."""

    def within(thread: threading.Thread) -> None:
        with _Api(), _Ops():
            run(thread)

    return within


def label_of(tensor: Tensor) -> torch.device:
    """The device that a tensor says it is on."""
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        device: torch.device = _DEVICE(tensor)
        if device.type != "cpu" or tensor.layout != torch.strided:
            return device
        return GPU if getattr(tensor.untyped_storage(), "stands_in", False) else CPU


def _label(tensor: Tensor, device: torch.device) -> None:
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        if _DEVICE(tensor).type == "cpu" and tensor.layout == torch.strided:
            tensor.untyped_storage().stands_in = device.type == "cuda"  # type: ignore[attr-defined]


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _named(device: Any) -> torch.device:
    found = GPU if isinstance(device, int) else torch.device(device)
    return GPU if found.type == "cuda" else found


def _place() -> str:
    frames = reversed(traceback.extract_stack()[:-2])
    own = (frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__)
    return next((f"{frame.filename}:{frame.lineno}" for frame in own), "?")


class _Move(torch.autograd.Function):
    """A copy on the other device; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.was = label_of(tensor)
        return _copied(tensor, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _copied(gradient, ctx.was), None


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        copy = tensor.detach().clone()
    _label(copy, device)
    return copy


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None, copy: bool = False) -> Tensor:
    """`Tensor.to`."""
    cast = tensor if dtype in (None, tensor.dtype) else tensor.to(dtype)
    was = label_of(tensor)
    if device.type not in ("cpu", "cuda") or was.type == "meta":
        return cast.to(device)
    if was == device:
        return cast.clone() if copy and cast is tensor else cast
    return _Move.apply(cast, device) if cast.requires_grad and torch.is_grad_enabled() else _copied(cast, device)


def _to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """`Tensor.to`, as it is called."""
    other = next((a for a in (*args, options.get("other")) if isinstance(a, Tensor)), None)
    if other is not None:
        return _moved(tensor, label_of(other), other.dtype)
    flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
    dtype = next((a for a in args if isinstance(a, torch.dtype)), options.get("dtype"))
    named = [a for a in args if isinstance(a, (str, int, torch.device)) and not isinstance(a, bool)]
    device = named[0] if named else options.get("device")
    copy = flags[1] if len(flags) > 1 else options.get("copy", False)
    return _moved(tensor, label_of(tensor) if device is None else _named(device), dtype, copy)


class _Here(threading.local):
    around = CPU  # the device of what an operation makes out of no tensor: of the call that it is part of


_here = _Here()


class _Api(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        answers: dict[Any, Callable[..., Any]] = {
            Tensor.get_device: lambda t: 0 if label_of(t) == GPU else -1,
            Tensor.to: _to,
            Tensor.cuda: lambda t, *a, **k: _moved(t, GPU),
            Tensor.cpu: lambda t, *a, **k: _moved(t, CPU),
            Tensor.type_as: lambda t, other: _moved(t, label_of(other), other.dtype),
            Tensor.is_pinned: lambda t, *a: False,
        }
        if func in answers:
            return answers[func](*args, **options)
        for asked, answer in ((_DEVICE, lambda d: d), (_IS_CUDA, lambda d: d == GPU), (_IS_CPU, lambda d: d == CPU)):
            if func == asked:
                return answer(label_of(args[0]))
        if func in (Tensor.numpy, Tensor.__array__) and label_of(args[0]) == GPU:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy ({_place()})")
        if func is torch._C._nn._parse_to:  # type: ignore[attr-defined]  # of a module
            return func(*args, **options)
        if func is torch.device and args and isinstance(args[0], int):
            return GPU
        return self._called(func, args, options)

    def _called(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Any other function, on the device that it names or on that of its tensors."""
        options.pop("pin_memory", None)
        asked = options.get("device")
        device = None if asked is None else _named(asked)
        if device == GPU:
            options["device"] = CPU
        if func in (torch.as_tensor, torch.asarray) and isinstance(args[0], Tensor):
            return _moved(args[0], device or label_of(args[0]), options.get("dtype"))
        if func is Tensor.new_tensor and device is None:
            device = label_of(args[0])
        before = _here.around
        _here.around = GPU if device is None and any(label_of(t) == GPU for t in _tensors((args, options))) else CPU
        try:
            found = func(*args, **options)
        finally:
            _here.around = before
        if device in (CPU, GPU):
            for tensor in _tensors(found):
                _label(tensor, device)
        return found


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = list(_tensors((args, options)))
        on_gpu = any(label_of(t) == GPU for t in given)
        if on_gpu and name not in _BETWEEN and func.namespace != "c10d":
            _refuse_mixtures(func, list(_tensors([args[0], *args[2:3]])) if name in _BY_INDEX else given)
        asked = options.get("device")
        if asked is not None and torch.device(asked).type == "cuda":  # where `_Api` did not see the call
            options["device"] = CPU
        known = {t.untyped_storage()._cdata for t in given if t.layout == torch.strided}
        found = func(*args, **options)
        if func.is_view or (name in _BETWEEN and name != "_to_copy"):
            return found
        moved = asked is not None and "device" in options and torch.device(asked).type == "cuda"
        device = GPU if on_gpu or moved else CPU if given else _here.around
        for tensor in _tensors(found):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in known:
                _label(tensor, device)
        return found


def _refuse_mixtures(func: Any, tensors: list[Tensor]) -> None:
    """A tensor of no dimension may be on the CPU."""
    here = [tuple(t.shape) for t in tensors if t.dim() and label_of(t) == CPU]
    there = [tuple(t.shape) for t in tensors if label_of(t) == GPU]
    if here and there:
        place = f"{func} at {_place()}: on the CPU {here}, on cuda:0 {there}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices: {place}")


class _Generator(torch.Generator):
    """A generator that says it is on the GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)  # type: ignore[attr-defined]

    def __call__(cls, device: Any = "cpu") -> Any:
        return (_Generator if _named(device) == GPU else cls.real)()  # type: ignore[attr-defined]


class _Nothing:
    """A stream or an event: all is done when a call returns."""

    cuda_stream = 0
    device = GPU

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        answers = {"query": True, "elapsed_time": 1.0, "record_event": _Nothing()} if not name.startswith("__") else {}
        if name in ("record", "wait", "synchronize", "wait_stream", "wait_event", *answers):
            return lambda *args, **options: answers.get(name)
        raise AttributeError(name)


def _stand_in_for_torch_cuda() -> None:
    """torch.cuda with one device of 80 GiB, streams and events that do nothing, and gloo where NCCL is asked for."""
    properties = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=80 << 30, multi_processor_count=4)
    stream = _Nothing()
    nothing = ("set_device", "synchronize", "init", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all")
    counts = ("current_device", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    answers: dict[str, Any] = {name: None for name in (*nothing, "reset_peak_memory_stats", "ipc_collect")}
    answers |= {name: 0 for name in counts}
    answers |= {"is_available": True, "is_initialized": True, "is_bf16_supported": True}
    answers["device_count"] = int(os.environ[ASKED])
    answers |= {"get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": "stand-in"}
    answers |= {"current_stream": stream, "default_stream": stream, "stream": stream, "device": stream}
    answers |= {
        "device_of": stream,
        "mem_get_info": (79 << 30, 80 << 30),
        "memory_stats": {},
        "is_current_stream_capturing": False,
    }
    answers |= {"get_rng_state": torch.zeros(0, dtype=torch.uint8), "set_rng_state": None, "initial_seed": 0}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args, **options: 0)
    torch.Generator = _AnyGenerator("Generator", (), {"real": torch.Generator})  # type: ignore[misc]
    Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign,assignment]
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]
    Tensor.backward = _backward  # type: ignore[method-assign,assignment]
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _over_gloo(getattr(dist, name)))


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`, seen by `_Ops` alone: what is made out of no tensor is on the GPU."""
    before, _here.around = _here.around, label_of(tensor)
    try:
        torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
    finally:
        _here.around = before


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        if options.get("backend") == "nccl":
            options["backend"] = "gloo"
        return function(*("gloo" if a == "nccl" else a for a in args), **options)

    return call


def _texts(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, scale: float, causal: bool, sides: tuple[int | None, int | None]
) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
    """Each text of q [N,heads,D], k and v [N,kv_heads,D]: its rows, [q, k, v] [heads,t,D] and P [heads,t,t], in fp32.

    sides: the window, tokens to the left and to the right; -1 or None: all. What the kernel asks for is asserted.
    """
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert (begin.dtype, int(begin[-1])) == (torch.int32, len(q))
    left, right = (-1, 0) if causal else (-1 if side is None else side for side in sides)
    for start, stop in pairwise(begin.tolist()):
        x, y, z = (t[start:stop].transpose(0, 1).float() for t in (q, k, v))
        y, z = (t.repeat_interleave(len(x) // len(t), 0) for t in (y, z))
        at = torch.arange(stop - start)
        behind = at[:, None] - at
        hidden = (behind < -right if right >= 0 else behind != behind) | ((behind > left) & (left >= 0))
        yield slice(start, stop), [x, y, z], (x @ y.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _flash_forward(q, k, v, begin, begin_k, longest, longest_k, dropout, causal, debug, *, scale, **more):  # type: ignore[no-untyped-def]
    out = torch.empty_like(q)
    for rows, (_, _, z), p in _texts(q, k, v, begin, scale, causal, _sides(more)):
        out[rows] = (p @ z).transpose(0, 1).to(q.dtype)
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)


def _flash_backward(  # type: ignore[no-untyped-def]
    gradient, q, k, v, out, sums, begin, begin_k, longest, longest_k, dropout, causal, state, unused, *, scale, **more
):
    found = [torch.zeros(t.shape) for t in (q, k, v)]
    for rows, (x, y, z), p in _texts(q, k, v, begin, scale, causal, _sides(more)):
        g = gradient[rows].transpose(0, 1).float()
        of_p = g @ z.mT
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        for whole, part in zip(found, (of_scores @ y, of_scores.mT @ x, p.mT @ g), strict=True):
            heads = whole.shape[1]  # query heads that share a key head add up
            whole[rows] = part.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return tuple(part.to(q.dtype) for part in found)


def _sides(more: dict[str, Any]) -> tuple[int | None, int | None]:
    return more.get("window_size_left"), more.get("window_size_right")


if __name__ == "__main__":
    ask()
    from cqwen_dist.cli import main

    main()
