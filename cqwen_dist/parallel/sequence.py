"""Attention of texts whose positions are split over the ranks of a group, by DeepSpeed's Ulysses.

Each rank has a part of every text's positions, and all heads. Two exchanges give it all positions of a part of the
heads, and its own positions of the result again:

    forward    all-to-all of q, k, v    [B,T/g,heads,D] -> [B,T,heads/g,D]    attention    all-to-all of its output
    backward   the same of the gradients, in reverse order

So every rank's gradients are those of the loss of *all* positions by its own positions, and a sum over the ranks is the
whole gradient. Nothing else in a model looks at other positions.

DeepSpeed's `DistributedAttention` does the exchanges. Its wrapper for transformers (`UlyssesSPAttentionHF`) takes one
micro-batch size for the whole run, gathers position ids in every layer, and replaces "sdpa" for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,T,heads,D], k and v [B,T,kv_heads,D] -> [B,T,heads,D]
Spread = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]


def over_sequence(group: ProcessGroup) -> Spread:
    """A function that runs an attention over the positions of all ranks: (attend, q, k, v of own positions) -> own.

    The group's size divides the heads, and divides the key heads or is a multiple of them: then key heads are repeated.
    Forward and backward are collective over the group.
    """
    from deepspeed.sequence.layer import DistributedAttention  # here: it takes seconds, and few runs need it

    spread = DistributedAttention(lambda q, k, v, attend: attend(q, k, v), group, scatter_idx=2, gather_idx=1)

    @torch.compiler.disable
    def run(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (times := group.size() // k.shape[2]) > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        out: Any = spread(q, k, v, 0, None, attend)
        return out

    return run
