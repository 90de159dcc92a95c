"""`ops.ovr.scores` over a vocabulary whose rows are spread over the ranks of a group; for evaluation, no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.ops.ovr.head import WordHead
from cqwen_dist.ops.ovr.scores import OvrScores, ovr_scores
from cqwen_dist.parallel.mappings import exchange_counts, gather_tokens, scatter_sum_tokens
from cqwen_dist.parallel.vocab_parallel import gather_law


@torch.no_grad()
def vocab_parallel_scores(
    u: Cauchy, head: WordHead, labels: Tensor, group: ProcessGroup | None, prob_thresholds: Sequence[float] = ()
) -> OvrScores:
    """Scores of this rank's own tokens U' [N_r,C], labels [N_r] (N_r may differ, may be 0) over the whole vocabulary.

    head: this rank's rows. Tokens are gathered in the group and every rank scores its rows; normalisers are gathered
    and added as logarithms, what the label's owner alone knows is summed. prob_thresholds and what is raised: as
    `ovr_scores`. Collective over `group`.
    """
    if group is None or group.size() == 1:
        return ovr_scores(u, head, labels, prob_thresholds)
    counts, size = exchange_counts(len(u.loc), group, u.loc.device), group.size()
    every = gather_law(u, counts, group)
    part = ovr_scores(every, head, gather_tokens(labels, counts, group), prob_thresholds)
    n = len(part.log_norm)
    everyone = gather_tokens(part.log_norm, [n] * size, group).view(size, n)
    start = sum(counts[: group.rank()])
    summed = torch.cat([torch.stack([part.label_loc, part.label_log_p], 1), part.above], 1)
    own = scatter_sum_tokens(summed, counts, group)
    log_norm = everyone.logsumexp(0)[start : start + counts[group.rank()]]
    return OvrScores(log_norm, own[:, 0], own[:, 1], own[:, 2:])
