"""Samples to a `Batch`: shifted once, padded on the right.

labels[t] = x[t+1] and numeric_labels[t] = v[t+1] inside each document. A document's last token has no label
(IGNORE_INDEX, 0), nor does a token followed by one that is not learnt. No later code shifts again.

Attention stays inside packed documents: `position_ids` restart at 0 at each document and at the padding, and
transformers builds the block mask from them (`masking_utils.find_packed_sequence_indices`). It does so only with
`attention_mask=None, use_cache=False`, so training and evaluation call the backbone that way: a 2-D mask would let
documents attend to each other. Padding is on the right, so no real token attends to it. Only the losses use
`Batch.attention_mask`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from cqwen_dist.batch import IGNORE_INDEX, Batch
from cqwen_dist.data.store import Sample

# Row lengths are multiples of 8: fewer distinct shapes, and aligned matrix products.
MULTIPLE = 8


def collate(samples: Sequence[Sample], *, pad_token_id: int, num_token_id: int, parts: int = 1) -> Batch:
    """Collate samples of any length. No samples give a single padding row.

    parts: number of ranks that will share the positions of each row (`Batch.part`). Returns: `Batch` [B,T] for B
    samples; T is the longest length rounded up to a multiple of 8 `parts`. A padding row has no label; it lets a rank
    without samples take part in the collectives.
    """
    rows = len(samples) or 1
    longest = max((sum(len(document.ids) for document in sample) for sample in samples), default=1)
    width = -(-longest // (MULTIPLE * parts)) * MULTIPLE * parts
    input_ids = np.full((rows, width), pad_token_id, dtype=np.int64)
    labels = np.full((rows, width), IGNORE_INDEX, dtype=np.int64)
    position_ids = np.zeros((rows, width), dtype=np.int64)
    numeric_values, numeric_labels = np.zeros((2, rows, width), dtype=np.float64)
    attention_mask, numeric_mask = np.zeros((2, rows, width), dtype=bool)
    steps = np.arange(width)
    if not samples:
        position_ids[0] = steps
    for row, sample in enumerate(samples):
        start = 0
        for document in sample:
            end = start + len(document.ids)
            input_ids[row, start:end] = document.ids
            numeric_values[row, start:end] = document.values
            attention_mask[row, start:end] = True
            position_ids[row, start:end] = steps[: end - start]
            labels[row, start : end - 1] = document.ids[1:]
            numeric_labels[row, start : end - 1] = document.values[1:]
            numeric_mask[row, start : end - 1] = document.targets[1:] & (document.ids[1:] == num_token_id)
            if document.learnt is not None:
                unlearnt = np.flatnonzero(~document.learnt[1:]) + start
                labels[row, unlearnt] = IGNORE_INDEX
                numeric_labels[row, unlearnt] = 0.0
                numeric_mask[row, unlearnt] = False
            start = end
        # After a single document the positions continue into the padding: without a restart, transformers uses the
        # faster plain causal kernels. After packed documents the padding counts as one more document.
        first = start if len(sample) == 1 else 0
        position_ids[row, start:] = steps[: width - start] + first
    dense = (input_ids, numeric_values, attention_mask, position_ids, labels, numeric_labels, numeric_mask)
    return Batch(*map(torch.from_numpy, dense))
