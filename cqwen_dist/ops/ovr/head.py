"""Arguments and results of this package's functions: a slice of the word head, the tokens' targets, the sums.

Letters: N tokens, C causal dimensions that words see, v words of the slice. U' of the tokens is a `Cauchy` [N, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.products import product
from cqwen_dist.tiles import CHUNK_BYTES


def chunk_rows(tokens: int, c: int) -> int:
    """Words n per chunk, so that neither [tokens, n] nor [n, c] in fp32 takes more than CHUNK_BYTES; at least 64."""
    return max(64, CHUNK_BYTES // (4 * max(1, tokens, c)))


class WordHead(NamedTuple):
    """Words [start, start + v) of the one-vs-rest head: S_k ~ W_k U' + b_k, P_k = P(S_k > C_k) (S0 4, S0 5.1)."""

    weight: Tensor  # [v, C] W: fp32, bf16 or fp64
    bias: Tensor | None  # [v] b
    threshold: Tensor  # [] or [v] C
    start: int = 0  # the slice's first word
    vocab_size: int | None = None  # words of the whole vocabulary, where known
    used_rows: int | None = None  # words of the whole vocabulary from here on are reserved and left out

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, threshold: Tensor | float, *place: int | None) -> WordHead:
        """As the constructor, whose last three arguments are `place`; the threshold may be a float."""
        if not isinstance(threshold, Tensor):
            real = torch.promote_types(weight.dtype, torch.float32)
            threshold = torch.tensor(threshold, dtype=real, device=weight.device)
        return cls(weight, bias, threshold, *place)  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """How many of the slice's rows are in use; they are the first."""
        v = self.weight.shape[0]
        return v if self.used_rows is None else max(0, min(v, self.used_rows - self.start))

    @property
    def limit(self) -> int | None:
        """How many words of the whole vocabulary are in use, where known."""
        return min((x for x in (self.vocab_size, self.used_rows) if x is not None), default=None)

    @property
    def words(self) -> int:
        """The denominator of a mean over the vocabulary: `limit`, or else the slice's own words."""
        return len(self.weight) if self.limit is None else self.limit

    @property
    def real(self) -> torch.dtype:
        """The dtype of elementwise maths and sums: fp32, or fp64 for an fp64 weight."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def take(self, rows: slice | Tensor) -> WordHead:
        """The head of these rows of the slice alone (a slice of them, or indices [m]); differentiable."""
        bias = None if self.bias is None else self.bias[rows]
        return WordHead(self.weight[rows], bias, self.threshold[rows] if self.threshold.ndim else self.threshold)

    def loc(self, u: Cauchy) -> Tensor:
        """loc_S [N, v] of U' [N, C], multiplied in the tokens' precision; fp32 (fp64 for fp64)."""
        loc = product(u.loc, self.weight.to(u.loc.dtype))
        return loc if self.bias is None else loc + self.bias.to(loc.dtype)

    def of_own(self, u: Cauchy) -> tuple[Cauchy, Tensor]:
        """(S, C - loc_S) [...] of one word for each U' [...,C], whose rows these are; in fp32 (fp64), of rows in the
        tokens' precision."""
        rows, u = self.weight.to(u.loc.dtype).to(self.real), u.to(self.real)
        loc = (u.loc * rows).sum(-1)
        loc = loc if self.bias is None else loc + self.bias.to(self.real)
        return Cauchy(loc, (u.scale * rows.abs()).sum(-1)), self.threshold.to(self.real) - loc

    def check(self, u: Cauchy) -> None:
        """Raises ValueError for a shape and TypeError for a dtype of the head or of U' [N, C] that does not fit.

        U' and weight are of one dtype, or U' is bf16 and the weight fp32 (a master).
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


class Targets(NamedTuple):
    """The tokens' part of the loss: constants without gradient; weights in fp32 (fp64 for fp64)."""

    row: Tensor  # [N] int64: the label's row in the slice, -1 for none
    token_weights: Tensor  # [N]: factor of each token in the loss, 0 for one that takes no part
    class_weights: Tensor | None  # [v]: factor of both terms of a word
    want_prob_sum: bool
    slope_limit: float = 0.0  # of |dBCE_ik / dloc_S_ik|, 1/nat, before the two weights; 0: none
    skip_labels: bool = False  # leave the entries at `row` out of the loss, the gradients and the sum of P


class OvrOutput(NamedTuple):
    """Sums over the slice's words in use; fp32 (fp64 for fp64)."""

    loss: Tensor  # scalar, differentiable
    per_token: Tensor  # [N] detached, without the token's weight; 0 where ignored
    prob_sum: Tensor | None  # [N] detached: sum of P, on demand
