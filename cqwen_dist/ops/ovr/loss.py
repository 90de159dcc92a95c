"""The one-vs-rest loss of a slice of words, with a choice of implementations.

Score of word k at token i: S_ik ~ Cauchy(loc_i . W_k + b_k, scale_i . |W_k|) (S0 4), and P_ik = P(S_ik > C_k)
(S0 5.1). The loss of a token is the sum over words of the binary cross entropy of P_ik (S3 2.5.1). The sum has no
normaliser, so the losses of vocabulary slices on different ranks simply add up.

Shape letters: N tokens, C causal dimensions, v words of the slice.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import AS_WRITTEN, OvrOutput, Targets, TermOptions, WordHead
from cqwen_dist.ops.ovr.one_pass import Needs, log_norm, ovr_one_pass, visit
from cqwen_dist.ops.ovr.reference import ovr_reference
from cqwen_dist.ops.ovr.seen import Seen, Wanted
from cqwen_dist.ops.ovr.tile import TileMaths, TorchTile

KERNELS = ("triton",)
IMPLEMENTATIONS = ("auto", "chunked", "reference", *KERNELS)
HAS_TRITON = find_spec("triton") is not None  # part of torch's CUDA builds only


@dataclass(frozen=True)
class OvrOptions:
    """Options of the loss; `linear_ovr` documents each one."""

    class_weights: Tensor | None = None  # [v]
    impl: str = "auto"
    ignore_index: int = -100
    want_prob_sum: bool = False
    terms: TermOptions = AS_WRITTEN
    seen: Wanted | None = None  # what the pass also finds: `OvrOutput.seen`, `OvrOutput.best`


PLAIN = OvrOptions()


def ovr_loss(
    u: Cauchy,
    head: WordHead,
    labels: Tensor,
    token_weights: Tensor | None = None,
    options: OvrOptions = PLAIN,
    of_all: Callable[[Tensor], Tensor] | None = None,
) -> OvrOutput:
    """`linear_ovr` for U' [N, C] and a slice of the head; labels, token_weights [N]. Raises as `linear_ovr`.

    of_all: gives log sum_k exp(loc_S,k) [N] over the full vocabulary, for that over the slice; None: they are the same.
    """
    head.check(u)
    _check(u, head, labels, token_weights, options)
    # Labels become rows of the slice (-1: a label elsewhere), masks become token weights
    valid = labels != options.ignore_index
    inside = valid & (labels >= head.start) & (labels < head.start + head.rows)
    weights = u.loc.new_ones(len(labels), dtype=head.real)
    if token_weights is not None:
        weights = token_weights.detach().to(head.real)
    targets = Targets(
        row=torch.where(inside, labels - head.start, -1),
        token_weights=torch.where(valid, weights, 0.0),
        class_weights=None
        if options.class_weights is None
        else options.class_weights.detach().to(head.real).contiguous(),
        want_prob_sum=options.want_prob_sum,
        terms=options.terms,
        seen=None if options.seen is None else Seen(len(labels), head, options.seen),
    )
    part = head._replace(start=0, used_rows=head.rows)  # from here on rows count from the start of the slice
    maths = TorchTile() if options.impl == "reference" else _maths(options.impl, part)
    full = ovr_reference if options.impl == "reference" else partial(ovr_one_pass, maths=maths)
    with torch.autocast(u.loc.device.type, enabled=False):
        if options.terms.softmax_weight and (of_all is not None or options.impl != "reference"):
            norm = log_norm(u, part, targets, maths)
            targets = targets._replace(log_norm=norm if of_all is None else of_all(norm))
        loss, per_token, prob_sum, nll, *_ = full(u, part, targets)
        per_token = torch.where(valid, per_token, 0.0)
        nll = None if nll is None else torch.where(valid, nll, 0.0)
        if targets.seen is None:
            return OvrOutput(loss, per_token, prob_sum, nll)
        at = Cauchy(u.loc.detach(), u.scale.detach())
        if options.impl == "reference":  # it has no tiles
            visit(at, part, targets, Needs(), TorchTile())
        best = targets.seen.finish(at, part)
    return OvrOutput(loss, per_token, prob_sum, nll, targets.seen, best)


def runs_on(impl: str, device: torch.device) -> bool:
    """Whether an implementation runs on a device. Kernels need CUDA, or Triton's interpreter if it is enabled."""
    return impl not in KERNELS or device.type == "cuda" or bool(os.environ.get("TRITON_INTERPRET"))


def _check(u: Cauchy, head: WordHead, labels: Tensor, token_weights: Tensor | None, options: OvrOptions) -> None:
    n, v = len(u.loc), len(head.weight)
    if labels.shape != (n,) or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 of shape ({n},), found {labels.dtype} {tuple(labels.shape)}")
    for name, tensor, size in (("token_weights", token_weights, n), ("class_weights", options.class_weights, v)):
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), found {tuple(tensor.shape)}")
    if options.impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, found {options.impl!r}")
    if labels.device.type != "cpu":  # reading labels on a GPU would synchronise; the collator has checked them
        return
    limit = head.limit
    wrong = (labels < 0) if limit is None else (labels < 0) | (labels >= limit)
    bad = labels[wrong & (labels != options.ignore_index)]
    if len(bad):
        allowed = f"[0, {'vocabulary' if limit is None else limit}) or {options.ignore_index}"
        raise ValueError(f"labels must be in {allowed}, found {int(bad[0])}")


def _maths(impl: str, head: WordHead) -> TileMaths:
    """The tile maths of an implementation. The kernel supports fp32 only; fp64 uses torch operations.

    "auto" selects the kernel if possible: on an H200 it takes a quarter to a half of the time of the torch operations.
    Raises ValueError if `runs_on` is false.
    """
    if not runs_on(impl, head.weight.device):
        raise ValueError(f"impl {impl!r} needs CUDA tensors, found {head.weight.device}")
    fastest = impl == "auto" and head.weight.is_cuda and HAS_TRITON
    if head.real == torch.float64 or not (impl in KERNELS or fastest):
        return TorchTile()
    from cqwen_dist.ops.ovr.triton import TritonTile

    return TritonTile()
