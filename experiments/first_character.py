"""Do a numeral's characters, its length, and whether the text has it already, say which candidate is the number
(`heads.candidates`)?

python -m experiments.first_character --base bases/smollm2-135m --data train.jsonl

GSM8K's answers without calculator marks, digits in view, the frozen base. Scores are fitted by ridge regression to the
numbers of three quarters of the problems. On the others: how often the likeliest candidate is the number, if shares are
added of the base's own rows of the first characters, and of ridge regressions to "it is in the text already" and to the
numeral's first two characters and its length.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from cqwen_dist.config.reading import given_config
from cqwen_dist.config.shape import FORMS
from cqwen_dist.console import quiet_libraries
from cqwen_dist.heads.candidates import equal, forms_of
from cqwen_dist.model.ridge import fold_of_row, ridges_by_leave_one_out
from cqwen_dist.parallel.groups import ALONE
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.training.assembly import build_run, groups_of

# Of the first characters' rows, of "already", and of the first two and the length
SHARES = (
    *((share, 0.0, 0.0) for share in (0.0, 0.1, 0.25, 0.5, 1.0)),
    *((0.25, share, 0.0) for share in (0.25, 0.5, 0.75)),
    *((0.25, 0.5, share) for share in (0.1, 0.25, 0.5, 1.0)),
)
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
def read(config: Any, numbers: int) -> tuple[Tensor, ...]:
    """z [N,H], candidates [N,J], values [N], targets of the fits and folds [N] of some N numbers; the characters' rows
    [12,H]."""
    with distributed() as runtime:
        run = build_run(config, runtime, groups_of(config, runtime))
        action, parts = run.model.action, []
        head: Any = action.number_head
        for batch in next(iter(run.calibration_loader(0, numbers))):
            at = batch.number_places
            folds = fold_of_row(batch, ALONE).repeat_interleave(batch.labels.shape[1])[at]
            memory, values = head.memory_at(batch, at), batch.numeric_labels.flatten()[at]
            found = head.candidates(memory), values, head.score_targets(values, memory), folds
            parts.append((run.forward(batch, at).double(), *found))
        together = (torch.cat(column) for column in zip(*parts, strict=True))
        return *together, action.cls_weight[list(run.words.digit_rows)].double()


def shares(
    z: Tensor, held: Tensor, values: Tensor, targets: Tensor, folds: Tensor, rows: Tensor
) -> dict[tuple[float, float, float], float]:
    """How often the likeliest candidate is right on the problems left out, by `SHARES`."""
    known, right = folds < LEFT_OUT, equal(held, values)
    found, _ = ridges_by_leave_one_out(z[known], targets[known])
    scores = z @ found.T + targets[known].mean(0) - found @ z[known].mean(0)
    own, told = scores[:, : held.shape[1]], scores[:, held.shape[1] :]
    told[:, FORMS["again"] : FORMS["again"] + FORMS["first"]] = z @ (rows - rows.mean(0)).T
    of_again, of_first, *of_shape = (
        torch.nn.functional.pad(told, (0, 1)).gather(1, form) for form in forms_of(held).unbind(-1)
    )
    out = {}
    for share in SHARES:
        all_of_it = own + share[0] * of_first + share[1] * of_again + share[2] * sum(of_shape)
        best = all_of_it.masked_fill(held.isnan(), -torch.inf).argmax(1)
        out[share] = float(right.gather(1, best[:, None])[~known].double().mean())
    return out


def main(
    base: Annotated[str, typer.Option(help="Folder of the base.")] = "bases/smollm2-135m",
    data: Annotated[Path, typer.Option(help="GSM8K's train.jsonl.")] = Path("train.jsonl"),
    numbers: Annotated[int, typer.Option(help="About so many numbers are read.")] = 3000,
) -> None:
    """Print, for each pair of shares, how often the likeliest candidate is the number."""
    quiet_libraries()
    with TemporaryDirectory() as folder:
        found = read(config_of(base, data, Path(folder)), numbers)
    count = int((found[4] >= LEFT_OUT).sum())
    for (of_first, of_again, of_shape), right in shares(*found).items():
        typer.echo(
            f"{of_first:g} of the characters, {of_again:g} of what was used, {of_shape:g} of two and the length: "
            f"{right:.1%} of {count} numbers"
        )


if __name__ == "__main__":
    typer.run(main)
