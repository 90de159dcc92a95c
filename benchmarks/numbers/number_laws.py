"""Which law of a number predicts best: `cqwen fit`'s training with each law on the same rows, judged by CRPS.

OUT/SET/split-K/rows.csv              the rows of a split: at most `LEARNT` to learn from, then at most `JUDGED` to test
OUT/SET/split-K/fit                   table and fit.yaml as `cqwen fit` makes them, once for all laws
OUT/SET/split-K/LAW                   a run with model.number_head LAW; of `auto`, which is a run with the law it chose
OUT/SET/split-K/laws.json             the result of `one_split`

Half the rows test, many more than the published splits have: laws differ by less than a percent. The same command
continues after an interruption.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.numbers.published import PROTOCOLS, write_table
from cqwen_dist.api import evaluate
from cqwen_dist.data.recipes import records_in
from cqwen_dist.data.text_files import write_table as write_csv
from cqwen_dist.run.files import START, read_object, write_atomically
from cqwen_dist.tables.fit_request import FitRequest
from cqwen_dist.tables.fitting import best_checkpoint, prepare

DIABETES = "diabetes"  # scikit-learn's
SETS = (DIABETES, "energy", "concrete", "wine-quality-red", "wine_pl", "kin8nm", "power-plant")
LEARNT, JUDGED = 1000, 2000  # rows at most
LAWS = ("cauchy", "laplace", "student")
FIGURES = ("eval/crps", "eval/reg_nll", "eval/reg_mae", "eval/coverage_90", "eval/coverage_90_known")


@dataclass(frozen=True)
class LawBenchmark:
    """A benchmark that writes to the folder `out`. minutes: of each fit, by which its steps are chosen."""

    data: Path
    out: Path
    base: str
    minutes: float
    say: Callable[[str], None]

    def run(self, names: Sequence[str], splits: int) -> dict[str, Any]:
        """{set: [the result of each split]} for the first splits."""
        found: dict[str, Any] = {}
        for split in range(splits):
            for name in names or SETS:
                found.setdefault(name, []).append(self.one_split(name, split))
                self.say(f"{name}, split {split}: {json.dumps(found[name][-1])}")
        return found

    def one_split(self, name: str, split: int) -> dict[str, Any]:
        """{"chosen": law of auto, "said": why, "laws": {law: test figures}}."""
        folder = self.out / name / f"split-{split}"
        if (done := folder / "laws.json").is_file():
            return dict(read_object(done))
        rows, target = self.rows(name)
        order = np.random.default_rng(split).permutation(len(rows))
        learnt, test = np.split(order[: min(len(rows) // 2, LEARNT) + JUDGED], [min(len(rows) // 2, LEARNT)])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
            write_csv((rows[row] for row in (*learnt, *test)), file)
        judged = list(range(len(learnt), len(learnt) + len(test)))
        (folder / "split.json").write_text(json.dumps([judged]), encoding="utf-8")
        at, minutes = f"{folder / 'split.json'}#0", self.minutes
        prepare(
            FitRequest(str(folder / "rows.csv"), target, self.base, split=at, minutes=minutes), folder / "fit", self.say
        )
        laws: dict[str, Any] = {}
        said = self.trained(folder, "auto")
        chosen = said.partition("-")[0].partition(",")[0]
        for law in LAWS:
            if law != chosen:
                self.trained(folder, law)
            best = best_checkpoint(folder / ("auto" if law == chosen else law))
            figures = evaluate(best, folder / "fit" / "table" / "test.csv")
            laws[law] = {"checkpoint": best.name, **{key: figures[key] for key in FIGURES if key in figures}}
        found = {"chosen": chosen, "said": said, "laws": laws}
        write_atomically(done, json.dumps(found, indent=1))
        return found

    def rows(self, name: str) -> tuple[list[dict[str, Any]], str]:
        """The rows of a table and the name of its target."""
        if name == DIABETES:
            from sklearn.datasets import load_diabetes

            return load_diabetes(scaled=False, as_frame=True).frame.to_dict("records"), "target"
        whole, protocol = self.out / name / "whole", PROTOCOLS[name]
        if not (whole / "table.csv").is_file():
            write_table(name, protocol, self.data, whole)
        return [dict(record) for record in records_in(str(whole / "table.csv"))], protocol.target

    def trained(self, folder: Path, law: str) -> str:
        """The law of a run and why; trains the run if there is none."""
        command = [sys.executable, "-m", "cqwen_dist", "train", str(folder / "fit" / "fit.yaml")]
        if not (folder / law / "done").is_file():
            subprocess.run([*command, f"model.number_head={law}", f"run.dir={folder / law}"], check=True)
            (folder / law / "done").touch()
        return str(read_object(folder / law / START)["calibration"]["law"])


def law_page(found: dict[str, Any]) -> str:
    """Markdown: the mean test CRPS of each law by table, and what auto chose."""
    heads = ["", "splits", *LAWS, "auto chose", "of least CRPS"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, splits in found.items():
        crps = {law: mean(split["laws"][law]["eval/crps"] for split in splits) for law in LAWS}
        auto = mean(split["laws"][split["chosen"]]["eval/crps"] for split in splits)
        cells = [str(len(splits)), *(f"{crps[law]:.4g}" for law in LAWS), "; ".join(split["said"] for split in splits)]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if auto <= min(crps.values()) else 'no'} |")
    return "\n".join(lines) + "\n"
