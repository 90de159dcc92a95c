"""`cqwen fit` on tables with published splits, compared with heads on the same features.

OUT/SET/table.csv, splits.json        the table; the test rows in each split
OUT/SET/z.safetensors                 cached z from the frozen base, by the digest of the row
OUT/SET/split-K/                      a `cqwen fit` folder, and numbers.json with the results for every model
OUT/numbers.json                      all results

The same command continues after an interruption.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.numbers.free_texts import RATED, RATINGS, ROWS, drawn, rated, sources
from benchmarks.numbers.predicted_laws import QUANTILES, Predicted, laws
from cqwen_dist.config import UserError
from cqwen_dist.data.recipes import records_in
from cqwen_dist.data.text_files import write_table as write_csv
from cqwen_dist.heads.intervals import LEVELS
from cqwen_dist.run.files import START, git_commit, read_object, write_atomically
from cqwen_dist.tables.baselines import baselines
from cqwen_dist.tables.fitting import Prepared, prepare, request_of
from cqwen_dist.tables.judging import OURS

if TYPE_CHECKING:
    from benchmarks.numbers.adapted_base import KeptZ

SPLITS = 20
ADDITIONS = 4000


@dataclass(frozen=True)
class Protocol:
    """A table, and how to split it."""

    file: str  # in the data folder
    target: str = "target"
    columns: str = ""  # column names for a file without a header
    published: float | None = None  # published RMSE
    learnt: int | None = None  # training rows; default: 80 %


_WINE_PL = Protocol("tables/wine_pl.parquet", "price")
PROTOCOLS = {
    # RMSE: Monte Carlo dropout, 20 splits (github.com/yaringal/DropoutUncertaintyExps, 100x epochs, one layer)
    "concrete": Protocol(
        "uci/concrete.csv",
        columns="cement,slag,fly ash,water,superplasticizer,coarse aggregate,fine aggregate,age",
        published=4.826,
    ),
    "energy": Protocol(
        "uci/energy.csv",
        columns="compactness,surface,walls,roof,height,orientation,glazing,distribution of glazing",
        published=0.539,
    ),
    "power-plant": Protocol("uci/power-plant.csv", columns="temperature,vacuum,pressure,humidity", published=4.014),
    "wine-quality-red": Protocol(
        "uci/wine-quality-red.csv",
        columns="fixed acidity,volatile acidity,citric acid,residual sugar,chlorides,free sulfur dioxide,"
        "total sulfur dioxide,density,pH,sulphates,alcohol",
        published=0.622,
    ),
    "kin8nm": Protocol("uci/kin8nm.csv", columns=",".join(f"theta {c}" for c in "abcdefgh"), published=0.079),
    "wine_pl": _WINE_PL,
    "wine_pl-1024": replace(_WINE_PL, learnt=1024),
    "wine_pl-128": replace(_WINE_PL, learnt=128),
    "wine_dot_com": Protocol("tables/wine_dot_com_prices.parquet", "Prices"),
    "gsm8k": Protocol("gsm8k/train.jsonl"),
    **{name: Protocol(RATINGS, learnt=round(0.7 * ROWS)) for name in RATED},
    "functions": Protocol("", learnt=round(0.7 * ROWS)),
    "addition": Protocol(""),
    "subtraction": Protocol(""),
}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that writes to the folder `out`.

    heads: also compare with heads trained on z. lora_epochs: also train these heads together with adapters for so many
    epochs; 0 disables it. test_rows: the maximum number of test rows per split; None for all.
    """

    data: Path
    out: Path
    base: str
    minutes: float
    heads: bool
    lora_epochs: int
    test_rows: int | None
    say: Callable[[str], None]

    def run(self, names: Sequence[str], splits: int) -> dict[str, Any]:
        """Runs the first splits of the named sets, or of all; skips sets without a file. Raises `UserError`."""
        if odd := [name for name in names if name not in PROTOCOLS]:
            raise UserError("--only", odd[0], f"out of {', '.join(PROTOCOLS)}")
        found: dict[str, list[dict[str, Any]]] = {}
        for name in names or PROTOCOLS:
            protocol = PROTOCOLS[name]
            if protocol.file and not (self.data / protocol.file).is_file():
                self.say(f"{name}: left out, there is no {self.data / protocol.file}")
                continue
            if not (self.out / name / "splits.json").is_file():
                write_table(name, protocol, self.data, self.out / name)
            for split in range(splits):
                found.setdefault(name, []).append(self.one_split(name, split))
                write_atomically(self.out / "numbers.json", json.dumps(self.document(found), indent=1))
        return self.document(found)

    def document(self, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """The content of numbers.json."""
        commit = (git_commit(Path(__file__).parent) or "")[:7] or "no commit"
        return {
            "date": date.today().isoformat(),
            "machine": f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}, {commit}",
            "base": self.base,
            "minutes": self.minutes,
            "test_rows": self.test_rows,
            "sets": {name: [split["results"] for split in of_set] for name, of_set in found.items()},
            "verdicts": {name: [split["verdict"] for split in of_set] for name, of_set in found.items()},
            "laws": {
                name: laws(np.concatenate([split["errors"] for split in of_set])) for name, of_set in found.items()
            },
        }

    def one_split(self, name: str, split: int) -> dict[str, Any]:
        """{"results": {model: scores}, "errors": our errors [m], "verdict": the fit's sentences}. Results that
        numbers.json already has are reused."""
        made = self.out / name / f"split-{split}"
        done = made / "numbers.json"
        if done.is_file():
            found = dict(json.loads(done.read_text(encoding="utf-8")))
        else:
            self.say(f"{name}, split {split}")
            found = self.fitted(name, split, made)
            write_atomically(done, json.dumps(found))
        if self.lora_epochs:
            for arm, scores in self.adapted(name, split, found["results"]):
                found["results"][arm] = scores
                write_atomically(done, json.dumps(found))  # save after each arm, as one may take an hour
        return found

    def fitted(self, name: str, split: int, made: Path) -> dict[str, Any]:
        """Runs `cqwen fit` in the folder `made` and returns the result for `one_split`. Raises `UserError`."""
        folder = self.out / name
        command = [sys.executable, "-m", "cqwen_dist", "fit", str(folder / "table.csv")]
        command += ["--target", PROTOCOLS[name].target, "--base", self.base, "--minutes", f"{self.minutes:g}"]
        command += ["--split", f"{folder / 'splits.json'}#{split}", "--seed", str(split), "--out", str(made), "--json"]
        command += ["--test-rows", str(self.test_rows)] * (self.test_rows is not None)
        start = time.perf_counter()
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise UserError(
                "bench numbers", " ".join(command[3:]), f"exit 0, not {ended.returncode}; its error is above"
            )
        seconds = time.perf_counter() - start
        found = self.scores(name, made)
        found["results"][OURS]["seconds"] = seconds
        return {**found, "verdict": json.loads(ended.stdout)["verdict"]}

    def scores(self, name: str, folder: Path) -> dict[str, Any]:
        """The result for `one_split`, from a `cqwen fit` folder."""
        from benchmarks.numbers.competitors import ARMS, Stored, natural_boosting

        made = self.prepared(folder)
        values, parts = made.table.values(), made.parts
        truth = values[parts.test]
        quantiles = _predicted(folder / "predicted.csv")
        law = read_object(folder / "run" / START)["calibration"].get("law", "cauchy").partition(",")[0]
        found = {OURS: Predicted.by_quartiles(quantiles, truth, made.by_log, law).scores(truth)}
        for rival in baselines(made.table, parts.learnt, parts.test, made.prompts, made.by_log):
            found[rival.name] = Predicted.point(rival.predicted).scores(truth)
        if law := natural_boosting(made.table, parts.learnt, parts.test):
            found["NGBoost"] = Predicted.normal(*law, truth).scores(truth)
        if self.heads:
            stages = [Stored(self.z(name, made)(made.prompts), parts.train)]
            found |= dict(_arms(stages, made, {arm: f"{arm}, on z" for arm in ARMS}))
        return {"results": found, "errors": (truth - quantiles[:, len(LEVELS)]).tolist()}

    def adapted(
        self, name: str, split: int, known: dict[str, dict[str, float]]
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Trains the competitors with adapters in a split's folder and yields (title, scores), skipping those known."""
        from benchmarks.numbers.adapted_base import Adapted
        from benchmarks.numbers.competitors import ADAPTED, ARMS, SAMPLES
        from benchmarks.numbers.digits_as_text import DigitText

        ways = {"text, greedy": 1, f"text, median of {SAMPLES}": SAMPLES}
        titles = {arm: f"{arm}, LoRA, epochs: {self.lora_epochs}" for arm in (*ADAPTED, *ways)}
        titles = {arm: title for arm, title in titles.items() if title not in known}
        if not titles:
            return
        self.say(f"{name}, split {split}: heads with adapters")
        folder = self.out / name / f"split-{split}"
        made = self.prepared(folder)
        z = self.z(name, made)
        values, parts = made.table.values(), made.parts
        if heads := {arm: title for arm, title in titles.items() if arm in ARMS}:
            features = Adapted(z.base, made.prompts, z(made.prompts), parts.train, self.lora_epochs)
            yield from _arms([features.still, features], made, heads)
        if not titles.keys() & ways:
            return
        start = time.perf_counter()
        text = DigitText(self.base, made.prompts, values, self.lora_epochs, z.precision)
        text.learn(parts.train)
        for way in [way for way in ways if way in titles]:
            numbers = text.write(parts.test, ways[way])
            numbers[np.isnan(numbers).all(1)] = np.median(values[parts.train])
            scores = Predicted(np.nanquantile(numbers, QUANTILES, axis=1).T).scores(values[parts.test])
            yield titles[way], {**scores, "seconds": time.perf_counter() - start}

    def z(self, name: str, made: Prepared) -> KeptZ:
        """The cached z for a data set, in the precision that `cqwen fit` chose."""
        from benchmarks.numbers.adapted_base import KeptZ

        return KeptZ(self.base, made.config.train.precision, self.out / name / "z.safetensors", self.say)

    def prepared(self, folder: Path) -> Prepared:
        """The prepared table in a `cqwen fit` folder."""
        return prepare(request_of(folder)[0], folder, self.say)[0]


def _predicted(file: Path) -> np.ndarray:
    """The quantiles [m,7] in predicted.csv, at `QUANTILES`."""
    lows, highs = [f"low_{100 * level:g}" for level in reversed(LEVELS)], [f"high_{100 * level:g}" for level in LEVELS]
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    return np.array([[float(row[name]) for name in (*lows, "predicted", *highs)] for row in rows])


def write_table(name: str, protocol: Protocol, data: Path, folder: Path) -> None:
    """Writes table.csv, and splits.json with lists of test rows: published ones, or drawn with the split number."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows(name, protocol, data)
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        write_csv(rows, file)
    published = data / protocol.file.replace(".csv", ".splits.json")
    if protocol.columns and published.is_file():
        splits = json.loads(published.read_text(encoding="utf-8"))["test_rows_of_split"]
    else:
        learnt = protocol.learnt or round(0.8 * len(rows))
        splits = [np.random.default_rng(k).permutation(len(rows))[learnt:].tolist() for k in range(SPLITS)]
    (folder / "splits.json").write_text(json.dumps(splits), encoding="utf-8")


def _rows(name: str, protocol: Protocol, data: Path) -> list[dict[str, Any]]:
    """The rows of a set."""
    if protocol.columns:
        columns = [*protocol.columns.split(","), protocol.target]
        lines = (data / protocol.file).read_text(encoding="utf-8").splitlines()
        cells = ((f"{float(cell):g}" for cell in line.split(",")) for line in lines)
        return [dict(zip(columns, of_line, strict=True)) for of_line in cells]
    if name in RATED or name == "functions":
        found = rated(data / protocol.file, RATED[name]) if name in RATED else sources()
        return [{"text": text, protocol.target: number} for text, number in drawn(found)]
    if not protocol.file:
        return list(_sums(1 if name == "addition" else -1))
    records = [dict(record) for record in records_in(str(data / protocol.file))]
    if name == "gsm8k":
        answers = [record["answer"].rpartition("#### ")[2].replace(",", "") for record in records]
        return [{"question": r["question"], protocol.target: a} for r, a in zip(records, answers, strict=True)]
    return records


def _sums(sign: int) -> Iterator[dict[str, int]]:
    """Yields additions or subtractions of numbers with up to six digits (FoNE, arXiv 2502.09741)."""
    draw = np.random.default_rng(0)
    for a, b in draw.integers(0, 1_000_000, (ADDITIONS, 2)).tolist():
        yield {"a": a, "b": b, "target": a + sign * b}


def _arms(stages: Sequence[Any], made: Prepared, titles: Mapping[str, str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Trains arms and yields (title, test scores). titles: by arm name. stages: as in `competitors.learnt`."""
    from benchmarks.numbers.competitors import ARMS, learnt

    y, parts = made.table.values(), made.parts
    for name, title in titles.items():
        start = time.perf_counter()
        law = learnt(ARMS[name](y, parts.train), stages, *parts)
        yield title, {**law.scores(y[parts.test]), "seconds": time.perf_counter() - start}
