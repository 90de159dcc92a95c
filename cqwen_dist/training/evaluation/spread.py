"""Mean, deviation and quartiles of more values than fit into memory, over batches and ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import gather_objects, sum_over

_CUT = 14  # low bits of an fp32 that are dropped for the bin: a bin is at most 2^-9 wide relative to its values
_BINS = 1 << (32 - _CUT)
_AT_ONCE = 1 << 20  # values per block: bounds the memory of `add`
_KEPT = 1 << 19  # so many values are kept, for exact quartiles; more of them only as a histogram


class Spread:
    """All values while they are few (`kept`), then a histogram over fp32 bit patterns: count, sum and sum of squares
    per bin, 6 MiB on the device.

    Mean and deviation are exact. Quartiles of a histogram assume a uniform law within a bin, with the bin's mean and
    deviation. They are exact if all values of the bin are equal; otherwise the relative error is below 0.3 %.
    """

    def __init__(self, device: torch.device, kept: int = _KEPT) -> None:
        self._kept = kept
        self._sums = torch.zeros(3, _BINS, dtype=torch.float64, device=device)  # counts below 2^53 are exact
        self._few: list[Tensor] = []
        self._count = 0

    def add(self, values: Tensor) -> None:
        """Add values, fp32 of any shape, without host synchronisation."""
        self._few.append(values.detach().float().flatten())
        self._count += values.numel()
        if self._count > self._kept:
            self._into_bins()

    def _into_bins(self) -> None:
        for part in (part for values in self._few for part in values.split(_AT_ONCE)):
            bits = part.view(torch.int32)
            above = (part - (bits >> _CUT << _CUT).view(torch.float32)).double()  # exact distance from the edge
            place = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> _CUT) + _BINS // 2  # ordered like the floats
            for row, what in zip(self._sums, (torch.ones_like(above), above, above.square()), strict=True):
                row.index_add_(0, place, what)
        self._few = []

    def summary(self) -> dict[str, float]:
        """mean, median, std, iqr (S3 5.4) over all ranks; {} for fewer than two values. Collective. Call it once."""
        if int(sum_over(torch.tensor([self._count], device=self._sums.device))) <= self._kept:
            everyone = gather_objects(torch.cat([torch.zeros(0), *(part.cpu() for part in self._few)]).numpy())
            values = np.concatenate(everyone).astype(np.float64)
            if len(values) < 2:
                return {}
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            return {"mean": float(values.mean()), "median": middle, "std": float(values.std(ddof=1)), "iqr": high - low}
        self._into_bins()
        count, above, squares = sum_over(self._sums).cpu().numpy()
        used = np.flatnonzero(count)
        n, total = count[used], int(count.sum())
        if total < 2:
            return {}
        order = (used - _BINS // 2).astype(np.int32) << _CUT
        bits = np.where(order < 0, order ^ np.int32(0x7FFFFFFF), order) >> _CUT << _CUT
        edge = bits.view(np.float32).astype(np.float64)
        first, second = above[used] / n, squares[used] / n  # moments relative to the bin edge
        mean = float(((edge + first) * n).sum() / total)
        off = edge - mean
        std = float(np.sqrt(((off * off + 2 * off * first + second) * n).sum() / (total - 1)))
        half = np.sqrt(3 * np.maximum(second - first * first, 0.0))  # width / 2 of the uniform law of that deviation
        before = np.cumsum(n) - n

        # Like numpy, interpolate each quartile between the values of two ranks
        at = (total - 1) * np.array([0.25, 0.5, 0.75])
        ranks = np.stack([np.floor(at), np.ceil(at)])
        bins = np.searchsorted(before, ranks, side="right") - 1
        part = 2 * (ranks - before[bins] + 0.5) / n[bins] - 1
        low, high = edge[bins] + first[bins] + part * half[bins]
        lower, median, upper = (low + (high - low) * (at - ranks[0])).tolist()
        return {"mean": mean, "median": median, "std": std, "iqr": upper - lower}


class SpreadsOfU:
    """dist/U_loc_*, dist/U_scale_* over the dimensions that words see; dist/U_number_* over the others, if any."""

    def __init__(self, words: int, size: int, device: torch.device) -> None:
        parts = {"U": slice(words), "U_number": slice(words, size)}
        self._spreads = [
            (f"dist/{name}_{law}", law, dims, Spread(device))
            for name, dims in parts.items()
            for law in Cauchy._fields
            if dims.start != size
        ]

    def add(self, u: Cauchy) -> None:
        """Add U [N,C]."""
        for _, law, dims, spread in self._spreads:
            spread.add(getattr(u, law)[:, dims])

    def summary(self) -> dict[str, float]:
        """All metrics. Collective. Call it once."""
        return {f"{name}_{k}": v for name, *_, spread in self._spreads for k, v in spread.summary().items()}
