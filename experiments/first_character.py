"""What the start's fits and the base's rows of digits add to the scores of exact numbers (`heads.candidates`).

python -m experiments.first_character --base bases/smollm2-135m --data train.jsonl

GSM8K's answers without calculator marks, digits in view, the frozen base. Scores are fitted to the numbers of three
quarters of the problems, each row by a ridge regression alone, then all by a softmax regression; with and without a
quarter of the base's own rows of a numeral's first character. How often the likeliest candidate is the number of the
other problems.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from cqwen_dist.config.reading import given_config
from cqwen_dist.console import quiet_libraries
from cqwen_dist.heads import candidates as of_candidates
from cqwen_dist.heads.candidates import SHARPENINGS, equal
from cqwen_dist.model.ridge import fold_of_row, ridges_by_leave_one_out
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import ALONE
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.training.assembly import build_run, groups_of

LEFT_OUT = 6  # folds from here on are judged


def config_of(base: str, data: Path, folder: Path) -> Any:
    """A run's config; it takes no step."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    plain = [{**row, "answer": re.sub("<<.*?>>", "", row["answer"])} for row in rows]
    (folder / "plain.jsonl").write_text("\n".join(map(json.dumps, plain)), encoding="utf-8")
    texts = {"prompt_template": "{question}\n", "text_template": "{answer}", "sequence_length": 512}
    return given_config(
        {
            "model": {"name_or_path": base},
            "data": {"train": str(folder / "plain.jsonl"), **texts},
            "stages": [{"name": "heads", "train": ["heads"], "steps": 1}],
            "run": {"dir": str(folder / "run")},
        },
        {},
    )


@torch.no_grad()
def judged(config: Any, numbers: int) -> tuple[int, dict[tuple[bool, str], float]]:
    """(how many of about `numbers` numbers are judged, how often the likeliest candidate is right by whether the base's
    rows are there and the last fit)."""
    with distributed() as runtime:
        run = build_run(config, runtime, groups_of(config, runtime))
        model: Any = run.model
        action, parts = model.action, []
        head: Any = action.number_head
        for batch in next(iter(run.calibration_loader(0, numbers))):
            at = batch.number_places
            x = action.word_part(model.abduction(run.forward(batch, at))).loc
            folds = fold_of_row(batch, ALONE).repeat_interleave(batch.labels.shape[1])[at]
            parts.append((x, head.memory_at(batch, at), batch.numeric_labels.flatten()[at], folds))
        every, memory, values, folds = (torch.cat(column) for column in zip(*parts, strict=True))
        known = folds < LEFT_OUT
        x, rows, out = every[known], action.cls_weight[list(run.words.digit_rows)], {}
        whole = F.pad(every, (0, action.causal_hidden_size - every.shape[1]))
        u = Cauchy(whole, torch.zeros_like(whole))  # a calibrated start's scales are as good as none
        targets = head.score_targets(values[known], memory[known])
        found, _ = ridges_by_leave_one_out(x.double(), targets)
        bias = targets.mean(0) - found @ x.double().mean(0)
        for characters, (fit, steps) in product((False, True), {"ridge": 0, "softmax": SHARPENINGS}.items()):
            of_candidates.SHARPENINGS = steps
            for part in (action.candidate_forms, action.candidate_form_bias):
                part.zero_()
            head.start_scores(found, bias)
            last = head.sharpened(x, values[known], memory[known], rows if characters else None)
            for name, part in last.items():
                action.get_parameter(name).copy_(part)
            right = equal(head.decide(u, memory).likeliest[:, None], values)[:, 0]
            out[characters, fit] = float(right[~known].double().mean())
        return int((~known).sum()), out


def main(
    base: Annotated[str, typer.Option(help="Folder of the base.")] = "bases/smollm2-135m",
    data: Annotated[Path, typer.Option(help="GSM8K's train.jsonl.")] = Path("train.jsonl"),
    numbers: Annotated[int, typer.Option(help="About so many numbers are read.")] = 3000,
) -> None:
    """Print how often the likeliest candidate is the number, by fit, with and without the base's rows."""
    quiet_libraries()
    with TemporaryDirectory() as folder:
        count, found = judged(config_of(base, data, Path(folder)), numbers)
    for (characters, fit), right in found.items():
        rows = "with the base's rows" if characters else "without"
        typer.echo(f"{fit} regressions, {rows}: {right:.1%} of {count} numbers")


if __name__ == "__main__":
    typer.run(main)
