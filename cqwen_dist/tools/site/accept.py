"""`cqwen accept`: tests on this site whether ranks behave as the project claims, and shows one table.

It trains a small run with one rank and with all ranks, in every layout of ZeRO stages and vocabulary groups. Then it
kills a run and resumes it.

FOLDER/config.yaml, RUN/     the runs
FOLDER/accept.json           the table
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from cqwen_dist.cluster.launch import STOPPED, launch
from cqwen_dist.config import UserError, writing
from cqwen_dist.config.architectures.base_architecture import USUAL, sizes
from cqwen_dist.parallel.collectives import Stopped
from cqwen_dist.run.files import CONFIG, LATEST, LOCK, METRICS, read_lines, write_atomically
from cqwen_dist.run.folder import archive, run_lock
from cqwen_dist.run.status import read_status

STEPS, COMPARED = 60, 10  # steps per run; steps to compare between layouts, few because rounding errors grow
CLOSE = 1e-3  # relative fp32 tolerance for a different summation order: usually 2e-5 on CPUs, but a GPU may use TF32
KILL_WAIT_S = 600.0
LARGEST_GROUP = 8  # ranks that share the vocabulary, usually the GPUs in one machine
RUN: dict[str, Any] = {
    "model": {
        "architecture": {"model_type": USUAL, **sizes(640, 64, 192, 2, 4, 2, True, 256)},
        "tokenizer": "train",
        "lora": {"r": 4, "alpha": 8},
    },
    "data": {"train": "bundled:diabetes/train", "sequence_length": 256},
    "stages": [{"name": "all", "train": ["heads", "embedding", "lora"], "steps": STEPS, "lr": 1e-3}],
    "train": {"micro_batch_size": 4, "checkpoint_every": 5, "precision": "fp32"},
}


@dataclass(frozen=True)
class Row:
    """A table row. passed: None if the test could not be tried."""

    what: str
    found: str
    allowed: str
    passed: bool | None


@dataclass(frozen=True)
class Site:
    """The ranks to test, on this machine or on the hosts in a hostfile, and a folder that all hosts share."""

    ranks: int
    hostfile: Path | None
    folder: Path
    say: Callable[[str], None]

    def accept(self) -> dict[str, Any]:
        """Runs all tests, and returns and writes accept.json. Raises `UserError`, and `Stopped` after a signal."""
        document = {**RUN, "train": {**RUN["train"], "global_batch_size": max(8, 2 * self.ranks)}}
        text, config = yaml.safe_dump(document), self.folder / CONFIG
        with writing("--folder", self.folder, "a folder that can be made"):
            self.folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in self.folder.iterdir()}
        if there - {LOCK} and not (config.is_file() and config.read_bytes() == text.encode()):
            raise UserError("--folder", str(self.folder), "an empty or new folder, or one that this command has begun")
        with run_lock(self.folder):
            archive(self.folder, self.say)  # of a command that was stopped
            config.write_text(text, encoding="utf-8")
            rows = [*self.equality(), self.killed()]
        found = {"ranks": self.ranks, "rows": [vars(row) for row in rows]}
        found["passed"] = all(row.passed is not False for row in rows)
        write_atomically(self.folder / "accept.json", json.dumps(found, indent=1))
        return found

    def train(self, name: str, ranks: int, *overrides: str) -> tuple[int, Path]:
        """Trains a run, or resumes it if the name exists. Returns (exit code, folder). Raises `Stopped`."""
        run = self.folder / name
        hosts = self.hostfile if ranks > 1 else None
        options = [f"run.dir={run}", *overrides]
        code = launch(self.folder / CONFIG, options, ranks, True, hosts, look_first=False)
        if code == STOPPED:  # no further test starts
            raise Stopped("the ranks were")
        return code, run

    def equality(self) -> list[Row]:
        """Compares losses and gradient norms between one rank and all ranks, with one row per layout."""
        self.say("the same run on one rank")
        code, alone = self.train("alone", 1)
        if code:
            raise UserError("cqwen launch", f"exit {code} on one rank", "0; its error is above")
        rows = []
        for zero, group in layouts(self.ranks):
            self.say(f"the same run on {self.ranks} ranks, ZeRO-{zero}, vocabulary group {group}")
            spread = f"parallel.zero_stage={zero}", f"parallel.vocab_group_size={group}"
            code, run = self.train(f"zero-{zero}", self.ranks, *spread)
            what = f"{self.ranks} ranks equal one: ZeRO-{zero}, vocabulary group {group}"
            allowed = f"loss and gradient norm of {COMPARED} steps within {CLOSE:g}"
            if code:
                rows.append(Row(what, f"exit {code}", allowed, False))
                continue
            worst = max(_differences(figures(alone), figures(run)))
            rows.append(Row(what, f"{worst:.1e}", allowed, worst <= CLOSE))
        return rows

    def killed(self) -> Row:
        """Kills rank 0 after the first checkpoint, resumes with the same command, and compares all losses."""
        what, allowed = "killed and gone on with", f"all {STEPS} losses equal to the bit"
        self.say("a run that is killed and gone on with")
        whole, run = self.folder / "zero-1", self.folder / "killed"
        words = ["launch", str(self.folder / CONFIG), f"run.dir={run}", "--ranks", str(self.ranks)]
        words += [] if self.hostfile is None else ["--hostfile", str(self.hostfile), "--no-preflight"]
        log = self.folder / "killed.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "cqwen_dist", *words]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                began = time.monotonic()
                while process.poll() is None and not (run / LATEST).exists() and time.monotonic() - began < KILL_WAIT_S:
                    time.sleep(0.01)
                status = read_status(run)
                if process.poll() is not None or status.get("host") != platform.node():
                    process.wait()
                    return Row(what, f"not tried: rank 0 ended, or is on another host ({log})", allowed, None)
                os.kill(status["pid"], signal.SIGKILL)
                process.wait()
            finally:  # after Ctrl-C
                process.terminate()
                process.wait()
        before = len(figures(run))
        code, _ = self.train("killed", self.ranks)
        same = code == 0 and figures(run) == figures(whole)
        found = f"killed at step {before}, then exit {code}, " + ("equal" if same else "not equal")
        return Row(what, found, allowed, same and before < STEPS)


def layouts(world: int) -> list[tuple[int, int]]:
    """(ZeRO stage, vocabulary group) pairs to compare. Stage 3 is last because it patches torch for good."""
    if world == 1:
        return [(1, 1)]
    group = max(size for size in range(1, min(world, LARGEST_GROUP) + 1) if world % size == 0)
    return [(1, 1), (2, group), (3, group)]


def figures(run: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) for each logged step in a run."""
    steps = (record for record in read_lines(run / METRICS) if "train/total_loss" in record)  # not the start
    return [(record["train/total_loss"], record["train/grad_norm"]) for record in steps]


def _differences(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[float]:
    """Relative differences in the first `COMPARED` steps; infinite if there are fewer steps."""
    if min(len(some), len(others)) < COMPARED:
        return [float("inf")]
    pairs = zip(some[:COMPARED], others[:COMPARED], strict=True)
    return [abs(a - b) / max(abs(a), 1e-12) for one, other in pairs for a, b in zip(one, other, strict=True)]


def table(found: dict[str, Any]) -> Table:
    """The result of `Site.accept` as a table for a terminal."""
    out = Table("", "found", "allowed", "", title=f"{found['ranks']} ranks", title_justify="left")
    verdicts = {True: "passed", False: "FAILED", None: ""}
    for row in found["rows"]:
        out.add_row(row["what"], row["found"], row["allowed"], verdicts[row["passed"]])
    return out
