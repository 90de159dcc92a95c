"""Where should the tails of an individual's words be cut (`WORD_TAILS`)?

python -m experiments.word_tails --base bases/smollm2-135m --data train.jsonl

For each cut the word temperature that makes 16 individuals as diverse as 16 draws of softmax, how many different words
other individuals then choose, and the mean surprise of these words, beside softmax's entropy: all at positions of
held-out texts. Line of docs/did-not-work.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from cqwen_dist.console import quiet_libraries
from cqwen_dist.generate.modes import MODES, Draws, Options
from cqwen_dist.heads import word_temperature
from cqwen_dist.ops.cauchy import Cauchy
from cqwen_dist.parallel.groups import ALONE
from experiments.claims.subject import calibrated, read

CUTS = (0.0, 0.001, 0.01, 0.05, 0.1)


@torch.no_grad()
def main(
    base: Annotated[str, typer.Option(help="The folder of a real base (`make base`).")] = "bases/smollm2-135m",
    data: Annotated[Path, typer.Option(help="JSONL: GSM8K's fields (question, answer), or text.")] = Path(
        "train.jsonl"
    ),
    positions: Annotated[int, typer.Option(help="How many positions.")] = 64,
) -> None:
    quiet_libraries()
    records = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    texts = [record.get("text") or f"{record['question']}\n{record['answer']}" for record in records]
    lm, tokenizer = calibrated(base, texts[:40], 0, 3072)
    model, z = lm.model, read(lm.model, texts[100:130], tokenizer).z
    action, used, mode = model.action, model.config.used_rows, MODES["individual"]
    u = model.abduction(z[torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:positions]])
    log_p = action.word_head(used).loc(action.word_part(u))[:, :used].double().log_softmax(1)
    typer.echo(f"softmax: entropy {float(-(log_p.exp() * log_p).sum(1).mean()):.2f} nats")
    for cut in CUTS:
        word_temperature.WORD_TAILS = cut
        wide, different, surprise = word_temperature.word_temperature(action, u, used, ALONE), 0.0, 0.0
        for i in range(len(log_p)):
            law = Cauchy(*(part[i].expand(word_temperature.INDIVIDUALS, -1) for part in u))
            draws = Draws(torch.Generator(z.device).manual_seed(i), words=(wide, cut))
            words = mode.choose(
                action, action.word_part(mode.law(action, law, draws).words), draws, Options(used), z.long()
            )
            different += len(words.unique()) / len(log_p)
            surprise -= float(log_p[i, words].mean()) / len(log_p)
        typer.echo(f"cut at {cut}: temperature {wide:,.0f}, {different:.2f} words, surprise {surprise:.2f} nats")


if __name__ == "__main__":
    typer.run(main)
