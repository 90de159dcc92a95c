"""One shift, right padding, and documents that do not see each other."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from cqwen_dist.batch import IGNORE_INDEX
from cqwen_dist.data.collate import collate
from cqwen_dist.data.store import Document

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
