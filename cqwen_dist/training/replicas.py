"""Finds silent corruption: hashes of what must be equal on all ranks are compared every few steps and before a save.

Copies of a parameter take equal steps, or are gathered from the rank that took it. So they stay equal to the bit unless
a bit flips in one rank's memory or a rank left out a collective. The loss hardly shows that. The heads, those of their
moments that all ranks keep, and the adapters are compared; rows of the vocabulary within their replica group. What one
rank alone keeps has no second copy. Where a step gathers weights, an earlier flip is gone or in every copy by then: of
large parameters that train, only a flip since the last step is found (docs/running.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from cqwen_dist.parallel.collectives import gather_rows
from cqwen_dist.parallel.groups import Groups
from cqwen_dist.training.zero.engine import Engine

_BLOCK = 1 << 20
_SPREAD = 0x3C6EF372FE94F82A  # even: an index times it, plus 1, is odd


class RanksDiffer(RuntimeError):
    """Copies differ after a step. again: also after the steps were taken again from a checkpoint."""

    def __init__(self, text: str, step: int, again: bool) -> None:
        super().__init__(text)
        self.step, self.again = step, again


class Replicas:
    """Compares the copies that ranks hold. The same on every rank."""

    def __init__(self, engine: Engine, groups: Groups, every: int) -> None:
        """every: steps between two comparisons; 0: never."""
        self.engine, self.groups = engine, groups
        self.every = every if groups.world_size > 1 else 0
        self.good = 0  # the last step after which all were equal
        self._suspect: tuple[int, Tensor] | None = None  # the step where they differed, and its hashes

    def check(self, step: int, due: bool = False) -> str:
        """Compare after every n-th step and where `due`. Collective over the world.

        Raises `RanksDiffer` on every rank alike. A step at which the copies differed may be taken again: if they are
        equal then, this returns a text that names the machine at fault, else "".
        """
        again = self._suspect is not None and step == self._suspect[0]
        if not self.every or not (due or again or step % self.every == 0):
            return ""
        copies = list(self._copies())
        device = self.engine.runtime.device  # the heads' moments may be on the host
        hashes = gather_rows(
            torch.stack([bit_hash(value).to(device) for _, value, _ in copies])
        ).cpu()  # [world, tensors]
        for (name, _, kinds), values in zip(copies, hashes.T.tolist(), strict=True):
            if odd := _odd(values, kinds):
                text = f"{name} is not equal on rank {odd}, and was equal after step {self.good}"
                error = RanksDiffer(text, step, again=self._suspect is not None)
                self._suspect = step, hashes
                raise error
        self.good = step
        if self._suspect is None or not again:
            return ""
        faulty = (hashes != self._suspect[1]).any(1).nonzero().flatten().tolist()
        self._suspect = None
        machine = f"the machine of rank {', '.join(map(str, faulty))}" if len(faulty) < len(hashes) else "some machine"
        return f"step {step} was taken again and all ranks agree: it was a passing fault of {machine}"

    def _copies(self) -> Iterator[tuple[str, Tensor, int]]:
        """(name, tensor, kinds): ranks that are equal modulo `kinds` hold copies of each other."""
        for member, name, value in self.engine.heads.copies():
            yield name, value, self.groups.vocab_size if member.has_rows else 1
        if self.engine.settings.zero_stage < 3:
            for feature in self.engine.feature_members:
                yield feature.name, feature.parameter, 1


def _odd(values: list[int], kinds: int) -> str:
    """The ranks whose value differs from the majority of their kind; "" if all are equal."""
    for kind in range(kinds):
        ranks = range(kind, len(values), kinds)
        (usual, count), *others = Counter(values[rank] for rank in ranks).most_common()
        if others:
            clear = 2 * count > len(ranks)
            which = ", ".join(str(rank) for rank in ranks if not clear or values[rank] != usual)
            return which if clear else f"{which} (which of them is right shows after a replay)"
    return ""


@torch.no_grad()
def bit_hash(value: Tensor) -> Tensor:
    """[] int64, on the tensor's device, without synchronisation: a hash of all bits.

    The sum modulo 2^64 of the bit patterns, each times an odd number from its index: one changed bit always changes it,
    swapping two numbers nearly always.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = value.detach().reshape(-1).view(kinds[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        place = torch.arange(start, start + len(block), device=bits.device)
        total += (block * (place * _SPREAD + 1)).sum()
    return total
