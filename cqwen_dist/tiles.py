"""How the one-vs-rest loss is cut into tiles; the loss and the planner read it here, and it needs no torch."""

from __future__ import annotations

# Bytes of one [t, n] buffer, bytes of one [n, C] buffer, and most tokens of a tile. CPU: a tile's buffers stay in the
# outer cache. GPU: large tiles gain more in the products than they lose in the elementwise pass (H200, N=8,192, H=896,
# bf16: 41 ms with tiles of 32 MiB, 30 with 128, 28.7 with 512, which would hold 1.8 GiB).
TILE_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
TILE_TOKENS = {"cpu": 512, "cuda": 8192}
# On a GPU a tile has a multiple of 128 words, and rows of its buffers begin at multiples of 16 numbers. cuBLAS reads
# other matrices element by element (H200, N=4,096, H=3,584: 240 ms with tiles of 4,681 words, 49 with 4,608).
TILE_WORDS, ROW_NUMBERS = 128, 16
WORK_BUFFERS = {"chunked": 5, "triton": 2}  # [t, n] of the tile's maths, by implementation
CHUNK_BYTES = 8 << 20  # of one fp32 [N, n] and of |W|'s [n, C] where no gradient is wanted; a few are alive at once


def tile_shape(tokens: int, rows: int, c: int, device_type: str, itemsize: int = 4) -> tuple[int, int]:
    """(t, n): tokens and words of a tile, for so many tokens, words and dimensions; itemsize: of the sums' dtype."""
    kind = "cpu" if device_type == "cpu" else "cuda"
    t = max(1, min(tokens, TILE_TOKENS[kind]))
    n = min(TILE_BYTES[kind] // (t * itemsize), BLOCK_BYTES[kind] // (max(1, c) * itemsize))
    if kind == "cuda":
        n = max(n // TILE_WORDS, 1) * TILE_WORDS
    return t, max(1, min(rows, n))
