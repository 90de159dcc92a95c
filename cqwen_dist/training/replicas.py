"""Finds silent corruption: compares hashes of replicated tensors every few steps and before each save.

Copies of a parameter take equal steps, or come from the rank that took the step. So they stay equal to the bit, unless
a bit flips in the memory of one rank or a rank skips a collective. The loss hardly shows that. Compared are the heads,
their replicated moments and the adapters; vocabulary rows are compared within their replica group. Sharded moments have
no second copy. When a step gathers weights, it overwrites an earlier flip or spreads it to all copies. So for large
trained parameters only a flip since the last step is found (docs/running.md).
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import Cause, KnownFailure, gather_rows
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.zero.engine import Engine

_BLOCK = 1 << 20
_SPREAD = 0x3C6EF372FE94F82A  # even: an index times it, plus 1, is odd


class RanksDiffer(KnownFailure):
    """Copies differ after a step. A resume takes the steps since the last checkpoint again."""

    cause = Cause("ranks that differ", passing=True)


@dataclass
class Replicas:
    """Compares the copies of replicated tensors. State and results are the same on all ranks."""

    EVERY = 100  # steps between two comparisons

    engine: Engine
    groups: Groups
    good: int = 0  # the last step with equal copies

    def check(self, step: int, due: bool = False) -> None:
        """Compare every `EVERY` steps and if `due`. Collective over the world. Raises `RanksDiffer` on all ranks."""
        if self.groups.world_size == 1 or not (due or step % self.EVERY == 0):
            return
        # (name, tensor, kinds): ranks with equal rank % kinds have copies of the same tensor
        rows, heads = self.groups.vocab_size, self.engine.heads.copies()
        copies = [(name, value, max(1, rows * member.has_rows)) for member, name, value in heads]
        if self.engine.settings.zero_stage < 3:
            copies += [(feature.name, feature.parameter, 1) for feature in self.engine.feature_members]
        # One hash a tensor [world, tensors]: ranks exchange a few kB, not the parameters
        device = self.engine.device  # the heads' moments may be on the host
        hashes = gather_rows(torch.stack([bit_hash(value).to(device) for _, value, _ in copies])).cpu()
        for (name, _, kinds), values in zip(copies, hashes.T.tolist(), strict=True):
            if odd := _odd(values, kinds):
                equal = f"all ranks were equal after step {self.good}"
                raise RanksDiffer(f"after step {step} {name} is not equal on rank {odd}; {equal}")
        self.good = step


def _odd(values: list[int], kinds: int) -> str:
    """The ranks that differ from the majority of their kind; "" if all are equal."""
    for kind in range(kinds):
        ranks = range(kind, len(values), kinds)
        (usual, count), *others = Counter(values[rank] for rank in ranks).most_common()
        if others:
            clear = 2 * count > len(ranks)
            which = ", ".join(str(rank) for rank in ranks if not clear or values[rank] != usual)
            return which if clear else f"{which} (no majority tells which of them is right)"
    return ""


@torch.no_grad()
def bit_hash(value: Tensor) -> Tensor:
    """A hash of all bits, [] int64 on the tensor's device, without host synchronisation.

    The sum modulo 2^64 of all bit patterns, each times an odd factor from its index. A flipped bit always changes the
    hash (an odd factor is invertible); swapping two values nearly always does.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.detach().reshape(-1).view(kinds[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):  # in blocks, as the int64 copy is up to eight times as large
        block = bits[start : start + _BLOCK].long()
        place = torch.arange(start, start + len(block), device=bits.device)
        total += (block * (place * _SPREAD + 1)).sum()
    return total
