"""`cqwen bench data --corpus-gb`: a large corpus prepared by `cqwen prepare`, then read for an epoch; time and memory.

The corpus is the file that data.train names, over and over. Every process's anonymous memory is watched: that of
`cqwen prepare`, of each of its workers, and of the one that reads. The plain tokenizer reads the file once beside it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cqwen_dist.bench.data import cpu_seconds, plain, texts_of
from cqwen_dist.bench.memory_watch import Watch
from cqwen_dist.config import Config, UserError, load_config

_STEP = 64  # samples of a step that is read


def run(
    config_file: Path, overrides: list[str], gb: float, workers: int, tokenizer_of: Callable[[Config], Any]
) -> dict[str, Any]:
    """Raises: UserError where data.train is not one file of lines, or preparing it fails."""
    config = load_config(config_file, overrides)
    source = _file(config)
    copies = -(-int(gb * 1e9) // source.stat().st_size)
    tokenizer = tokenizer_of(config)
    texts = texts_of(config.data, tokenizer)
    began = time.process_time()
    plain(texts, tokenizer)
    plain_s = time.process_time() - began
    with tempfile.TemporaryDirectory(prefix="cqwen-corpus-") as folder:
        corpus = Path(folder) / f"corpus{source.suffix}"
        _repeat(source, corpus, copies)
        size = corpus.stat().st_size
        own = [f"data.train={corpus}", f"data.cache_dir={folder}/cache", "data.pack=true", "data.limit=null"]
        overrides = [*overrides, *own]
        prepared = _prepare(config_file, overrides, workers)
        read = _read(load_config(config_file, overrides), tokenizer_of)
    cpu = prepared["cpu_s"] / (plain_s * copies)
    return {"bytes": size, "copies": copies, "texts": len(texts) * copies, "plain_cpu_s_once": plain_s} | {
        "prepare": prepared,
        "read": read,
        "cpu_ratio": cpu,
    }


def table(found: dict[str, Any]) -> Any:
    """The figures for a person."""
    prepare, read = found["prepare"], found["read"]
    workers = ", ".join(f"{mib:,.0f}" for mib in prepare["workers_mib"]) or "none"
    return "\n".join(
        [
            f"{found['bytes'] / 1e9:.2f} GB, {found['copies']:,} times the file: {prepare['tokens']:,} tokens",
            f"prepare: {prepare['wall_s']:,.0f} s, CPU {prepare['cpu_s']:,.0f} s "
            f"({found['cpu_ratio']:.2f} of the plain tokenizer's)",
            f"  RssAnon at most, MiB: {prepare['main_mib']:,.0f}; other processes: {workers}",
            f"read, packed, one epoch: {read['wall_s']:,.0f} s, {read['tokens']:,} tokens in {read['samples']:,} rows",
            f"  RssAnon at most, MiB: {read['main_mib']:,.0f}",
        ]
    )


def _file(config: Config) -> Path:
    source = config.data.train
    path = Path(source).expanduser() if isinstance(source, str) else None
    if path is None or not path.is_file() or path.suffix not in (".jsonl", ".txt"):
        raise UserError("data.train", source, "one .jsonl or .txt file, to be repeated")
    return path


def _repeat(source: Path, corpus: Path, copies: int) -> None:
    data = source.read_bytes()
    with corpus.open("wb") as file:
        for _ in range(copies):
            file.write(data if data.endswith(b"\n") else data + b"\n")


def _prepare(config_file: Path, overrides: list[str], workers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "cqwen_dist", "prepare", str(config_file), *overrides]
    before, began = cpu_seconds(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen([*command, "--workers", str(workers), "--json"], stdout=subprocess.PIPE, text=True)
    with Watch(process.pid) as watch:
        said = process.communicate()[0]
    if process.returncode:
        raise UserError("cqwen prepare", f"no data (exit {process.returncode})", "see above")
    return {
        "wall_s": time.monotonic() - began,
        "cpu_s": cpu_seconds(resource.RUSAGE_CHILDREN) - before,
        "main_mib": watch.root_mib,
        "workers_mib": watch.worker_mib,
        "tokens": json.loads(said)["train"]["tokens"],
    }


def _read(config: Config, tokenizer_of: Callable[[Config], Any]) -> dict[str, Any]:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_epoch, args=(config, tokenizer_of, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    with Watch(process.pid) as watch:
        try:
            found: dict[str, Any] = ours.recv()
        except EOFError:
            raise UserError("reading", "no epoch", "see above") from None
        finally:
            process.join()
    return {**found, "main_mib": watch.root_mib}


def _epoch(config: Config, tokenizer_of: Callable[[Config], Any], answer: Connection) -> None:
    from itertools import islice

    from cqwen_dist.data.load import load_datasets
    from cqwen_dist.data.loader import Loader

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.monotonic()
    dataset = load_datasets(config.data, tokenizer_of(config)).train
    loader = Loader(
        dataset, rank=0, world=1, global_batch_size=_STEP, micro_batch_size=_STEP, seed=0, prefetch=config.data.prefetch
    )
    samples = tokens = 0
    for batches in islice(loader, loader.steps_per_epoch):
        samples += sum(int(batch.attention_mask.any(1).sum()) for batch in batches)
        tokens += sum(int(batch.attention_mask.sum()) for batch in batches)
    if (samples, tokens) != (len(dataset), int(dataset.lengths().sum())):
        raise RuntimeError("an epoch is not the data")
    answer.send({"wall_s": time.monotonic() - began, "samples": samples, "tokens": tokens})
