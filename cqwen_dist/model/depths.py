"""The states of some of the backbone's layers, here and averaged over a text so far, which a side network reads with z.

z tells what comes next, and little of what the text said. The middle layers tell more of it, and a mean keeps what any
position saw.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def states_seen(transformer: nn.Module, depths: int) -> Iterator[list[Tensor]]:
    """Inside, a call of the transformer appends the states [B,T,H] at all but the last of `depths` evenly spaced depths
    (the last is z)."""
    layers: Any = transformer.layers if depths else []
    seen: list[Tensor] = []

    def see(module: nn.Module, given: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for at in range(1, depths):
            stack.enter_context(layers[round(len(layers) * at / depths) - 1].register_forward_hook(see))
        yield seen


def with_means(states: Sequence[Tensor], positions: Tensor | None, mask: Tensor | None, cache: Any) -> Tensor:
    """states [B,T,H] each -> these side by side, and their means over each text so far, [B,T,2 * len(states) * H].

    A text's first position does not count: its states are huge there, and say nothing. positions, mask: as in
    `Beside.behind`. cache: keeps the sums for the tokens that follow, if it is not None.
    """
    before = getattr(cache, "sums_of_states", None)
    at = torch.arange(states[0].shape[1], device=states[0].device).expand(states[0].shape[:2])
    real = torch.ones_like(at, dtype=torch.bool) if mask is None else mask[:, -at.shape[1] :].bool()
    first = real.cumsum(1) == (1 if before is None else 0) if positions is None else positions == 0
    first = first & real
    counted = (real & ~first)[..., None]
    x = torch.cat([*(state.float() for state in states), torch.ones_like(counted)], -1) * counted
    sums = since(x.movedim(-1, 0), torch.where(first, at, -1).cummax(1).values, before)
    if cache is not None:
        cache.sums_of_states = sums[..., -1]
    means = (sums[:-1] / sums[-1].clamp(min=1)).movedim(0, -1)
    return torch.cat([*states, means.to(states[0].dtype)], -1)


def since(own: Tensor, begin: Tensor, before: Tensor | None) -> Tensor:
    """Sums of [...,B,T] from begin [B,T] to each position. A negative begin also adds `before` [...,B]."""
    sums = own.cumsum(-1)
    sums = sums - F.pad(sums, (1, 0))[..., :-1].gather(-1, begin.clamp(min=0).expand_as(sums))
    return sums if before is None else sums + (begin < 0) * before.unsqueeze(-1)
