"""Time and memory of the one-vs-rest loss, compared with a lower bound and with other heads.

Each contender does one forward and one backward pass, with gradients for all inputs:

this        ``linear_ovr``
chunked, triton  ``linear_ovr`` with that implementation, on a GPU
floor       only the six matrix products, in the same tiles as `this`: no implementation of this loss can be faster
seed        the formula in S0 5.1 as written (arctan, one-hot, eps = 1e-7), materialised, with autograd
stable      the stable formulas, materialised, with autograd
softmax     an ordinary head, materialised: one product and cross entropy
liger, cce  an ordinary head with Liger-Kernel and ml-cross-entropy, if installed (CUDA). Liger 0.8.5 takes its CuTe
            kernel by itself where nvidia-cutlass-dsl is installed
torch       an ordinary head with torch's linear_cross_entropy (2.13)

All contenders are timed in turn, round by round. A ratio is taken within a round; "best" compares the fastest rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Column, Table
from torch import Tensor

from benchmarks.step_memory import peak_growth_bytes
from benchmarks.timing import device_name, in_turn, seconds_of, spread
from cqwen_dist.ops.ovr import linear_ovr
from cqwen_dist.ops.ovr.loss import IMPLEMENTATIONS
from cqwen_dist.ops.products import dtype_of
from cqwen_dist.tiles import tile_shape

PLAIN_COPIES = {"seed": 9, "stable": 14, "softmax": 4}  # live [N, V] fp32 tensors in the materialising contenders
OURS = ("this", "chunked", "triton")  # implementations of this loss
ON_CUDA = ("triton", "chunked", "liger", "cce")  # contenders that need CUDA; on a CPU, "this" is chunked
MIB = 1 << 20


class Problem(NamedTuple):
    """The inputs: loc_u, scale_u [N, H], weight [V, H] in the chosen dtype; threshold [V] fp32; labels [N]."""

    loc_u: Tensor
    scale_u: Tensor
    weight: Tensor
    threshold: Tensor
    labels: Tensor

    def clear(self) -> None:
        """Drop all gradients."""
        for leaf in self[:4]:
            leaf.grad = None


def run(
    tokens: int = 512,
    hidden: int = 896,
    vocab: int = 151_936,
    dtype: str = "fp32",
    device: str = "auto",
    impl: str = "auto",
    rounds: int = 5,
    only: list[str] | None = None,
    plain_limit_gib: float = 8.0,
) -> dict[str, Any]:
    """Measures time and peak extra memory for all contenders, or for the floor and those in ``only``.

    dtype: fp32 or bf16. device: cpu, cuda, or auto (cuda if available). impl: as in ``linear_ovr``. A materialising
    contender that would need more than plain_limit_gib is skipped. Returns a JSON-ready dict: the shape, ``rows``
    (name, seconds median/min/max, ratio_to_floor median/min/max/best, extra_mib beyond inputs and gradients or None,
    tokens_per_second), ``skipped`` (name: reason). A contender that fails is skipped.
    Raises ValueError for an unknown dtype, device, impl or contender, and if the floor fails.
    """
    place = _checked(dtype, device, impl)
    problem = make_problem(tokens, hidden, vocab, dtype_of(dtype), place)
    steps, skipped = _steps(problem, impl, only, plain_limit_gib)
    warm = {name: partial(extra_mib, step, problem, place) for name, step in steps.items()}
    extra = in_turn(warm, 1, skipped)

    timed = {name: partial(seconds_of, one_step(steps[name], problem), place) for name in extra}
    seconds = in_turn(timed, rounds, skipped)
    if "floor" in skipped:
        raise ValueError(f"the products alone must run, found {skipped['floor']}")
    rows = []
    for name, times in seconds.items():
        ratios = [t / f for t, f in zip(times, seconds["floor"], strict=True)]
        rows.append(
            {
                "name": name,
                "seconds": spread(times),
                "ratio_to_floor": {**spread(ratios), "best": min(times) / min(seconds["floor"])},
                "extra_mib": extra[name][0],
                "tokens_per_second": tokens / statistics.median(times),
            }
        )
    return {
        "tokens": tokens,
        "hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "device": device_name(place),
        "impl": impl,
        "torch": torch.__version__,
        "rounds": rounds,
        "floor_tflops": 12 * tokens * hidden * vocab / statistics.median(seconds["floor"]) / 1e12,
        "rows": rows,
        "skipped": skipped,
    }


def _checked(dtype: str, device: str, impl: str) -> torch.device:
    """Validate the names and return the device. The command line validates the sizes. Raises ValueError."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, found {impl!r}")
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype must be fp32 or bf16, found {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device must be cpu, or cuda if available, found {device!r}")
    return torch.device(device)


def _steps(
    problem: Problem, impl: str, only: list[str] | None, plain_limit_gib: float
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """({name: step} for contenders that can run, {name: reason} if not). Raises ValueError for an unknown name."""
    makers = contenders(impl)
    names = list(makers) if only is None else ["floor", *(name for name in only if name != "floor")]
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ValueError(f"contenders are {sorted(makers)}, found {unknown}")
    steps, skipped = {}, {}
    for name in names:
        gib = PLAIN_COPIES.get(name, 0) * problem.labels.shape[0] * problem.weight.shape[0] * 4 / 2**30
        if gib > plain_limit_gib:
            skipped[name] = f"about {gib:.1f} GiB of [N, V] tensors"
            continue
        if name in ON_CUDA and not problem.weight.is_cuda:
            skipped[name] = "needs CUDA"
            continue
        try:
            steps[name] = makers[name](problem)
        except ImportError as error:
            skipped[name] = str(error)
    return steps, skipped


def table(result: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    shape = f"N={result['tokens']:,} H={result['hidden']:,} V={result['vocab']:,} {result['dtype']}"
    names = ("seconds (min-max)", "x floor (min-max)", "best", "extra memory", "tokens/s")
    columns = (Column(name, justify="right") for name in names)
    title = f"OvR loss, forward + backward, {shape}, {result['device']}, {result['rounds']} rounds"
    out = Table("contender", *columns, title=title)
    for row in result["rows"]:
        s, r, mib = row["seconds"], row["ratio_to_floor"], row["extra_mib"]
        out.add_row(
            row["name"],
            f"{s['median']:.4g} ({s['min']:.4g}-{s['max']:.4g})",
            f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})",
            f"{r['best']:.2f}",
            "not known" if mib is None else f"{mib:,.0f} MiB",
            f"{row['tokens_per_second']:,.0f}",
        )
    for name, why in result["skipped"].items():
        out.add_row(name, "skipped", why, "", "", "")
    return out


def contenders(impl: str) -> dict[str, Callable[[Problem], Callable[[], object]]]:
    """Name -> function that builds a step (forward and backward) for a problem. It raises ImportError if missing."""
    return {
        "floor": _floor,
        "this": partial(_ours, impl=impl),
        "chunked": partial(_ours, impl="chunked"),
        "triton": partial(_ours, impl="triton"),
        "seed": lambda p: lambda: _seed_formula(p).backward(),
        "stable": partial(_ours, impl="reference"),
        "softmax": lambda p: lambda: F.cross_entropy((p.loc_u @ p.weight.T).float(), p.labels).backward(),
        "liger": _liger,
        "cce": _cce,
        "torch": _torch,
    }


def one_step(step: Callable[[], object], problem: Problem) -> Callable[[], object]:
    """A step that first clears the gradients, as in training."""

    def cleared() -> object:
        problem.clear()
        return step()

    return cleared


def stable_loss(p: Problem) -> Tensor:
    """The plain formula, materialised. With a float64 problem it is the reference for the other contenders."""
    return linear_ovr(p.loc_u, p.scale_u, p.weight, None, p.threshold, p.labels, impl="reference").loss


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def _ours(p: Problem, impl: str) -> Callable[[], Tensor]:
    return lambda: _backward(linear_ovr(p.loc_u, p.scale_u, p.weight, None, p.threshold, p.labels, impl=impl).loss)


def _floor(p: Problem) -> Callable[[], object]:
    """Two products in forward and four for the gradients, tile by tile, into preallocated buffers."""
    x, g, w = (leaf.detach() for leaf in p[:3])
    t, n = tile_shape(x.shape[0], w.shape[0], w.shape[1], x.device.type)

    def step() -> None:
        d_x, d_g, d_w = torch.zeros_like(x), torch.zeros_like(g), torch.empty_like(w)
        spare = w.new_empty(n, w.shape[1])
        for block in range(0, w.shape[0], n):
            words = w[block : block + n]
            for start in range(0, x.shape[0], t):
                some = slice(start, start + t)
                a, b = x[some] @ words.T, g[some] @ words.T
                d_x[some].addmm_(a, words)
                d_g[some].addmm_(b, words)
                beta = float(start > 0)
                d_w[block : block + n].addmm_(a.T, x[some], beta=beta)
                spare[: words.shape[0]].addmm_(b.T, g[some], beta=beta)
        p.loc_u.grad, p.scale_u.grad, p.weight.grad = d_x, d_g, d_w

    return step


def _seed_formula(p: Problem) -> Tensor:
    """S0 5.1 as written: P = 1/2 + arctan((loc - C)/scale)/pi, eps = 1e-7, one-hot labels; summed."""
    eps = 1e-7
    loc = (p.loc_u @ p.weight.T).float()
    scale = (p.scale_u @ p.weight.abs().T).float()
    prob = 0.5 + torch.atan((loc - p.threshold) / scale) / math.pi
    one_hot = torch.zeros_like(prob).scatter_(1, p.labels[:, None], 1.0)
    return -(one_hot * torch.log(prob + eps) + (1.0 - one_hot) * torch.log(1.0 - prob + eps)).sum()


def _liger(p: Problem) -> Callable[[], object]:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda: loss(p.weight, p.loc_u, p.labels).backward()


def _cce(p: Problem) -> Callable[[], object]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda: linear_cross_entropy(p.loc_u, p.weight, p.labels).backward()


def _torch(p: Problem) -> Callable[[], object]:
    try:
        from torch.nn.functional import linear_cross_entropy
    except ImportError:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy") from None
    return lambda: linear_cross_entropy(p.loc_u, p.weight, p.labels).backward()


def make_problem(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, spread: bool = False
) -> Problem:
    """Random inputs with the magnitudes in a trained head: row std 0.0156, C = 15, scale_U = 1e-3.

    spread: inputs for an error check: scores on both sides of C = 0, and scales over several orders of magnitude.
    """
    make = torch.Generator(device).manual_seed(0)
    loc_u = torch.randn(tokens, hidden, device=device, generator=make).to(dtype)
    weight = torch.empty(vocab, hidden, dtype=dtype, device=device).normal_(std=0.0156, generator=make)
    scale_u = torch.full_like(loc_u, 1e-3)
    threshold = torch.full((vocab,), 15.0, device=device)
    if spread:
        scale_u = torch.rand(tokens, hidden, device=device, generator=make).to(dtype)
        threshold = torch.randn(vocab, device=device, generator=make)
    labels = torch.randint(vocab, (tokens,), device=device, generator=make)
    problem = Problem(loc_u, scale_u, weight, threshold, labels)
    for leaf in problem[:4]:
        leaf.requires_grad_()
    return problem


def extra_mib(step: Callable[[], object], p: Problem, device: torch.device) -> float | None:
    """Peak memory growth in one step, without the gradients, which outlive the step."""
    p.clear()
    growth = peak_growth_bytes(step, device)
    gradients = sum(leaf.grad.nbytes for leaf in p[:4] if leaf.grad is not None)
    return None if growth is None else (growth - gradients) / MIB
