"""The container that goes from the collator to the loss, texts as padded tensors, and the letters of shape comments.

B batch, T positions, N label positions (flattened), H hidden, C causal dimension (word part plus number
dimensions), V vocabulary (V_full), v rows of the vocabulary on this rank. U, S and Y are random variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch

IGNORE_INDEX = -100


class Padded(NamedTuple):
    """Texts as one batch, [B,T] each: ids int64; values float64, 0 at words; mask bool, False at the padding."""

    ids: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


def pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[float]]], pad_token_id: int, on_left: bool) -> Padded:
    """(ids, values) of several texts as one batch, as wide as the longest."""
    shape = (len(rows), max((len(ids) for ids, _ in rows), default=0))
    ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    values, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    for row, (own, numbers) in enumerate(rows):
        start = shape[1] - len(own) if on_left else 0
        at = slice(start, start + len(own))
        ids[row, at], values[row, at] = torch.tensor(own), torch.tensor(numbers, dtype=torch.float64)
        mask[row, at] = True
    return Padded(ids, values, mask)


@dataclass(eq=False)
class Texts:
    """Where a batch's texts lie, one behind another in the flattened B*T; padding behind packed texts is a text.

    Lengths are on the host, so that attention within each text waits for no device.
    """

    lengths: list[int]  # of each of K texts, B*T together
    longest: int
    begin: torch.Tensor  # [K+1] int32, on the batch's device: where each begins, and B*T

    @classmethod
    def at(cls, position_ids: torch.Tensor) -> Texts:
        """Of `Batch.position_ids`."""
        flat = position_ids.flatten()
        begin = torch.cat([(flat == 0).nonzero()[:, 0], torch.tensor([len(flat)], device=flat.device)])
        lengths = begin.diff().tolist()
        return cls(lengths, max(lengths), begin.int())


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Labels are already shifted: labels[:, t] is the token after position t."""

    input_ids: torch.Tensor  # [B,T] int64
    numeric_values: torch.Tensor  # [B,T] float64; the value at <NUM>, 0 at text
    attention_mask: torch.Tensor  # [B,T] bool; True at real tokens
    position_ids: torch.Tensor  # [B,T] int64; restarts at 0 where a packed document begins
    labels: torch.Tensor  # [B,T] int64; IGNORE_INDEX where nothing is to be predicted
    numeric_labels: torch.Tensor  # [B,T] float64; the value of the label, raw unit, 0 where it is text
    numeric_mask: torch.Tensor  # [B,T] bool; True where the label is <NUM> and its value is to be learnt
    # [M,2] int64: partial labels, in order: an index into the flattened B*T, whose label is IGNORE_INDEX, and w if word
    # w comes next, ~w if it does not
    partial: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 2), dtype=torch.int64))
    # [M,2] int64: such an index of a number label, and its type 1, 2, ...; other labels have type 0
    typed: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 2), dtype=torch.int64))
    # [M,3] float64: such an index of a number label with further values, the value's place 1, 2, ..., and the value
    more: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 3), dtype=torch.float64))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device (asynchronously from pinned memory)."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with other tensors; `texts`, found here, goes with it."""
        batch = Batch(**{f.name: moved(getattr(self, f.name)) for f in fields(self)})
        batch.__dict__["texts"] = replace(self.texts, begin=moved(self.texts.begin))
        return batch

    def tensors(self) -> list[torch.Tensor]:
        """All of its tensors; where its texts begin is among them."""
        return [*(getattr(self, f.name) for f in fields(self)), self.texts.begin]

    @cached_property
    def texts(self) -> Texts:
        """The texts of the rows. Found once, before the batch goes to a device: there it would wait for it."""
        return Texts.at(self.position_ids)

    @property
    def label_mask(self) -> torch.Tensor:
        """[B,T] bool: positions whose next word is learnt (labels and attention mask together)."""
        return (self.labels != IGNORE_INDEX) & self.attention_mask

    @property
    def kept(self) -> torch.Tensor:
        """[N] int64: the label positions, as indices into the flattened [B*T]. On a GPU this waits for the batch."""
        return self.label_mask.flatten().nonzero()[:, 0]

    @property
    def learnt(self) -> torch.Tensor:
        """[N'] int64: `kept` and the positions of partial labels, in order: training needs features there."""
        return self.learnt_mask.flatten().nonzero()[:, 0]

    @property
    def learnt_mask(self) -> torch.Tensor:
        """[B,T] bool: the positions of `learnt`."""
        mask = self.label_mask
        mask.view(-1)[self.partial[:, 0]] = True
        return mask
