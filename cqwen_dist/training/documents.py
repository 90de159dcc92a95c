"""Tells transformers, from the host's copy of a batch, whether a row holds several documents.

transformers asks the positions on the device (`masking_utils.find_packed_sequence_indices`), and the host waits for the
answer in each forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils

from cqwen_dist.batch import Texts

ASKS = "find_packed_sequence_indices"


@contextmanager
def documents_of(texts: Texts, rows: int) -> Iterator[None]:
    """Inside, forward passes are of a batch with these texts in so many rows."""
    packed = len(texts.lengths) > rows

    def documents(positions: Tensor) -> Tensor | None:
        """The number of each position's document in its row [B,T]; None where rows hold one each."""
        if not packed:
            return None
        return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1)

    asked = getattr(masking_utils, ASKS, None)
    setattr(masking_utils, ASKS, documents)
    try:
        yield
    finally:
        setattr(masking_utils, ASKS, asked)
