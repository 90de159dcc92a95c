"""`cqwen accept`: whether this site's ranks do what the project claims, measured there, as one table.

One small run is trained by one rank and by all, in every layout of ZeRO and vocabulary groups; then one is killed and
gone on with. `cqwen bench ranks` counts messages, memory and speed.

FOLDER/config.yaml, RUN/     the runs
FOLDER/ranks-N.json          `cqwen bench ranks` on N ranks
FOLDER/accept.json           the table
"""

from __future__ import annotations

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

from cqwen_dist.cluster.launch import STOPPED, launch, run_words
from cqwen_dist.config import UserError
from cqwen_dist.config.architectures import USUAL
from cqwen_dist.parallel.collectives import Stopped
from cqwen_dist.run.files import LATEST, METRICS, write_atomically
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.site.measure import said_bandwidths

STEPS, COMPARED = 60, 10  # of a run; of these compared over layouts, as rounding grows from step to step
CLOSE = 1e-3  # relative, fp32: sums in another order; 2e-5 is usual on CPUs, and a GPU may multiply in TF32
MEMORY = 0.10  # by which planned memory may differ from measured
KILL_WAIT_S = 600.0
RUN: dict[str, Any] = {
    "model": {
        "architecture": {
            "model_type": USUAL,
            "vocab_size": 640,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
        "tokenizer": "train",
        "lora": {"r": 4, "alpha": 8},
    },
    "data": {"train": "bundled:diabetes/train", "sequence_length": 256},
    "stages": [{"name": "all", "train": ["heads", "embedding", "lora"], "steps": STEPS, "lr": 1e-3}],
    "train": {"micro_batch_size": 4, "checkpoint_every": 5, "precision": "fp32"},
}


@dataclass(frozen=True)
class Row:
    """A line of the table. passed: None where there is nothing to pass."""

    what: str
    found: str
    allowed: str
    passed: bool | None


@dataclass(frozen=True)
class Site:
    """Where it is tried: on so many ranks of this machine, or on a hostfile's hosts, which all see the folder."""

    ranks: int
    hostfile: Path | None
    folder: Path
    say: Callable[[str], None]

    def accept(self) -> dict[str, Any]:
        """{"ranks", "rows", "passed"}, also written as accept.json. Raises `UserError`, and `Stopped` by a signal."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UserError("--folder", str(self.folder), "a folder that is empty or does not exist yet")
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {**RUN, "train": {**RUN["train"], "global_batch_size": max(8, 2 * self.ranks)}}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        alone, together = self.steps(1), self.steps(self.ranks)
        rows = [*of_steps(alone, together), *self.equality(together["layouts"]), self.killed()]
        found = {"ranks": self.ranks, "device": together["device"], "rows": [vars(row) for row in rows]}
        found["passed"] = all(row.passed is not False for row in rows)
        write_atomically(self.folder / "accept.json", json.dumps(found, indent=1))
        return found

    def steps(self, ranks: int) -> dict[str, Any]:
        """What `cqwen bench ranks` finds on so many ranks; one rank is of this machine."""
        out = self.folder / f"ranks-{ranks}.json"
        self.say(f"steps on {ranks} ranks")
        words = ["bench", "ranks", "--out", str(out)]
        code = _not_stopped(run_words(words, ranks, self.hostfile if ranks > 1 else None, self.folder, quiet=True))
        if code or not out.is_file():
            raise UserError(f"cqwen {' '.join(words)}", f"exit {code} on {ranks} ranks", "0; its error is above")
        return dict(json.loads(out.read_text(encoding="utf-8")))

    def train(self, name: str, ranks: int, *overrides: str) -> tuple[int, Path]:
        """(exit code, folder) of a run; one of the same name goes on."""
        run = self.folder / name
        hosts = self.hostfile if ranks > 1 else None
        options = [f"run.dir={run}", *overrides]
        return _not_stopped(launch(self.folder / "config.yaml", options, ranks, True, hosts, look_first=False)), run

    def equality(self, layouts: list[dict[str, Any]]) -> list[Row]:
        """Losses and gradient norms of the same run by one rank and by all, a row a layout."""
        self.say("the same run on one rank")
        code, alone = self.train("alone", 1)
        if code:
            raise UserError("cqwen launch", f"exit {code} on one rank", "0; its error is above")
        rows = []
        for layout in layouts:
            zero, group = layout["zero_stage"], layout["vocab_group_size"]
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
        """A run whose rank 0 is killed after its first checkpoint, and that the same command goes on with."""
        what, allowed = "killed and gone on with", f"all {STEPS} losses equal to the bit"
        self.say("a run that is killed and gone on with")
        whole, run = self.folder / "zero-1", self.folder / "killed"
        words = ["launch", str(self.folder / "config.yaml"), f"run.dir={run}", "--ranks", str(self.ranks)]
        words += [] if self.hostfile is None else ["--hostfile", str(self.hostfile), "--no-preflight"]
        log = self.folder / "killed.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "cqwen_dist", *words]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            began = time.monotonic()
            while process.poll() is None and not (run / LATEST).exists() and time.monotonic() - began < KILL_WAIT_S:
                time.sleep(0.01)
            status = read_status(run)
            if process.poll() is not None or status.get("host") != platform.node():
                process.wait()
                return Row(what, f"not tried: rank 0 ended, or is on another host ({log})", allowed, None)
            os.kill(status["pid"], signal.SIGKILL)
            process.wait()
        before = len(figures(run))
        code, _ = self.train("killed", self.ranks)
        same = code == 0 and figures(run) == figures(whole)
        found = f"killed at step {before}, then exit {code}, " + ("equal" if same else "not equal")
        return Row(what, found, allowed, same and before < STEPS)


def _not_stopped(code: int) -> int:
    """The exit code of ranks. Raises `Stopped` where a signal stopped them: what comes next is not begun."""
    if code == STOPPED:
        raise Stopped("the ranks were")
    return code


def of_steps(alone: dict[str, Any], together: dict[str, Any]) -> list[Row]:
    """Messages, memory and speed of `cqwen bench ranks`, on one rank and on all."""
    rows, ranks = [], together["ranks"]
    for row in together["layouts"]:
        layout = f"ZeRO-{row['zero_stage']}, vocabulary group {row['vocab_group_size']}"
        said, planned = row["said_bytes"], row["planned_bytes"]
        rows.append(Row(f"bytes said in a step: {layout}", f"{said:,}", f"{planned:,}", said == planned))
        ratio = row["planned_mib"] / row["measured_mib"]
        found = f"{row['measured_mib']:,.1f} MiB, planned {row['planned_mib']:,.1f}"
        allowed = f"planned within {MEMORY:.0%}"
        rows.append(Row(f"memory of a step: {layout}", found, allowed, abs(ratio - 1) <= MEMORY))
        share = row["tokens_per_s"] / (ranks * alone["layouts"][0]["tokens_per_s"])
        found = f"{share:.2f}: {row['tokens_per_s']:,.0f} tokens/s over {ranks} times one rank's"
        rows.append(Row(f"scaling efficiency: {layout}", found, "", None))
    for name, speeds in together.get("gib_per_s", {}).items():
        rows.append(Row(f"bandwidth of {name}", said_bandwidths(speeds), "", None))
    return rows


def figures(run: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run so far."""
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["train/total_loss"], record["train/grad_norm"]) for record in records]


def _differences(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[float]:
    """Relative differences of the first `COMPARED` steps; infinite where there are fewer."""
    if min(len(some), len(others)) < COMPARED:
        return [float("inf")]
    pairs = zip(some[:COMPARED], others[:COMPARED], strict=True)
    return [abs(a - b) / max(abs(a), 1e-12) for one, other in pairs for a, b in zip(one, other, strict=True)]


def table(found: dict[str, Any]) -> Table:
    """`Site.accept`'s document for a terminal."""
    title = f"{found['ranks']} ranks, {found['device']}"
    out = Table("", "found", "allowed", "", title=title, title_justify="left")
    verdicts = {True: "passed", False: "FAILED", None: ""}
    for row in found["rows"]:
        out.add_row(row["what"], row["found"], row["allowed"], verdicts[row["passed"]])
    return out
