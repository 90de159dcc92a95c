"""The order of samples: global, the same on any number of ranks, resumable to the step."""

import threading
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cqwen_dist.batch import Batch
from cqwen_dist.config import UserError
from cqwen_dist.data.loader import EvalLoader, Loader, ahead, share
from cqwen_dist.data.store import Document, Sample


class Numbered:
    """Sample i is the document [i + 10, 1]."""

    pad_token_id, num_token_id = 0, 9

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return (Document(np.array([index + 10, 1], np.int32), np.zeros(2), np.zeros(2, bool)),)


def _samples(batch: Batch) -> list[int]:
    return (batch.input_ids[:, 0][batch.attention_mask[:, 0]] - 10).tolist()


def _loaders(count: int, world: int, global_batch: int, micro: int, seed: int = 0) -> list[Loader]:
    return [
        Loader(Numbered(count), rank=r, world=world, global_batch_size=global_batch, micro_batch_size=micro, seed=seed)
        for r in range(world)
    ]


def _steps(loaders: list[Loader], steps: int) -> list[list[int]]:
    """What each step sees over all ranks, and a check that ranks and steps line up."""
    seen = []
    for parts in islice(zip(*loaders, strict=True), steps):
        assert {len(part) for part in parts} == {loaders[0].micro_steps}
        assert all(len(b.input_ids) <= loaders[0].micro_batch_size for part in parts for b in part)
        seen.append([i for part in parts for batch in part for i in _samples(batch)])
    return seen


sizes = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 12), st.integers(1, 5), st.integers(-3, 3))


@settings(max_examples=60)
@given(sizes)
def test_each_epoch_has_every_sample_once_in_order_independent_of_ranks(size: tuple[int, int, int, int, int]) -> None:
    count, world, global_batch, micro, seed = size
    loaders = _loaders(count, world, global_batch, micro, seed)
    per_epoch = loaders[0].steps_per_epoch
    seen = _steps(loaders, 2 * per_epoch)
    for epoch in (seen[:per_epoch], seen[per_epoch:]):
        assert sorted(i for step in epoch for i in step) == list(range(count))
        assert all(len(step) == global_batch for step in epoch[:-1])
    assert seen == _steps(_loaders(count, 1, global_batch, global_batch, seed), 2 * per_epoch)


@pytest.mark.parametrize("done", [0, 1, 3, 4, 9])
def test_resuming_gives_the_remaining_batches_on_any_number_of_ranks(done: int) -> None:
    whole = _steps(_loaders(14, 2, 4, 2), 12)
    loaders = _loaders(14, 2, 4, 2)
    _steps(loaders, done)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1] == {"epoch": done // 4, "step": done % 4}
    again = _loaders(14, 3, 4, 1)
    for loader in again:
        loader.load_state_dict(states[0])
    assert _steps(again, 12 - done) == whole[done:]


def test_a_state_of_other_data_is_refused() -> None:
    (loader,) = _loaders(10, 1, 5, 5)
    with pytest.raises(ValueError, match="an epoch has 2 steps"):
        loader.load_state_dict({"epoch": 0, "step": 2})


def test_no_samples_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.train: found no texts"):
        _loaders(0, 1, 1, 1)


def test_a_rank_without_samples_gets_padding() -> None:
    loaders = _loaders(3, 4, 4, 1)
    (batches,) = islice(loaders[3], 1)
    assert len(batches) == 1
    assert not batches[0].label_mask.any()


@given(st.integers(0, 100), st.integers(1, 9))
def test_the_ranks_shares_are_contiguous_and_even(count: int, world: int) -> None:
    shares = [share(count, rank, world) for rank in range(world)]
    assert [i for part in shares for i in part] == list(range(count))
    assert len(shares[0]) == -(-count // world)
    assert len(shares[0]) - len(shares[-1]) <= 1


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 6))
def test_evaluation_sees_every_sample_exactly_once(count: int, world: int, micro: int) -> None:
    loaders = [EvalLoader(Numbered(count), rank=r, world=world, micro_batch_size=micro) for r in range(world)]
    for _ in range(2):
        batches = [list(loader) for loader in loaders]
        assert {len(part) for part in batches} == {len(loaders[0])}
        assert all(len(b.input_ids) <= max(micro, 1) for part in batches for b in part)
        assert [i for part in batches for batch in part for i in _samples(batch)] == list(range(count))


def test_prefetched_steps_are_the_same_and_do_not_advance_the_state() -> None:
    options = {"rank": 0, "world": 1, "global_batch_size": 4, "micro_batch_size": 2, "seed": 1}
    plain, quick = Loader(Numbered(14), **options), Loader(Numbered(14), **options, prefetch=3)
    for a, b in islice(zip(plain, quick, strict=True), 11):
        assert [_samples(x) for x in a] == [_samples(x) for x in b]
        assert plain.state_dict() == quick.state_dict()
        assert plain.handed_out() == quick.handed_out()


def test_the_prefetch_thread_passes_errors_on_and_ends_with_the_loader() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken page")

    given = ahead(items(), 2)
    assert next(given) == 1
    with pytest.raises(ValueError, match="broken page"):
        next(given)
    assert list(ahead(iter(range(5)), 2)) == list(range(5))
    before = threading.active_count()
    endless = ahead(iter(int, 1), 2)
    next(endless)
    endless.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_the_prefetch_thread_ends_with_the_iteration() -> None:
    """A process that ends while it is inside torch is aborted, though all its work was done."""
    loader = Loader(Numbered(40), rank=0, world=1, global_batch_size=4, micro_batch_size=2, seed=0, prefetch=2)
    batches = iter(loader)
    next(batches)
    assert any(thread.name.startswith("cqwen-loader") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("cqwen-loader") for thread in threading.enumerate())


@given(st.integers(1, 9), st.integers(1, 3))
def test_the_ranks_of_a_sequence_group_have_parts_of_the_same_samples(count: int, groups: int) -> None:
    options = {"world": groups, "global_batch_size": 6, "micro_batch_size": 2, "seed": 1}
    whole = [Loader(Numbered(count), rank=rank, **options) for rank in range(groups)]
    ranks = [Loader(Numbered(count), rank=r // 2, part=r % 2, parts=2, **options) for r in range(2 * groups)]
    steps = [next(iter(loader)) for loader in whole]
    parts = [next(iter(loader)) for loader in ranks]
    for group, batches in enumerate(steps):
        for batch, first, second in zip(batches, *parts[2 * group : 2 * group + 2], strict=True):
            width = batch.input_ids.shape[1]
            joined = torch.cat([first.input_ids, second.input_ids], 1)
            assert joined.shape[1] % 16 == 0
            assert torch.equal(joined[:, :width], batch.input_ids)
            assert not second.attention_mask.any()  # these texts are shorter than the first part
    assert ranks[0].handed_out(list(range(2 * groups))) == whole[0].handed_out(list(range(groups)))
    made = [b for r in (0, 1) for b in EvalLoader(Numbered(3), rank=0, world=1, micro_batch_size=2, part=r, parts=2)]
    assert [len(batch.input_ids) for batch in made] == [2, 1] * 2
