"""Datasets: cutting, packing, targets, counts; statistics of the targets."""

import json
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cqwen_dist.batch import Batch
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.dataset import TextDataset, _pack
from cqwen_dist.data.load import load_datasets
from cqwen_dist.data.loader import EvalLoader, Loader, ahead, share
from cqwen_dist.data.prepare import tokenise
from cqwen_dist.data.records import Text
from cqwen_dist.data.store import Document, Sample
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.heads.targets import numeric_statistics
from cqwen_dist.tools.diabetes import diabetes_texts


def _dataset(tokenizer: NumericalAwareTokenizer, *texts: str, **config: object) -> TextDataset:
    located = [Text(text, f"here:{i}") for i, text in enumerate(texts, 1)]
    return tokenise(located, tokenizer, DataConfig(train="here", **config))


def test_a_text_gets_an_end_token_and_its_values(tokenizer: NumericalAwareTokenizer) -> None:
    dataset = _dataset(tokenizer, "aged 59 with 2.5")
    ((ids, values, targets, learnt),) = dataset[0]
    assert learnt is None
    text_ids, text_values = tokenizer.encode("aged 59 with 2.5")
    assert ids.tolist() == [*text_ids, tokenizer.eos_token_id]
    assert values.tolist() == [*text_values, 0.0]
    assert ids[targets].tolist() == [tokenizer.num_token_id] * 2
    assert (dataset.report.texts, dataset.report.tokens, dataset.report.numbers) == (1, len(ids), 2)


@pytest.mark.parametrize("length", [2, 3, 7, 50])
def test_cut_texts_predict_each_token_exactly_once(tokenizer: NumericalAwareTokenizer, length: int) -> None:
    texts = diabetes_texts("test")[:5]
    dataset = _dataset(tokenizer, *texts, sequence_length=length)
    labels = [
        (int(i), float(v))
        for s in range(len(dataset))
        for d in dataset[s]
        for i, v in zip(d.ids[1:], d.values[1:], strict=True)
    ]
    whole = _dataset(tokenizer, *texts, sequence_length=10_000)
    expected = [
        (int(i), float(v)) for s in range(5) for d in whole[s] for i, v in zip(d.ids[1:], d.values[1:], strict=True)
    ]
    assert labels == expected
    assert max(len(d.ids) for s in range(len(dataset)) for d in dataset[s]) <= length
    assert min(len(d.ids) for s in range(len(dataset)) for d in dataset[s]) >= 2
    if length < 50:
        assert any("long texts cut" in line for line in dataset.report.lines("train"))


def test_a_sequence_of_one_token_is_refused(tokenizer: NumericalAwareTokenizer) -> None:
    with pytest.raises(UserError, match=r"data\.sequence_length: found 1, allowed: 2 or more"):
        _dataset(tokenizer, "a", sequence_length=1)


def test_numeric_targets_selects_all_or_the_last_number(tokenizer: NumericalAwareTokenizer) -> None:
    texts = ("5 and 6 and 7", "8", "none")
    assert np.concatenate([*_dataset(tokenizer, *texts).number_parts()]).tolist() == [
        6.0,
        7.0,
    ]  # nothing predicts a first token
    assert np.concatenate([*_dataset(tokenizer, *texts, numeric_targets="last").number_parts()]).tolist() == [7.0]
    assert _dataset(tokenizer, *texts).report.targets == 2


def test_overflowing_numbers_stay_text(tokenizer: NumericalAwareTokenizer) -> None:
    texts = ("aged 5", "aged 1e999 and -1e999 and 6")
    report = _dataset(tokenizer, *texts).report
    assert (report.overflows, report.numbers, report.first_overflow) == (2, 2, "here:2: 1e999")
    assert "train: 2 numerals beyond float64 stay text, first here:2: 1e999" in report.lines("train")


def test_a_target_behind_a_numeral_that_stays_text_is_learnt(tokenizer: NumericalAwareTokenizer) -> None:
    text = "aged 110101199003070011 and 7 with 5"
    dataset = tokenise([Text(text, "here:1", target=(35, 36))], tokenizer, DataConfig(train="here"))
    ((_, values, targets, _),) = dataset[0]
    assert values[targets].tolist() == [5.0]


@given(st.lists(st.integers(2, 20), max_size=60))
def test_packing_keeps_every_document_once_and_never_overfills(lengths: list[int]) -> None:
    rows = _pack(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 20 for row in rows)
    assert rows == _pack(lengths, 20)


def test_packed_rows_contain_whole_documents(tokenizer: NumericalAwareTokenizer) -> None:
    texts = diabetes_texts("test")
    plain = _dataset(tokenizer, *texts, sequence_length=512)
    packed = _dataset(tokenizer, *texts, sequence_length=512, pack=True)
    assert len(packed) < len(plain) == 100
    documents = sorted(tuple(d.ids.tolist()) for i in range(len(packed)) for d in packed[i])
    assert documents == sorted(tuple(plain[i][0].ids.tolist()) for i in range(100))
    assert sum(len(d.ids) for i in range(len(packed) - 1) for d in packed[i]) > 0.9 * 512 * (len(packed) - 1)


