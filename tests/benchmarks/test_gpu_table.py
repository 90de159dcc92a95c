"""The GPU table: a contender that is wrong against float64 is not timed."""

import pytest


def test_a_wrong_contender_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_works, loss

    right = loss._ours
    monkeypatch.setattr(loss, "_ours", lambda p, impl: lambda: [right(p, impl)(), p.weight.grad.mul_(2)])
    with pytest.raises(ArithmeticError, match="wrong against float64"):
        next(gpu_works.loss("this", gpu_works.TOY, 32)())
