"""`bench scale`: what was measured on one GPU comes back, and what is added is the plan's messages."""

import pytest

from benchmarks.scale import MEASURED, WORLDS, lora_step, run, table


@pytest.fixture(scope="module")
def found():
    return run()


def test_two_gpus_compute_as_fast_as_the_one_that_was_measured(found) -> None:
    """Up to 2 %: they share the moments."""
    for base in MEASURED[:2]:
        row = next(row for row in found["rows"] if (row["base"], row["gpus"]) == (base.size, 2))
        computed = base.texts * 1024 / (row["seconds"] - row["messages_s"])
        assert computed == pytest.approx(base.tokens_per_s, rel=0.02)


def test_more_gpus_send_more_and_no_gpu_is_faster_for_it(found) -> None:
    for base in MEASURED:
        rows = [row for row in found["rows"] if row["base"] == base.size]
        assert [row["gpus"] for row in rows] == list(WORLDS)
        sent = [row["bytes_sent"] for row in rows]
        assert sent == sorted(sent)
        assert rows[-1]["tokens_per_s_a_gpu"] < rows[0]["tokens_per_s_a_gpu"]


def test_published_points_are_planned_with_the_same_texts(found) -> None:
    for row in found["published"]:
        seconds = 32 * 4096 / row["gpus"] / row["tokens_per_s_a_gpu"]
        assert seconds == pytest.approx(row["seconds"])
        assert 0.7 < row["tokens_per_s_a_gpu"] / row["published"] < 1.1, "or the plan is of something else"


def test_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="72b on 2 GPUs: does not fit"):
        lora_step("72b", 2, "l40s", texts=16, micro=8, length=1024)


def test_the_table_has_all_rows(found) -> None:
    assert table(found).row_count == len(found["rows"]) + len(found["published"]) == 16
