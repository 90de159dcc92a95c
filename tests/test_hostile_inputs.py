"""Drawn damage to run folders, configs and hostfiles: each gives a result or one line, never a traceback.

HOSTILE=2000 draws that many, HOSTILE_SEED others.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cqwen_dist.checkpoint.manifest import choose_checkpoint, finish_renames, list_checkpoints, resolve_checkpoint
from cqwen_dist.cli.results import describe
from cqwen_dist.cluster.job import read_history
from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.folder import is_done, refuse_changes
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.report.html import write_report
from cqwen_dist.tools.slurm.run_status import lines, look

COUNT = int(os.environ.get("HOSTILE", "24"))
SEED = int(os.environ.get("HOSTILE_SEED", "1"))
VALUES: list[Any] = [None, True, -1, 0, 1e400, float("nan"), 10**30, [], {}, [1], {"a": 1}]
VALUES += ["", "x", "\x1b[2J", "../../..", "\ud800", "9" * 5000]
BYTES = [b"", b"\0", b"{", b"[" * 50_000, b"\xff\xfe\x00", b"null", b"3", b'"x"', b"{}\n{}", b"a: &a [*a]", b"- " * 999]


def _mangled(data: bytes, draw: random.Random) -> bytes:
    """The file's bytes with one kind of damage."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.choice(BYTES)
    if kind == 1:
        return data[: draw.randrange(len(data) + 1)]
    if kind == 2 and data:
        at = draw.randrange(len(data))
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    try:  # other values in a JSON document, or in each line of one
        documents = [json.loads(line) for line in data.splitlines()] if data.count(b"\n{") else [json.loads(data)]
    except ValueError:
        return data.replace(b":", draw.choice([b":\n", b"::", b": !!python/object:os.system "]), 3)
    return "\n".join(json.dumps(_other_value(document, draw)) for document in documents).encode(
        "utf-8", "surrogatepass"
    )


def _other_value(document: Any, draw: random.Random) -> Any:
    if isinstance(document, dict) and document and draw.random() < 0.8:
        key = draw.choice(sorted(document))
        if draw.random() < 0.2:
            return {k: v for k, v in document.items() if k != key}
        return {**document, key: _other_value(document[key], draw)}
    return draw.choice(VALUES)


def _looks(run: Path, draw: random.Random) -> list[Callable[[], object]]:
    """What verbs do with a run folder, without its tensors."""
    out = run.with_suffix(".html")
    return [
        lambda: lines(look(str(run))),
        lambda: read_status(run),
        lambda: read_history(run),
        lambda: [describe(folder) for folder in list_checkpoints(run)],
        lambda: choose_checkpoint(run, draw.choice(["auto", "last-good", "never"])),
        lambda: finish_renames(run),
        lambda: resolve_checkpoint(run),
        lambda: load_config(run / "config.yaml"),
        lambda: (refuse_changes(config := load_config(run.parent / "good.yaml", [f"run.dir={run}"])), is_done(config)),
        lambda: write_report([run], out),
    ]


def _gives_one_line(action: Callable[[], object], number: int) -> None:
    line = ""
    try:
        action()
    except UserError as error:
        line = str(error)
    except Exception as error:
        raise AssertionError(f"HOSTILE_SEED={SEED}, number {number}") from error
    assert "\n" not in line


@pytest.mark.timeout(1200)
def test_a_damaged_run_folder_gives_one_line(one_rank: Path, tmp_path: Path) -> None:
    shutil.copy(one_rank / "config.yaml", tmp_path / "good.yaml")
    kept = [p for p in one_rank.rglob("*") if p.is_file() and p.suffix in (".json", ".jsonl", ".yaml", "")]
    (history := one_rank / "slurm" / "history.jsonl").parent.mkdir(exist_ok=True)
    start = {"event": "start", "time": 1.0, "job": "1", "start": 0, "nodes": "n", "step": 0}
    history.write_text(json.dumps(start) + "\n" + json.dumps({**start, "event": "end", "how": "lost", "reason": "x"}))
    try:
        for number in range(COUNT):
            draw = random.Random(f"{SEED}-{number}")
            run = tmp_path / "run"
            shutil.copytree(one_rank, run, ignore=shutil.ignore_patterns("*.safetensors", "base"))
            for path in draw.sample([*kept, history], draw.randint(1, 3)):
                target = run / path.relative_to(one_rank)
                if target.is_file():
                    target.write_bytes(_mangled(target.read_bytes(), draw))
            for look_at in _looks(run, draw):
                _gives_one_line(look_at, number)
            shutil.rmtree(run)
    finally:
        shutil.rmtree(history.parent)
