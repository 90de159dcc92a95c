"""Answers transformers' question whether rows are packed from the CPU copy of the batch.

transformers reads the positions on the device (`masking_utils.find_packed_sequence_indices`), which synchronises in
each forward pass.
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
    """Use inside: forward passes of one batch with these texts in `rows` rows."""
    packed = len(texts.lengths) > rows

    def documents(positions: Tensor) -> Tensor | None:
        """Document index of each position within its row [B,T]; None if each row has one document."""
        if not packed:
            return None
        return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(1)

    asked = getattr(masking_utils, ASKS, None)
    setattr(masking_utils, ASKS, documents)
    try:
        yield
    finally:
        setattr(masking_utils, ASKS, asked)
