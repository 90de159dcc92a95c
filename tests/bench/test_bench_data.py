"""bench data: its rows and table, the watch over memory; a corpus prepared and read in bounded memory (slow)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.shared import shared_path

from cqwen_dist.bench import corpus, data
from cqwen_dist.bench.memory_watch import Watch
from cqwen_dist.config import DataConfig, UserError
from cqwen_dist.data.diabetes import diabetes_texts
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer, train_tokenizer


def test_both_tables_in_one_run() -> None:
    tokenizer = NumericalAwareTokenizer(train_tokenizer(diabetes_texts("train"), 400))
    found = data.run(DataConfig(train="bundled:diabetes/train"), tokenizer, 2, 1, [1])
    assert [row["name"] for row in found["rows"]] == ["plain tokenizer", "prepare, workers 1", "ten times, workers 1"]
    assert [row["cpu_ratio"] for row in found["rows"][::2]] == [1.0, 1.0]
    assert all(row["main_cpu_s"] > 0 and row["wall_s"] > 0 for row in found["rows"])
    sizes = [own["bytes"] for own in found["memory"].values()]
    assert sizes == [sizes[0], 10 * sizes[0]]
    console = Console(record=True, width=120)
    console.print(data.table(found))
    assert "ten times, workers 1" in console.export_text()


def test_the_watch_sees_what_a_process_that_was_started_holds() -> None:
    hold = "import sys; held = bytearray(150 << 20); print(len(held), flush=True); sys.stdin.read()"
    with Watch(os.getpid()) as watch:
        child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(1.5)
        child.communicate(b"")
    assert watch.root_mib > 10
    assert 150 < watch.peaks[child.pid] < 250
    assert watch.peaks[child.pid] in watch.worker_mib


def test_a_corpus_is_one_file_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    corpus._repeat(tmp_path / "a.txt", tmp_path / "b.txt", 3)
    assert (tmp_path / "b.txt").read_text() == "one\ntwo\n" * 3
    (tmp_path / "c.yaml").write_text(
        "model: {architecture: {model_type: qwen2, vocab_size: 400, hidden_size: 8}, tokenizer: train}\n"
        "data: {train: 'bundled:diabetes'}\nstages: [{name: a, train: [heads], steps: 1}]\nrun: {dir: r}\n"
    )
    with pytest.raises(UserError, match=r"data\.train: found 'bundled:diabetes', allowed: one \.jsonl or \.txt file"):
        corpus.run(tmp_path / "c.yaml", [], 1.0, 1, lambda config: None)


@pytest.mark.slow
def test_a_corpus_is_prepared_and_read_in_less_than_a_gib_a_process() -> None:
    given = {
        "data.train": shared_path("data/gsm8k/train.jsonl"),
        "model.tokenizer": shared_path("tokenizers/qwen2.5"),
    }
    config = Path(__file__).parents[2] / "configs" / "gsm8k.yaml"
    command = [sys.executable, "-m", "cqwen_dist", "bench", "data", str(config)]
    command += [*(f"{key}={value}" for key, value in given.items()), "--corpus-gb", "0.1", "--workers", "2", "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=900).stdout)
    peaks = [found["prepare"]["main_mib"], *found["prepare"]["workers_mib"], found["read"]["main_mib"]]
    assert len(peaks) >= 4, "the main process, two workers, the one that reads"
    assert max(peaks) < 1024
    assert found["read"]["tokens"] <= found["prepare"]["tokens"]
    assert found["cpu_ratio"] < 1.3