def test_long_texts_are_cut_truncated_or_dropped_and_counted(tokenizer: NumericalAwareTokenizer) -> None:
    texts = ["age 3", "age 4 " * 20, "age 5 sex 6", "age 7 " * 30]
    whole = _dataset(tokenizer, *texts)
    sizes = whole.text_lengths()
    long = [int(size) for size in sizes if size > 12]
    assert len(long) == 2
    found = {
        how: _dataset(tokenizer, *texts, sequence_length=12, long_texts=how) for how in ("cut", "truncate", "drop")
    }
    assert len({dataset.digest() for dataset in found.values()}) == 3
    assert len(found["cut"]) > 4
    assert found["cut"].report.lost == 0
    kept = [document.ids.tolist() for i in range(4) for document in found["truncate"][i]]
    assert kept == [whole[i][0].ids[:12].tolist() for i in range(4)]
    assert found["truncate"].report.truncated == 2
    line = "train: 2 of 4 texts, longer than data.sequence_length, truncated: "
    assert f"{line}{sum(long) - 24} tokens fewer (data.long_texts)" in found["truncate"].report.lines("train")
    assert [found["drop"][i][0].ids.tolist() for i in range(len(found["drop"]))] == [
        whole[i][0].ids.tolist() for i in (0, 2)
    ]
    assert (found["drop"].report.dropped, found["drop"].report.lost) == (2, sum(long))
    assert np.concatenate([*found["drop"].number_parts()]).tolist() == [3.0, 5.0, 6.0]
    longer = found["drop"].with_length(500)
    assert (len(longer), longer.report.dropped, longer.report.lost) == (4, 0, 0)
    with pytest.raises(UserError, match=r"data\.long_texts: found 'drop', allowed: truncate or cut: every text has"):
        found["drop"].with_length(3)


def test_rows_whose_target_is_cut_away_from_their_columns_are_counted_and_refused(tokenizer, tmp_path) -> None:
    """A target without its columns teaches nothing. The row's last tokens, behind the target, may be cut off."""
    rows = [{"note": "w " * size, "y": size} for size in (5, 6, 30, 40)]
    path = tmp_path / "t.jsonl"

    def of(rows: list[dict[str, object]], length: int, **more: str) -> TextDataset:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        keys: dict[str, Any] = {"prompt_template": "{note}", "text_template": "{y}!!!!", "target_field": "y", **more}
        return load_datasets(DataConfig(train=str(path), sequence_length=length, **keys), tokenizer).train

    whole = of(rows, 500)
    place = [int(np.flatnonzero(document.targets)[0]) for (document,) in (whole[row] for row in range(4))]
    for length, apart in ((place[3] + 1, 0), (place[3], 1), (place[2], 2), (place[0] + 1, 3)):
        report = whole.with_length(length).report
        assert report.apart == apart, (length, place)
        said = f"train: {apart} of 4 texts are longer than data.sequence_length, so their target is cut away"
        assert any(line.startswith(said) for line in report.lines("train")) == bool(apart)
    with pytest.raises(UserError, match=r"data\.sequence_length: found 12, of which every row has more"):
        of(rows[2:], 12)
    with pytest.raises(UserError, match="so many that a row's columns stay with its target"):
        whole.with_length(place[0])
    assert of(rows, place[2], long_texts="drop").report.apart == 0
    assert of(rows[2:], 12, target_field=None, text_template="{note}{y}").report.documents > 2  # type: ignore[arg-type]


def test_a_digest_does_not_depend_on_how_texts_are_batched(tokenizer, monkeypatch) -> None:
    config = DataConfig(train="here")
    texts = [Text(f"a {i}", "here", learnt=((0, 2),) if i % 2 else None) for i in range(9)]
    whole = tokenise(texts, tokenizer, config)
    monkeypatch.setattr("cqwen_dist.data.sources.CHUNK", 2)
    assert tokenise(texts, tokenizer, config).digest() == whole.digest(), "prepared data goes on with a run in memory"
    others = [text._replace(learnt=None) for text in texts]
    assert tokenise(others, tokenizer, config).digest() != whole.digest()


def test_load_datasets_gives_a_runs_datasets(tokenizer: NumericalAwareTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*diabetes_texts("train"), ""]))
    config = DataConfig(train=str(path), eval="bundled:diabetes/test", on_bad_line="skip", numeric_targets="last")
    loaded = load_datasets(config, tokenizer)
    assert loaded.eval is not None
    assert (len(loaded.train), len(loaded.eval)) == (342, 100)
    assert loaded.lines()[0] == f"skipped: 1 x empty text, first at {path}:343"
    path.write_text('{"text": ""}\n')
    parts = config.model_copy(update={"eval": None, "eval_fraction": 0.1, "cache_dir": str(tmp_path / "cache")})
    for of_nothing in (config, parts):
        with pytest.raises(UserError, match=r"data\.train: found no usable text"):
            load_datasets(of_nothing, tokenizer)
    path.write_text('{"text": "a"}\n')
    assert load_datasets(DataConfig(train=str(path)), tokenizer).eval is None


def test_number_statistics_equal_values_computed_by_hand() -> None:
    statistics = numeric_statistics([np.array([4.0, 1.0, 3.0, 2.0, 1e300])])
    assert (statistics.median, statistics.scale, statistics.count) == (3.0, 1.0, 5)
    assert statistics.transform("standardise").median == 3.0
    assert statistics.transform("standardise_log").median == pytest.approx(np.log(4.0))
    assert statistics.transform("standardise_log").scale == pytest.approx(np.log(5.0 / 3.0) / 2)
    assert numeric_statistics([np.array([1.0, 2.0])]).median == 1.5  # the mean of the middle two
    assert numeric_statistics([np.zeros(0)]) == type(statistics)(0.0, 1.0, 0)


@example([1.7976931348623157e308, -9.9792015476736e291])
@example([1.7976931348623157e308, -1.7976931348623157e308])
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_number_statistics_are_finite_with_a_positive_scale(values: list[float]) -> None:
    statistics = numeric_statistics([np.array(values)])
    assert np.isfinite([statistics.median, statistics.scale]).all()
    assert statistics.scale > 0


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
