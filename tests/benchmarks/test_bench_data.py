"""bench data: its rows and table, the watch over memory."""

from benchmarks import data
from cqwen_dist.config import DataConfig
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer
from cqwen_dist.tools.diabetes import diabetes_texts


def test_both_tables_in_one_run() -> None:
    tokenizer = NumericalAwareTokenizer(train_tokenizer(diabetes_texts("train"), 400))
    made = {"prompt_template": "{a}", "text_template": "{b}", "target_field": "b"}  # what made the texts is no more
    found = data.run(DataConfig(train="bundled:diabetes/train", **made), tokenizer, 2, 1, [1])
    assert [row["name"] for row in found["rows"]] == ["plain tokenizer", "prepare, workers 1", "ten times, workers 1"]
    assert [row["cpu_ratio"] for row in found["rows"][::2]] == [1.0, 1.0]
    assert all(row["main_cpu_s"] > 0 and row["wall_s"] > 0 for row in found["rows"])
    sizes = [own["bytes"] for own in found["memory"].values()]
    assert sizes == [sizes[0], 10 * sizes[0]]
