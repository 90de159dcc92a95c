"""Are words drawn from P / sum P (mode ovr) as good as those drawn from the softmax (mode compatible)?

python -m experiments.ovr_draws --base bases/smollm2-135m --data train.jsonl

The table of docs/generation.md: what share of sum P the likeliest words have on real texts, and the base's perplexity
of the texts that each setting writes, beside their distinct-2 (different pairs of tokens among all pairs).
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from cqwen_dist.console import quiet_libraries
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.generate.continuation import continue_text, padded
from cqwen_dist.model import CausalQwenForCausalLM

TOPS = (1, 10, 50, 1000)
OVR: list[dict[str, Any]] = [
    {},
    {"top_k": 50},
    {"top_k": 10},
    {"top_p": 0.9},
    {"temperature": 0.5},
    {"temperature": 0.3},
    {"temperature": 0.2},
    {"temperature": 0.15},
    {"temperature": 0.1},
    {"temperature": 0.5, "top_k": 50},
    {"temperature": 0.3, "top_k": 50},
    {"temperature": 0.3, "top_p": 0.9},
]
SETTINGS = [
    *(("compatible", {"do_sample": True, "top_k": 0, **o}) for o in ({}, {"temperature": 0.7}, {"top_p": 0.9})),
    *(("ovr", option) for option in OVR),
]


@torch.no_grad()
def shares(model: CausalQwenForCausalLM, tokenizer: NumericalAwareTokenizer, texts: list[str]) -> dict[str, Tensor]:
    """At each token of the texts: the share of the likeliest words in sum P (and in the softmax), [N, len(TOPS)]."""
    batch = padded(model, tokenizer, [tokenizer.encode(text) for text in texts])
    net = model.model
    law = net.action.add_noise(
        net.infer(batch.ids, batch.values, batch.mask, keep=batch.mask.flatten().nonzero()[:, 0])
    )
    scores = net.action.scores(law)
    laws = {"P / sum P": scores.sf(net.action.threshold), "softmax": scores.loc.softmax(-1)}
    found = {"sum P": laws["P / sum P"].sum(-1)}
    for name, p in laws.items():
        used = p[:, : net.config.used_rows].sort(descending=True).values.cumsum(-1)
        found[name] = used[:, [min(top, used.shape[1]) - 1 for top in TOPS]] / used[:, -1:]
    return found


@torch.no_grad()
def judged(base: Any, tokenizer: Any, prompt: str, text: str) -> tuple[float, list[int]]:
    """Sum of -log p of the continuation's tokens under the base, and the tokens, as the base's tokenizer has them."""
    before, whole = (tokenizer(part, return_tensors="pt").input_ids for part in (prompt, prompt + text))
    start = before.shape[1]
    surprise = -base(whole).logits[0, start - 1 : -1].log_softmax(-1).gather(1, whole[0, start:, None])
    return float(surprise.sum()), whole[0, start:].tolist()


def distinct_2(texts: list[list[int]]) -> float:
    """Different pairs of neighbouring tokens, among all pairs of all texts."""
    pairs = [pair for text in texts for pair in pairwise(text)]
    return len(set(pairs)) / max(len(pairs), 1)


def main(
    base: Annotated[str, typer.Option(help="The folder of a real base (`make base`).")] = "bases/smollm2-135m",
    data: Annotated[Path, typer.Option(help="JSONL: GSM8K's fields (question, answer), or text.")] = Path(
        "train.jsonl"
    ),
    prompts: Annotated[int, typer.Option(help="How many texts are continued.")] = 8,
    copies: Annotated[int, typer.Option(help="How often each.")] = 4,
    words: Annotated[int, typer.Option(help="By how many tokens.")] = 60,
) -> None:
    quiet_libraries()
    records = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    texts = [record.get("text") or f"{record['question']}\n{record['answer']}" for record in records]
    model = CausalQwenForCausalLM.from_base(base, texts=texts[:64])
    tokenizer = NumericalAwareTokenizer.from_pretrained(base, model.config.num_token_id)
    found = shares(model, tokenizer, texts[64:80])
    typer.echo(f"{len(found['sum P'])} tokens, median sum P {float(found.pop('sum P').median()):.3g}")
    for name, share in found.items():
        for quarter in (0.25, 0.5):
            tops = zip(TOPS, 100 * share.quantile(quarter, 0), strict=True)
            said = ", ".join(f"{top}: {float(part):.3g} %" for top, part in tops)
            typer.echo(f"share of the likeliest words in {name}, quantile {quarter}: {said}")
    judge, spell = AutoModelForCausalLM.from_pretrained(base).eval(), tokenizer.tokenizer
    starts = [" ".join(text.split()[:12]) for text in texts[80 : 80 + prompts]] * copies
    for mode, options in SETTINGS:
        written = continue_text(model, tokenizer, starts, mode=mode, seed=0, max_new_tokens=words, **options)
        surprises, tokens = zip(*(judged(judge, spell, one.prompt, one.text) for one in written), strict=True)
        perplexity = math.exp(sum(surprises) / max(sum(map(len, tokens)), 1))
        typer.echo(f"| {mode} | {options or 'plain'} | {perplexity:.4g} | {distinct_2(list(tokens)):.3f} |")


if __name__ == "__main__":
    typer.run(main)
