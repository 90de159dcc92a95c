"""What a decoded token costs the host."""

from benchmarks.generate import THEIRS, operations


def test_a_decoded_token_launches_little_more_than_hugging_faces() -> None:
    """Its words and numbers are two laws and a memory; the sums and probabilities wait until somebody reads them."""
    found = operations((THEIRS, "standard", "ovr", "compatible"))
    assert max(found.values()) <= 1.2 * found[THEIRS], found
