"""Arguments and results in this package: a slice of the word head, the targets of the tokens, the sums.

Shape letters: N tokens, C causal dimensions of the word part, v words of the slice. U' is a `Cauchy` [N, C].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.products import product
from cqwen_dist.tiles import CHUNK_BYTES, kind_of


def chunk_rows(x: Tensor, c: int | None = None) -> int:
    """Number of words n per chunk, at least 64, so that [N, n] and [n, c] in fp32 each fit in CHUNK_BYTES.

    x: [N, C], on the device of the chunks. c: defaults to C.
    """
    return max(64, CHUNK_BYTES[kind_of(x.device.type)] // (4 * max(1, len(x), x.shape[1] if c is None else c)))


class WordHead(NamedTuple):
    """Words [start, start + v) of the one-vs-rest head: S_k ~ W_k U' + b_k, P_k = P(S_k > C_k) (S0 4, S0 5.1)."""

    weight: Tensor  # [v, C] W: fp32, bf16 or fp64
    bias: Tensor | None  # [v] b
    threshold: Tensor  # [] or [v] C
    start: int = 0  # id of the first word
    vocab_size: int | None = None  # number of words of the full vocabulary, if known
    used_rows: int | None = None  # ids from this one on are reserved and left out

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, threshold: Tensor | float, *place: int | None) -> "WordHead":
        """The constructor, but the threshold may be a float; `place` is (start, vocab_size, used_rows)."""
        if not isinstance(threshold, Tensor):
            real = torch.promote_types(weight.dtype, torch.float32)
            threshold = torch.tensor(threshold, dtype=real, device=weight.device)
        return cls(weight, bias, threshold, *place)  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """Number of rows in use; these are the first rows of the slice."""
        v = self.weight.shape[0]
        return v if self.used_rows is None else max(0, min(v, self.used_rows - self.start))

    @property
    def limit(self) -> int | None:
        """Number of words that the full vocabulary uses, if known."""
        return min((x for x in (self.vocab_size, self.used_rows) if x is not None), default=None)

    @property
    def real(self) -> torch.dtype:
        """Dtype of elementwise maths and sums: fp32, or fp64 for an fp64 weight."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def to(self, device: torch.device) -> "WordHead":
        """The same on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return self._replace(weight=self.weight.to(device), bias=bias, threshold=self.threshold.to(device))

    def take(self, rows: slice | Tensor) -> "WordHead":
        """The head of these rows only (a slice, or indices [m]); differentiable."""
        bias = None if self.bias is None else self.bias[rows]
        return WordHead(self.weight[rows], bias, self.threshold[rows] if self.threshold.ndim else self.threshold)

    def loc(self, u: Cauchy) -> Tensor:
        """loc_S [N, v] for U' [N, C], multiplied in the precision of U'; result fp32 (fp64 for fp64)."""
        loc = product(u.loc, self.weight.to(u.loc.dtype))
        return loc if self.bias is None else loc + self.bias.to(loc.dtype)

    def of_own(self, u: Cauchy) -> tuple[Cauchy, Tensor]:
        """(S, C - loc_S) [...] of one word for each U' [...,C]: row i belongs to U' i. Computed in fp32 (fp64), from
        rows rounded to the precision of U'."""
        rows, u = self.weight.to(u.loc.dtype).to(self.real), u.to(self.real)
        loc = (u.loc * rows).sum(-1)
        loc = loc if self.bias is None else loc + self.bias.to(self.real)
        return Cauchy(loc, (u.scale * rows.abs()).sum(-1)), self.threshold.to(self.real) - loc

    def check(self, u: Cauchy) -> None:
        """Raises ValueError for a wrong shape and TypeError for a wrong dtype of the head or of U' [N, C].

        U' and weight need one dtype, or bf16 for U' and fp32 for the weight (a master copy).
        """
        if u.loc.ndim != 2 or u.loc.shape != u.scale.shape:
            raise ValueError(f"loc_u, scale_u must be [N, C], found {tuple(u.loc.shape)}, {tuple(u.scale.shape)}")
        if self.weight.ndim != 2 or self.weight.shape[1] != u.loc.shape[1]:
            raise ValueError(f"weight must be [v, {u.loc.shape[1]}], found {tuple(self.weight.shape)}")
        v = len(self.weight)
        dtypes = (u.loc.dtype, u.scale.dtype, self.weight.dtype)
        if len(set(dtypes)) > 1 and dtypes != (torch.bfloat16, torch.bfloat16, torch.float32):
            found = f"{dtypes[0]}, {dtypes[1]}, weight {dtypes[2]}"
            raise TypeError(f"one dtype wanted (or bf16 with a weight in fp32), found {found}")
        if self.bias is not None and self.bias.shape != (v,):
            raise ValueError(f"bias must have shape ({v},), found {tuple(self.bias.shape)}")
        if self.threshold.shape not in ((), (v,)):
            raise ValueError(f"threshold must be a scalar or have shape ({v},), found {tuple(self.threshold.shape)}")


class TermOptions(NamedTuple):
    """Options of the terms of a token. Every implementation reads them here, so a new one needs no other argument."""

    slope_limit: float = 0.0  # limit of |dBCE_ik / dloc_S_ik| in 1/nat before the weights; 0: none
    softmax_weight: float = 0.0  # factor of -log softmax(loc_S) of the label, added to each token's loss


AS_WRITTEN = TermOptions()  # S0 5.1


class Targets(NamedTuple):
    """The targets of the tokens: constants without gradient. Weights are fp32 (fp64 for fp64)."""

    row: Tensor  # [N] int64: row of the label in the slice, -1 for none
    token_weights: Tensor  # [N]: factor per token, 0 for a masked token
    class_weights: Tensor | None  # [v]: factor of both terms of a word
    want_prob_sum: bool
    terms: TermOptions = AS_WRITTEN
    seen: Any = None  # a `Seen`, which reads the scores of the pass
    log_norm: Tensor | None = None  # [N] log sum_k exp(loc_S,k) over the full vocabulary, for the softmax term


class OvrOutput(NamedTuple):
    """Sums over the words in use; fp32 (fp64 for fp64)."""

    loss: Tensor  # scalar, differentiable
    per_token: Tensor  # [N] detached, without token weight; 0 for ignored tokens
    prob_sum: Tensor | None  # [N] detached: sum of P, on request
    nll: Tensor | None = None  # [N] detached: -log softmax(loc_S) of a label in the slice, else 0; with a softmax term
    seen: Any = None  # further statistics of the pass, a `Seen`, on request
    best: Any = None  # of it, the best words, a `TopWord`
