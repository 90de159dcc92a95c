"""`ops.ovr_scores` over a vocabulary whose rows are spread over the ranks of a group; for evaluation, no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.ops.ovr_scores import OvrScores, ovr_scores
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens


@torch.no_grad()
def vocab_parallel_scores(
    loc_u: Tensor,
    scale_u: Tensor,
    weight_shard: Tensor,
    bias_shard: Tensor | None,
    threshold_shard: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_start: int,
    **options: Any,
) -> OvrScores:
    """Scores of this rank's own tokens [N_r] (N_r may differ, may be 0) over the whole vocabulary.

    Tokens are gathered in the group, every rank scores its rows; normalisers are gathered and added as logarithms,
    what the label's owner alone knows is summed. Options are `ovr_scores`'s. Collective over `group`.
    """
    if group is None or group.size() == 1:
        return ovr_scores(
            loc_u, scale_u, weight_shard, bias_shard, threshold_shard, labels, vocab_start=vocab_start, **options
        )
    counts = exchange_counts(loc_u.shape[0], group, loc_u.device)
    part = ovr_scores(
        gather_tokens(loc_u, counts, group),
        gather_tokens(scale_u, counts, group),
        weight_shard,
        bias_shard,
        threshold_shard,
        gather_tokens(labels, counts, group),
        vocab_start=vocab_start,
        **options,
    )
    n, size = part.log_norm.shape[0], group.size()
    everyone = gather_tokens(part.log_norm, [n] * size, group).view(size, n)
    start = sum(counts[: group.rank()])
    summed = torch.cat([torch.stack([part.label_loc, part.label_log_p], 1), part.above], 1)
    own = scatter_sum_tokens(summed, counts, group)
    log_norm = everyone.logsumexp(0)[start : start + counts[group.rank()]]
    return OvrScores(log_norm, own[:, 0], own[:, 1], own[:, 2:])
