"""What the characters of a number, read one by one, add to the scores of exact numbers (`heads.candidates`).

python -m experiments.read_back RUN --base bases/qwen2.5-0.5b --data test.jsonl

With digits in view a base reads a number's characters one by one, and at each it says how likely the next one is. No
run uses that. Here a number is spelt out of its candidates: the next character comes from the best candidate that
begins with the characters so far. A candidate's score is the log odds of its P and a share of the log likelihood of its
characters. They are read without <NUM> and its value, which would tell them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from cqwen_dist.checkpoint.trained import load_trained
from cqwen_dist.config.shape import CHARACTERS, LONGEST_NUMERAL, PLACES
from cqwen_dist.console import quiet_libraries
from cqwen_dist.heads.candidates import equal
from cqwen_dist.heads.number_head import decision_strength
from cqwen_dist.heads.numerals import characters
from cqwen_dist.parallel.runtime import distributed
from cqwen_dist.training.assembly import build_run, groups_of
from experiments.first_character import config_of

TOGETHER, END = 8, len(CHARACTERS)  # numbers in a batch; the column of a numeral's end
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)


class Read(NamedTuple):
    """A number of a text, and its J candidates."""

    odds: Tensor  # [J]: log P / (1 - P); -inf for none
    spelt: Tensor  # [J,L]: places in `CHARACTERS`, `END` behind the last
    number: Tensor  # [L]: likewise
    likely: Tensor  # [L,END + 1]: log likelihood of each next character of the number
    likeliest: bool  # whether the likeliest candidate is right


@torch.no_grad()
def numbers_of(model: Any, batch: Any) -> Iterator[Read]:
    """The numbers of a batch that have characters."""
    action, head, rows = model.action, model.action.number_head, torch.tensor(model.config.digit_rows)
    at, width = batch.number_places, batch.input_ids.shape[1]
    y = batch.numeric_labels.flatten()[at]
    z = model.features(batch.input_ids, batch.numeric_values, None, batch.position_ids, keep=at)
    u, memory = action.add_noise(model.abduction(z)), head.memory_at(batch, at)
    held = head.candidates(memory)
    p = 0.5 + decision_strength(head.scores(u, held)).double().atan() / torch.pi
    odds = p.clamp(1e-9, 1 - 1e-9).logit().masked_fill(held.isnan(), -torch.inf)
    sure = ~held[:, PLACES].isnan()  # the value of an expression is written anyway
    odds[sure] = odds[sure].masked_fill(torch.arange(held.shape[1]) != PLACES, -torch.inf)
    right = equal(held.gather(1, odds.argmax(1, keepdim=True)), y)[:, 0].tolist()
    spelt, wanted = (found.masked_fill(found < 0, END) for found in (characters(held), characters(y)))
    lines, places = torch.div(at, width, rounding_mode="floor"), at % width
    for part in torch.arange(len(at)).split(TOGETHER):
        line, place = lines[part], places[part]
        last = int(min(width, place.max() + LONGEST_NUMERAL + 2))
        ids, values = batch.input_ids[line, :last].clone(), batch.numeric_values[line, :last].clone()
        ids[torch.arange(len(part)), place + 1] = rows[wanted[part, 0].clamp(max=END - 1)]
        values[torch.arange(len(part)), place + 1] = 0.0
        z = model.features(ids, values, None, batch.position_ids[line, :last], keep=torch.arange(ids.numel()))
        for i, begin, z_line in zip(part.tolist(), place.tolist(), z.view(len(part), last, -1), strict=True):
            count = int((wanted[i] != END).sum())
            if count:
                law = action.word_part(action.add_noise(model.abduction(z_line[begin : begin + count + 1])))
                found = action.word_head().loc(law).float().log_softmax(-1)[:, rows]
                found[0] = found[0].log_softmax(-1)  # there the base says <NUM>
                end = torch.log1p(-found.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
                yield Read(odds[i], spelt[i], wanted[i], torch.cat([found, end], -1), right[i])


def spelt_right(read: Read, share: float) -> bool:
    """Whether the number is spelt from its candidates, character by character."""
    scores = read.odds
    for place, likely in enumerate(read.likely):
        scores = scores + share * likely[read.spelt[:, place]]
        if int(read.spelt[scores.argmax(), place]) != int(read.number[place]):
            return False
        scores = scores.masked_fill(read.spelt[:, place] != read.number[place], -torch.inf)
    return True


def main(
    run: Annotated[Path, typer.Argument(help="A run with candidates and digits in view.")],
    base: Annotated[str, typer.Option(help="Folder of its base.")] = "bases/qwen2.5-0.5b",
    data: Annotated[Path, typer.Option(help="GSM8K's problems that it did not learn.")] = Path("test.jsonl"),
    numbers: Annotated[int, typer.Option(help="About so many numbers are read.")] = 350,
) -> None:
    """Print how many numbers are spelt right, by the share of the characters' log likelihood."""
    quiet_libraries()
    with TemporaryDirectory() as folder, distributed() as runtime:
        config = config_of(base, data, Path(folder))
        made = build_run(config, runtime, groups_of(config, runtime))
        model = load_trained(run)[0].model
        found = [read for batch in next(iter(made.calibration_loader(0, numbers))) for read in numbers_of(model, batch)]
    typer.echo(
        f"{len(found)} numbers; the likeliest is right at {sum(read.likeliest for read in found) / len(found):.1%}"
    )
    for share in SHARES:
        typer.echo(f"spelt, share {share:g}: {sum(spelt_right(read, share) for read in found) / len(found):.1%}")


if __name__ == "__main__":
    typer.run(main)
