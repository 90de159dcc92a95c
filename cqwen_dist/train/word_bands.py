"""Words by how often training has them: what thresholds and accuracy look like from the frequent to the unseen.

The seeds expect learnt thresholds to fall for frequent words and to rise for rare ones (S0, "阈值设计的灵活性").
"""

from __future__ import annotations

import numpy as np

# (name, least count), rarest first; a word's band is the last whose least count it reaches
BANDS: tuple[tuple[str, int], ...] = (
    ("never", 0),
    ("1", 1),
    ("2 to 9", 2),
    ("10 to 99", 10),
    ("100 to 999", 100),
    ("1,000 to 9,999", 1000),
    ("10,000 and more", 10_000),
)


def band_of(counts: np.ndarray) -> np.ndarray:
    """Index into BANDS of each word [V] int64."""
    least = np.array([low for _, low in BANDS])
    return np.searchsorted(least, counts, side="right") - 1


def by_band(values: np.ndarray, counts: np.ndarray) -> list[dict[str, float | str]]:
    """Quartiles of a value of each word [V], by band; bands without words are left out."""
    band, found = band_of(counts), list[dict[str, float | str]]()
    for index, (name, _) in enumerate(BANDS):
        inside = values[band == index]
        if len(inside):
            q1, median, q3 = np.quantile(inside.astype(np.float64), [0.25, 0.5, 0.75]).tolist()
            found.append({"band": name, "words": float(len(inside)), "q1": q1, "median": median, "q3": q3})
    return found
