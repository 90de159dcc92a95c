"""Mean, deviation and quartiles of more values than fit into memory, over batches and ranks."""

import numpy as np
import torch
from torch import Tensor

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.collectives import gather_objects

_AT_ONCE = 1 << 20  # values per block: bounds the memory of `add`
KEPT = 1 << 19  # values that are kept for quartiles, over all ranks


class Spread:
    """Exact mean and deviation; quartiles of all values while they are few, else of evenly spaced rows."""

    def __init__(self, kept: int = KEPT) -> None:
        """kept: values that this rank keeps, at most."""
        self._kept, self._every = kept, 1
        self._rows: list[Tensor] = []
        self._moments: list[Tensor] = []  # count, mean, sum of squared distances from it, of each block

    def add(self, values: Tensor) -> None:
        """Add values [N,D] without host synchronisation."""
        for block in values.detach().split(max(1, _AT_ONCE // values.shape[1])) if len(values) else ():
            exact = block.double()
            mean = exact.mean()
            self._moments.append(
                torch.stack([torch.full_like(mean, block.numel()), mean, (exact - mean).square().sum()])
            )
        self._rows.append(values.detach()[:: self._every].float())
        while sum(rows.numel() for rows in self._rows) > max(self._kept, values.shape[1]):
            self._rows, self._every = [torch.cat(self._rows)[::2]], 2 * self._every

    def summary(self) -> dict[str, float]:
        """mean, median, std, iqr (S3 5.4) over all ranks; {} for fewer than two values. Collective."""
        moments = torch.stack(self._moments).cpu().numpy() if self._moments else np.empty((0, 3))
        everyone = gather_objects((moments, torch.cat([rows.flatten().cpu() for rows in self._rows]).numpy()))
        count, mean, squares = np.concatenate([of_rank for of_rank, _ in everyone]).T
        if count.sum() < 2:
            return {}
        overall = (count * mean).sum() / count.sum()
        variance = (squares + count * (mean - overall) ** 2).sum() / (count.sum() - 1)
        rows = np.concatenate([of_rank for _, of_rank in everyone]).astype(np.float64)
        low, middle, high = np.quantile(rows, [0.25, 0.5, 0.75]).tolist()
        return {"mean": float(overall), "median": middle, "std": float(np.sqrt(variance)), "iqr": high - low}


class SpreadsOfU:
    """dist/U_loc_*, dist/U_scale_* over the dimensions that words see; dist/U_number_* over the others, if any."""

    def __init__(self, words: int, size: int, world: int) -> None:
        parts = {"U": slice(words), "U_number": slice(words, size)}
        self._spreads = [
            (f"dist/{name}_{law}", law, dims, Spread(KEPT // world))
            for name, dims in parts.items()
            for law in Cauchy._fields
            if dims.start != size
        ]

    def add(self, u: Cauchy) -> None:
        """Add U [N,C]."""
        for _, law, dims, spread in self._spreads:
            spread.add(getattr(u, law)[:, dims])

    def of_words(self) -> Cauchy:
        """The dimensions that words see, of U at evenly spaced positions of this rank [n,C_w]."""
        return Cauchy(*(torch.cat(spread._rows) for _, _, dims, spread in self._spreads if dims.start is None))

    def summary(self) -> dict[str, float]:
        """All metrics. Collective. Call it once."""
        return {f"{name}_{k}": v for name, *_, spread in self._spreads for k, v in spread.summary().items()}
