"""What a reading of numbers leaves as text."""

from cqwen_dist.data.numbers import DEFAULT_POLICY, NumberPolicy, _Scan


def find_left(text: str, policy: NumberPolicy = DEFAULT_POLICY) -> list[tuple[int, int, str]]:
    """What has digits and stays text: (start, end, why)."""
    return _Scan(text, policy).run().left
