"""Tile sizes of the one-vs-rest loss, for the loss and the planner; needs no torch."""

# Maximum bytes per [t, n] buffer and per [n, C] buffer, and maximum tokens per tile. CPU: a tile's buffers stay in the
# last-level cache. GPU: large tiles gain more in the products than they lose in the elementwise pass (H200, N=8,192,
# H=896, bf16: 41 ms with 32 MiB tiles, 30 ms with 128 MiB, 28.7 ms with 512 MiB, but those need 1.8 GiB).
TILE_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
TILE_TOKENS = {"cpu": 512, "cuda": 8192}
# On a GPU a tile has a multiple of 128 words, and buffer rows start at multiples of 16 numbers. cuBLAS reads other
# matrices element by element (H200, N=4,096, H=3,584: 240 ms with 4,681 words per tile, 49 ms with 4,608).
TILE_WORDS, ROW_NUMBERS = 128, 16
WORK_BUFFERS = {"chunked": 4, "triton": 2}  # [t, n] buffers per tile, by implementation
# Per fp32 [N, n] buffer and per |W| [n, C] without gradients; a few exist at once. In small chunks a GPU waits for the
# host: with 8 MiB, train/accuracy took longer than its step (H100, H=896).
CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}

# Of candidates' rows that exist at once (`heads.candidates`), in so many fp32 buffers. On a CPU they stay in its cache,
# and a GPU shall launch few parts.
CANDIDATE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
CANDIDATE_BUFFERS = 3


def kind_of(device_type: str) -> str:
    """The key of the sizes above: every device but a CPU is treated as a GPU."""
    return "cpu" if device_type == "cpu" else "cuda"


def tile_shape(tokens: int, rows: int, c: int, device_type: str, itemsize: int = 4) -> tuple[int, int]:
    """(t, n): tokens and words per tile for `tokens`, `rows` and `c` dimensions; itemsize: bytes of the sums' dtype."""
    kind = kind_of(device_type)
    t = max(1, min(tokens, TILE_TOKENS[kind]))
    n = min(TILE_BYTES[kind] // (t * itemsize), BLOCK_BYTES[kind] // (max(1, c) * itemsize))
    if kind == "cuda":
        n = max(n // TILE_WORDS, 1) * TILE_WORDS
    return t, max(1, min(rows, n))
