"""Does a new word, taught in a spare row, come where it belongs, and leave all else alone?

python -m experiments.new_words --base bases/smollm2-135m --data train.jsonl

GSM8K's questions, each followed by " This is a problem about". The word " bookkeeping" belongs behind those whose
answer counts money. It is taught by some of both kinds, and judged on other questions.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from cqwen_dist.console import quiet_libraries
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.continuation import padded
from cqwen_dist.generate.decisions import inferred
from cqwen_dist.model import CausalQwenForCausalLM
from cqwen_dist.ops.cauchy import Cauchy
from experiments.taught_words import add_words

WORD, ASKED = " bookkeeping", " This is a problem about"
SHOTS = (4, 16, 64)  # of each kind
WITHIN = 2000  # positions within the questions that are judged


@torch.no_grad()
def read(model: Any, tokenizer: Any, prompts: list[str]) -> tuple[Cauchy, Cauchy]:
    """Words' part of U' at the prompts' ends [N,C], and at some positions before them [M,C]."""
    laws: list[Cauchy] = []
    ends: list[Tensor] = []
    for start in range(0, len(prompts), 8):
        batch = padded(model, tokenizer, [tokenizer.encode(prompt) for prompt in prompts[start : start + 8]])
        action, u = model.model.action, inferred(model, batch, batch.mask.flatten().nonzero()[:, 0])
        laws.append(action.word_part(action.add_noise(u)))
        ends += (torch.arange(batch.mask.shape[1]).expand(batch.mask.shape) == batch.mask.shape[1] - 1)[batch.mask]
    end = torch.stack(ends)
    within = (~end).nonzero()[:, 0][:: max(1, int((~end).sum()) // WITHIN)]
    law = Cauchy(*(torch.cat(side) for side in zip(*laws, strict=True)))
    return Cauchy(law.loc[end], law.scale[end]), Cauchy(law.loc[within], law.scale[within])


@torch.no_grad()
def p_of_all(model: Any, law: Cauchy) -> Tensor:
    """P [N, words in use]."""
    action, used = model.model.action, model.config.used_rows
    return law.affine(action.cls_weight, action.cls_bias).sf(action.threshold)[:, :used]


def rates(said: Tensor, right: Tensor) -> str:
    """Precision and recall."""
    hit = float((said & right).sum())
    return f"{hit / max(int(said.sum()), 1):.2f} | {hit / int(right.sum()):.2f}"


def main(
    base: Annotated[str, typer.Option(help="The folder of a real base (`make base`).")] = "bases/smollm2-135m",
    data: Annotated[Path, typer.Option(help="JSONL with GSM8K's fields (question, answer).")] = Path("train.jsonl"),
    held_out: Annotated[int, typer.Option(help="How many questions are judged.")] = 200,
) -> None:
    quiet_libraries()
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    money, prompts = ["$" in row["answer"] for row in rows], [row["question"] + ASKED for row in rows]
    start = CausalQwenForCausalLM.from_base(base, texts=[f"{row['question']}\n{row['answer']}" for row in rows[-64:]])
    before = NumericalAwareTokenizer.from_pretrained(base, start.config.num_token_id)
    right, (ends, within) = torch.tensor(money[:held_out]), read(start, before, prompts[:held_out])
    old = p_of_all(start, ends)
    typer.echo(f"{int(right.sum())} of {held_out} are about money")
    typer.echo("| of each kind | best word: precision | recall | P > 0.5: precision | recall | within | others' P |")
    for shots in SHOTS:
        model, taught = copy.deepcopy(start), range(held_out, len(rows) - 64)
        those, others = ([prompts[i] for i in taught if money[i] == kind][:shots] for kind in (True, False))
        add_words(model, before, {WORD: those}, others)
        p, word = p_of_all(model, ends), model.config.used_rows - 1
        best, likely = (rates(said, right) for said in (p.argmax(1) == word, p[:, word] > 0.5))
        inside = int((p_of_all(model, within).argmax(1) == word).sum())
        change = float((p[:, :word] - old).abs().max())
        typer.echo(f"| {shots} | {best} | {likely} | {inside} of {len(within.loc)} | {change:g} |")


if __name__ == "__main__":
    typer.run(main)
