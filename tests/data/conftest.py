"""What the tests of data share."""

import pytest

from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


@pytest.fixture(scope="session")
def tokenizer() -> NumericalAwareTokenizer:
    return NumericalAwareTokenizer(train_tokenizer(diabetes_texts("train"), 400))
