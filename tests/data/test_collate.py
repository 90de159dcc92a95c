"""One shift, right padding, and documents that do not see each other."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.data.collate import collate
from cqwen_dist.data.store import Document
from cqwen_dist.heads.targets import NumericStatistics, numeric_statistics

NUM, PAD = 90, 91


def _document(*tokens: int | float) -> Document:
    """Integers are words, floats are numbers."""
    numbers = np.array([isinstance(t, float) for t in tokens])
    values = np.where(numbers, np.array(tokens, np.float64), 0.0)
    return Document(np.where(numbers, NUM, np.array(tokens)).astype(np.int32), values, numbers)


def test_labels_are_the_next_token_and_its_number() -> None:
    batch = collate([(_document(1, 99.9, 3, -2.5, 5),), (_document(7, 8),)], pad_token_id=PAD, num_token_id=NUM)
    ignore = IGNORE_INDEX
    assert batch.input_ids[0].tolist() == [1, NUM, 3, NUM, 5, PAD, PAD, PAD]
    assert batch.numeric_values[0].tolist() == [0, 99.9, 0, -2.5, 0, 0, 0, 0]
    assert batch.labels[0].tolist() == [NUM, 3, NUM, 5, ignore, ignore, ignore, ignore]
    assert batch.numeric_labels[0].tolist() == [99.9, 0, -2.5, 0, 0, 0, 0, 0]
    assert batch.numeric_mask[0].tolist() == [True, False, True, False, False, False, False, False]
    assert batch.attention_mask.sum(1).tolist() == [5, 2]
    assert batch.labels[1].tolist() == [8, *[ignore] * 7]
    assert batch.position_ids[1].tolist() == list(range(8))
    assert batch.label_mask.sum() == 5
    dtypes = [batch.input_ids, batch.position_ids, batch.labels, batch.numeric_values, batch.numeric_labels]
    assert [t.dtype for t in dtypes] == [torch.int64] * 3 + [torch.float64] * 2
    assert batch.attention_mask.dtype == batch.numeric_mask.dtype == torch.bool


def test_numbers_that_are_not_targets_keep_their_label_but_not_their_mask() -> None:
    ids, values, *_ = _document(1, 2.0, 3.0)
    batch = collate([(Document(ids, values, np.array([False, False, True])),)], pad_token_id=PAD, num_token_id=NUM)
    assert batch.labels[0, :2].tolist() == [NUM, NUM]
    assert batch.numeric_labels[0, :2].tolist() == [2.0, 3.0]
    assert batch.numeric_mask[0, :2].tolist() == [False, True]


def test_packed_documents_end_without_a_label_and_restart_positions() -> None:
    batch = collate([(_document(1, 2, 3), _document(4.0, 5))], pad_token_id=PAD, num_token_id=NUM)
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.labels[0].tolist() == [2, 3, IGNORE_INDEX, 5, *[IGNORE_INDEX] * 4]
    assert not batch.numeric_mask.any()  # a number that opens a document is predicted by nothing
    assert batch.attention_mask[0].tolist() == [True] * 5 + [False] * 3


def test_widths_are_multiples_of_eight() -> None:
    for longest, width in ((1, 8), (8, 8), (9, 16)):
        batch = collate([(_document(*range(longest)),)], pad_token_id=PAD, num_token_id=NUM)
        assert batch.input_ids.shape == (1, width)


def test_a_rank_without_samples_gets_one_row_of_padding() -> None:
    batch = collate([], pad_token_id=PAD, num_token_id=NUM)
    assert batch.input_ids.tolist() == [[PAD] * 8]
    assert not batch.label_mask.any()
    assert not batch.numeric_mask.any()
    assert not batch.attention_mask.any()


def test_parts_of_a_batch_join_to_the_whole_and_know_the_whole_texts() -> None:
    """Labels are shifted before the split, so a part's last position still has the first token of the next part."""
    rows = [(_document(*range(1, 12), 5.5, 6), _document(3, 4.0)), (_document(8, 9),), (_document(1, 2, 3, 4),)]
    whole = collate(rows, pad_token_id=PAD, num_token_id=NUM, parts=4)
    assert whole.input_ids.shape == (3, 32)  # a text of two tokens leaves three ranks with padding only
    parts = [whole.part(rank, 4) for rank in range(4)]
    for name, value in ((f.name, getattr(whole, f.name)) for f in fields(whole)):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), value), name
    assert sum(len(part.kept) for part in parts) == len(whole.kept)
    for part in (*parts, parts[3].to("cpu")):
        assert part.texts.lengths == whole.texts.lengths == [13, 2, 17, 32, 32]
        assert (part.filled_rows, part.begun_texts) == (3, 4)
    assert whole.part(0, 1) is whole
    with pytest.raises(ValueError, match="rows of 32 positions do not split into 3 equal parts"):
        whole.part(0, 3)


def _oracle(values: np.ndarray) -> NumericStatistics:
    """As the definition reads."""
    if not values.size:
        return NumericStatistics(0.0, 1.0, 0)
    spreads = []
    for read in (values, np.sign(values) * np.log1p(np.abs(values))):
        low, median, high = (float(q) for q in np.quantile(read, (0.25, 0.5, 0.75)))
        scale = high / 2 - low / 2
        if scale <= 1e-12 * abs(median):
            scale = float(np.mean(np.abs(read / 2 - median / 2)))
        spreads.append((median, scale if scale > 1e-12 * abs(median) else 1.0))
    return NumericStatistics(*spreads[0], values.size, *spreads[1])


DRAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda g, n: g.normal(5, 3, n),
    "cauchy": lambda g, n: g.standard_cauchy(n),
    "lognormal": lambda g, n: g.lognormal(3, 4, n),
    "few integers": lambda g, n: g.integers(0, 40, n).astype(float),
    "sorted": lambda g, n: np.sort(g.normal(size=n)),
    "one value and others": lambda g, n: np.where(g.random(n) < 0.9, 7.0, g.normal(size=n)),
    "equal": lambda g, n: np.full(n, 3.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("count", [200_003, 200_002])
def test_statistics_in_parts_are_exact(name: str, count: int) -> None:
    values = DRAWS[name](np.random.default_rng(len(name)), count)
    found, meant = numeric_statistics(np.array_split(values, 7)), _oracle(values)
    assert (found.median, found.count, found.log_median) == (meant.median, meant.count, meant.log_median)
    # A mean distance is summed in another order
    assert found.scale == pytest.approx(meant.scale, rel=1e-13)
    assert found.log_scale == pytest.approx(meant.log_scale, rel=1e-13)


@settings(max_examples=60)
@given(st.lists(st.floats(-1e300, 1e300), max_size=40), st.integers(1, 5))
def test_statistics_of_few_numbers_and_empty_parts(values: list[float], parts: int) -> None:
    found, meant = numeric_statistics(np.array_split(values, parts)), _oracle(np.array(values))
    assert found.count == meant.count
    assert found.median == pytest.approx(meant.median, rel=0, abs=1e-320)  # half of a subnormal number loses a bit
    assert found.scale == pytest.approx(meant.scale, rel=1e-13)
