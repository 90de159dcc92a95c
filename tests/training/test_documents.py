"""What transformers is told of a batch's documents is what it would find itself, and it is asked again afterwards."""

from dataclasses import replace

import pytest
import torch
from support.tiny import random_batch, tiny_model
from transformers import masking_utils
from transformers.masking_utils import find_packed_sequence_indices

from cqwen_dist.training.step import documents_of


@pytest.mark.parametrize("period", [99, 8, 5, 1])
def test_given_texts_make_the_masks_that_transformers_finds(period: int) -> None:
    model, batch = tiny_model(), random_batch()
    batch = replace(batch, position_ids=batch.position_ids % period)
    wanted, documents = model.kept_features(batch, batch.kept), find_packed_sequence_indices(batch.position_ids)
    with documents_of(batch.texts, len(batch.input_ids)):
        found = model.kept_features(batch, batch.kept)
        told = masking_utils.find_packed_sequence_indices(batch.position_ids)
        assert (told is None) == (documents is None) == (period == 99)
        assert documents is None or torch.equal(told, documents)
    assert torch.equal(found, wanted)
    assert masking_utils.find_packed_sequence_indices is find_packed_sequence_indices
