"""Attention over texts that are split across ranks along the positions (DeepSpeed's Ulysses).

Each rank keeps a slice of every text, with all heads. One exchange gives it all positions for a slice of the heads, a
second one returns the output at its positions:

    forward    all-to-all of q, k, v    [B,T/g,heads,D] -> [B,T,heads/g,D]    attention    all-to-all of its output
    backward   the same of the gradients, in reverse order

Each rank then has the gradient of the *total* loss with respect to its positions, and the sum over ranks is the full
gradient. No other layer looks at other positions.

DeepSpeed's `DistributedAttention` does the exchanges. Its wrapper for transformers (`UlyssesSPAttentionHF`) takes one
micro-batch size for the whole run, gathers position ids in every layer, and replaces "sdpa" for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B,T,heads,D], k and v [B,T,kv_heads,D] -> [B,T,heads,D]
Spread = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]


def over_sequence(group: ProcessGroup) -> Spread:
    """Build (attend, q, k, v of this rank's positions) -> output at these positions, for attention over all positions.

    The group size divides the heads. It divides the key heads, or is a multiple (key heads are then repeated).
    Forward and backward are collective over the group.
    """
    from deepspeed.sequence.layer import DistributedAttention  # here: it takes seconds, and few runs need it

    spread = DistributedAttention(lambda q, k, v, attend: attend(q, k, v), group, scatter_idx=2, gather_idx=1)

    @torch.compiler.disable
    def run(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (times := group.size() // k.shape[2]) > 1:
            k, v = (x.repeat_interleave(times, dim=2) for x in (k, v))
        return spread(q, k, v, 0, None, attend)

    return run
