"""What every implementation of the OvR loss takes and gives, and the checks that its doors share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OvrInputs(NamedTuple):
    """A slice's loss, checked and reduced to what the sum needs.

    loc_u, scale_u [N, C], weight [v, C]: one dtype (fp32, bf16, fp64), or bf16 with a weight in fp32. bias [v] or
    None; threshold [] or [v].
    target [N] int64: the label's row in the slice, -1 for none. token_weights [N]: factor of each token in the loss,
    0 for one that takes no part. class_weights [v] or None. rows: the words summed are the slice's first ``rows``.
    The last five are constants: no gradient.
    """

    loc_u: Tensor
    scale_u: Tensor
    weight: Tensor
    bias: Tensor | None
    threshold: Tensor
    target: Tensor
    token_weights: Tensor
    class_weights: Tensor | None
    rows: int
    want_prob_sum: bool

    @property
    def real(self) -> torch.dtype:
        """The dtype of elementwise maths and sums: fp32, or fp64 for fp64 inputs."""
        return torch.promote_types(self.weight.dtype, torch.float32)


class OvrSums(NamedTuple):
    """loss: scalar, differentiable; per_token [N] (not yet times its weight) and prob_sum [N] or None: detached."""

    loss: Tensor
    per_token: Tensor
    prob_sum: Tensor | None


def check_head(
    loc_u: Tensor, scale_u: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | float
) -> Tensor:
    """Shapes and dtypes of the five inputs of loss and heads; returns the threshold as a tensor.

    Raises ValueError for a shape, TypeError for a dtype that does not fit.
    """
    if loc_u.ndim != 2 or loc_u.shape != scale_u.shape:
        raise ValueError(f"loc_u, scale_u must be [N, C], found {tuple(loc_u.shape)}, {tuple(scale_u.shape)}")
    if weight.ndim != 2 or weight.shape[1] != loc_u.shape[1]:
        raise ValueError(f"weight must be [v, {loc_u.shape[1]}], found {tuple(weight.shape)}")
    masters = weight.dtype == torch.float32 and loc_u.dtype == torch.bfloat16
    if loc_u.dtype != scale_u.dtype or not (loc_u.dtype == weight.dtype or masters):
        found = f"{loc_u.dtype}, {scale_u.dtype}, weight {weight.dtype}"
        raise TypeError(f"one dtype wanted (or bf16 with a weight in fp32), found {found}")
    v = weight.shape[0]
    if bias is not None and bias.shape != (v,):
        raise ValueError(f"bias must have shape ({v},), found {tuple(bias.shape)}")
    if not isinstance(threshold, Tensor):
        real = torch.promote_types(weight.dtype, torch.float32)
        threshold = torch.tensor(threshold, dtype=real, device=weight.device)
    if threshold.shape not in ((), (v,)):
        raise ValueError(f"threshold must be a scalar or have shape ({v},), found {tuple(threshold.shape)}")
    return threshold


def check_labels(labels: Tensor, ignore_index: int, limit: int | None) -> None:
    """Raises ValueError for a label that is neither ignore_index nor in [0, limit). For CPU tensors: it reads them."""
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= (limit if limit is not None else 1 << 62)))
    if bool(bad.any()):
        allowed = f"[0, {'vocabulary' if limit is None else limit})"
        raise ValueError(f"labels must be in {allowed} or {ignore_index}, found {int(labels[bad][0])}")


def rows_in_use(v: int, vocab_start: int, used_rows: int | None) -> int:
    """How many of the v rows of the slice that starts at vocab_start lie below used_rows."""
    return v if used_rows is None else max(0, min(v, used_rows - vocab_start))
