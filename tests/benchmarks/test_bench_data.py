"""bench data: its rows and table, the watch over memory."""

import os
import subprocess
import sys
import time

from benchmarks import data
from benchmarks.memory import MemoryWatch
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


def test_the_memory_watch_counts_child_processes() -> None:
    """Between fork and exec a process still has this one's memory: where the watch looked just then, once more."""
    hold = "import sys; held = bytearray(150 << 20); print(len(held), flush=True); sys.stdin.read()"
    for _ in range(4):
        with MemoryWatch(os.getpid()) as watch:
            child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 60
            while watch.peaks.get(child.pid, 0.0) < 150 and time.monotonic() < deadline:
                time.sleep(0.05)
            child.communicate(b"")
        if watch.peaks[child.pid] < 0.9 * watch.root_mib or watch.root_mib < 250:
            break
    assert watch.root_mib > 10
    assert 150 < watch.peaks[child.pid] < 250
    assert watch.peaks[child.pid] in watch.worker_mib
