"""Cuts long texts into pieces and packs pieces into rows. Uses only their lengths in tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Pieces per packing window: enough to fill rows to 99 % or more, few enough for memory.
_WINDOW = 1 << 16


class Pieces(NamedTuple):
    """Text pieces [P]: tokens [start, end) from text `text`."""

    text: np.ndarray  # all int32: 12 bytes per piece
    start: np.ndarray
    end: np.ndarray


class Rows(NamedTuple):
    """Packed rows: row r has pieces[begin[r]:begin[r + 1]]."""

    pieces: np.ndarray  # [P] int64
    begin: np.ndarray  # [R+1] int64


def cut(lengths: np.ndarray, texts: np.ndarray | None, length: int, most: int | None = None) -> Pieces:
    """Cut texts with `lengths` tokens [n] into pieces of at most `length` tokens that overlap by one.

    Each token except a text's first is predicted exactly once; a one-token text has no piece. lengths: [n] int32;
    texts: [n] text indices, None: 0 to n - 1; most: maximum pieces per text, later ones are dropped.
    """
    # Pieces advance by length - 1: a piece's last label is the first input of the next piece.
    counts = np.maximum(-(-(lengths - 1) // (length - 1)), 0)
    if most is not None:
        counts = np.minimum(counts, most)
    which = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first = np.repeat((counts.cumsum(dtype=np.int64) - counts).astype(np.int32), counts)
    start = (np.arange(len(which), dtype=np.int32) - first) * np.int32(length - 1)
    end = np.minimum(start.astype(np.int64) + length, lengths[which]).astype(np.int32)
    return Pieces(which if texts is None else texts[which].astype(np.int32), start, end)


def pack(lengths: np.ndarray, capacity: int) -> Rows:
    """Pack pieces into rows of at most `capacity` tokens: longest first, into the fullest row that fits."""
    pieces, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for begin in range(0, len(lengths), _WINDOW):
        rows = _pack(lengths[begin : begin + _WINDOW].tolist(), capacity)
        pieces.append(np.array([i for row in rows for i in row], np.int64) + begin)
        sizes.append(np.array([len(row) for row in rows], np.int64))
    return Rows(np.concatenate(pieces), np.concatenate(sizes).cumsum())


def _pack(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s: a row has s tokens of space
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[piece]
        # Best fit in constant time: the lowest set bit at or above `length` is the smallest space that fits.
        wide = spaces >> length
        if wide:
            space = length + (wide & -wide).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            row, space = len(rows), capacity
            rows.append([])
        rows[row].append(piece)
        rows_by_space[space - length].append(row)
        spaces |= 1 << (space - length)
    return rows
