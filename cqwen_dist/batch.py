"""The batch container from collator to loss, padding, and the letters used in shape comments.

B batch, T positions, N label positions (flattened), H hidden, C causal dimension (word part plus number dimensions), V
vocabulary (V_full), v vocabulary rows on this rank. U, S and Y are random variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch

IGNORE_INDEX = -100


class Padded(NamedTuple):
    """Padded texts, [B,T] each: ids int64; values float64, 0 at words; mask bool, False at padding."""

    ids: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


def pad_rows(rows: Sequence[tuple[Sequence[int], Sequence[float]]], pad_token_id: int, on_left: bool) -> Padded:
    """Pad rows of (ids, values) to the longest."""
    shape = (len(rows), max((len(ids) for ids, _ in rows), default=0))
    ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    values, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    for row, (own, numbers) in enumerate(rows):
        start = shape[1] - len(own) if on_left else 0
        at = slice(start, start + len(own))
        ids[row, at], values[row, at] = torch.tensor(own), torch.tensor(numbers, dtype=torch.float64)
        mask[row, at] = True
    return Padded(ids, values, mask)


def positions_in(mask: torch.Tensor) -> torch.Tensor:
    """Positions [B,T] int64 from the real tokens [B,T] of one text a row; 0 at padding before it."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def last_places(ids: torch.Tensor) -> torch.Tensor:
    """Indices [B] of the last column of ids [B,T] in the flat batch."""
    return torch.arange(1, len(ids) + 1, device=ids.device) * ids.shape[1] - 1


@dataclass(eq=False)
class Texts:
    """Positions of a batch's texts in the flattened B*T. Padding after packed texts counts as a text.

    Lengths are on the host, so that attention within each text does not wait for the device.
    """

    lengths: list[int]  # K lengths, B*T in total
    longest: int
    begin: torch.Tensor  # [K+1] int32, on the batch's device: start of each text, then B*T

    @classmethod
    def at(cls, position_ids: torch.Tensor) -> Texts:
        """Find the texts from `Batch.position_ids`, which are 0 at each start."""
        flat = position_ids.flatten()
        begin = torch.cat([(flat == 0).nonzero()[:, 0], torch.tensor([len(flat)], device=flat.device)])
        lengths = begin.diff().tolist()
        return cls(lengths, max(lengths), begin.int())


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Labels are already shifted: labels[:, t] is the token after position t."""

    input_ids: torch.Tensor  # [B,T] int64
    numeric_values: torch.Tensor  # [B,T] float64; value at <NUM>, 0 at words
    attention_mask: torch.Tensor  # [B,T] bool; True at real tokens
    position_ids: torch.Tensor  # [B,T] int64; restarts at 0 at each packed document
    labels: torch.Tensor  # [B,T] int64; IGNORE_INDEX if the model learns no word
    numeric_labels: torch.Tensor  # [B,T] float64; the label's value in its raw unit, 0 for a word
    numeric_mask: torch.Tensor  # [B,T] bool; True if the label is <NUM> and its value is learnt

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device (asynchronously from pinned memory)."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory, for asynchronous copies to a GPU."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Apply a function to all tensors, `texts.begin` and `number_places` included."""
        batch = Batch(**{f.name: moved(getattr(self, f.name)) for f in fields(self)})
        texts = replace(self.texts, begin=moved(self.texts.begin))
        return self._known_of(batch, texts=texts, number_places=moved(self.number_places))

    def _known_of(self, batch: Batch, **other: Texts | torch.Tensor) -> Batch:
        """Copy the facts about whole rows to a batch that was made from this one."""
        known = {name: getattr(self, name) for name in ("texts", "filled_rows", "begun_texts")}
        batch.__dict__.update(known | other)
        return batch

    def part(self, rank: int, ranks: int) -> Batch:
        """The positions of one rank of a sequence group: the rank-th of `ranks` equal slices of every row.

        T is a multiple of `ranks` (`collate`). `texts`, `filled_rows` and `begun_texts` stay those of whole rows:
        attention joins the slices again (`parallel.mappings`). All other fields are per position and can be sliced.
        """
        if ranks == 1:
            return self
        whole = self.input_ids.shape[1]
        if whole % ranks:
            raise ValueError(f"rows of {whole} positions do not split into {ranks} equal parts")
        width = whole // ranks

        def own(value: torch.Tensor) -> torch.Tensor:
            return value[:, rank * width : (rank + 1) * width].contiguous()

        return self._known_of(Batch(**{f.name: own(getattr(self, f.name)) for f in fields(self)}))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, including `texts.begin` and `number_places`."""
        return [*(getattr(self, f.name) for f in fields(self)), self.texts.begin, self.number_places]

    @cached_property
    def texts(self) -> Texts:
        """The rows' texts. Cached on the CPU before the batch moves: on a GPU, computing them would synchronise."""
        return Texts.at(self.position_ids)

    @cached_property
    def number_places(self) -> torch.Tensor:
        """[M] int64: positions whose number is learnt, in the flattened [B*T]. Cached as `texts`."""
        return self.numeric_mask.flatten().nonzero()[:, 0]

    @cached_property
    def filled_rows(self) -> int:
        """Number of rows with a text; further rows are padding."""
        return int(self.attention_mask.any(1).sum())

    @cached_property
    def begun_texts(self) -> int:
        """Number of texts that start in these rows."""
        return int(self.attention_mask[self.position_ids == 0].sum())

    @property
    def label_mask(self) -> torch.Tensor:
        """[B,T] bool: positions whose next word is learnt (they have a label and are not padding)."""
        return (self.labels != IGNORE_INDEX) & self.attention_mask

    @property
    def kept(self) -> torch.Tensor:
        """[N] int64: label positions as indices into the flattened [B*T]. Synchronises on a GPU."""
        return self.label_mask.flatten().nonzero()[:, 0]

    def learnt(self, words: bool) -> torch.Tensor:
        """`kept`, or without words only the positions whose number is learnt."""
        return self.kept if words else self.number_places
