"""What a config asks of the number of ranks, which it does not know itself."""

from __future__ import annotations

from cqwen_dist.config.errors import UserError


def refuse_ranks(vocab_group_size: int, world: int) -> None:
    """Raises `UserError` where vocabulary groups of a size do not divide `world` ranks."""
    if world % vocab_group_size:
        divisors = ", ".join(str(d) for d in range(1, min(world, 1024) + 1) if world % d == 0)
        ranks = f"the {world} rank{'s' * (world > 1)}"
        raise UserError("parallel.vocab_group_size", vocab_group_size, f"a divisor of {ranks}: {divisors}")
