"""What a sample is made of; without torch, so that worker processes stay small."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """A text's tokens, or a piece of them; all arrays have one length t >= 1."""

    ids: np.ndarray  # [t] integers
    values: np.ndarray  # [t] float64; the value at <NUM>, 0 at words
    targets: np.ndarray  # [t] bool; True at a <NUM> whose value the regression learns
    learnt: np.ndarray | None = None  # [t] bool; False at tokens that are read only (a prompt's); None: all are learnt
    types: np.ndarray | None = None  # [t] int8: the type of a target, 0 for other; None: all are 0
    more: np.ndarray | None = None  # [k] float64: further values of the one target; None: it is not here, or has none
    labels: np.ndarray | None = None  # [k] int32: of the last token but one, w: w is next, ~w: it is not; None: usual


# One row of a batch: a single document, or several that were packed.
Sample = tuple[Document, ...]
