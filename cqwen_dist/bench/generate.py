"""``cqwen bench generate``: tokens/s of every mode and of Hugging Face's generate on the same base, timed in turn.

Weights are random, as speed depends on shapes, with one exception: mode `standard` computes few scales if P separates
words well, and all of them if not (`ops.ovr.best`). Row "standard" has equal scales, as a calibrated start has; row
"standard, all scales" is the worst case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from cqwen_dist.bench.timing import in_turn, seconds_of
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.backbone import build_base

MODES = ("standard", "compatible", "ovr", "causal", "individual")


def run(
    hidden: int = 896,
    layers: int = 24,
    vocab: int = 151_936,
    batches: tuple[int, ...] = (1, 4),
    prompt: int = 32,
    new_tokens: int = 8,
    rounds: int = 3,
    device: str = "cpu",
) -> dict[str, Any]:
    """Medians over rounds, and each mode's ratio to Hugging Face within a round."""
    base = build_base(
        {
            "model_type": "qwen2",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": hidden * 38 // 7,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden // 64),
            "num_key_value_heads": 2 if hidden >= 128 else 1,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
        seed=0,
    ).to(device)  # type: ignore[arg-type]  # transformers wraps `to`
    base.eval()
    model = _causal(base, vocab)
    contenders: dict[str, Callable[[Tensor], Any]] = {
        "Hugging Face": lambda ids: base.generate(
            ids, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0
        )
    }
    even = model.model.action.b_noise.detach().clone()
    uneven = even * torch.logspace(-2, 2, even.numel(), device=even.device)
    for mode in MODES:
        contenders[mode] = partial(_generate, model, mode, new_tokens, even)
    contenders["standard, all scales"] = partial(_generate, model, "standard", new_tokens, uneven)
    results = []
    for batch in batches:
        ids = torch.randint(0, vocab - 2, (batch, prompt), generator=torch.Generator().manual_seed(batch)).to(device)
        works = {name: partial(seconds_of, partial(work, ids), ids.device) for name, work in contenders.items()}
        in_turn(works, 1)  # warms up
        times = in_turn(works, rounds)
        for name, own in times.items():
            ratios = [a / b for a, b in zip(times["Hugging Face"], own, strict=True)]
            rate = batch * new_tokens / median(own)
            row = {"batch": batch, "contender": name, "tokens_per_s": rate, "ratio": median(ratios)}
            results.append({**row, "ratio_least": min(ratios), "ratio_most": max(ratios)})
    shape = {"hidden": hidden, "layers": layers, "vocab": vocab, "prompt": prompt, "new_tokens": new_tokens}
    return {"shape": shape, "rounds": rounds, "threads": torch.get_num_threads(), "results": results}


def _causal(base: Any, vocab: int) -> CausalQwenForCausalLM:
    """A CausalQwen of the same weights: the transformer is shared, the heads are copies."""
    shell = copy.copy(base)
    shell._modules = dict(base._modules)
    shell.model = copy.copy(base.model)
    shell.model._modules = dict(base.model._modules)
    model = CausalQwenModel.from_base_model(shell, start="seed", num_token_id=vocab - 2)
    with torch.no_grad():
        model.abduction.set_scale(1e-3)
        model.action.b_noise.fill_(1e-3)
        model.action.threshold.fill_(15.0)
    return CausalQwenForCausalLM(model.config, model).to(base.device).eval()


@torch.no_grad()
def _generate(model: CausalQwenForCausalLM, mode: str, new_tokens: int, b_noise: Tensor, ids: Tensor) -> None:
    """Generate with this b_noise [C]."""
    model.model.action.b_noise.copy_(b_noise)
    model.generate(ids, mode=mode, do_sample=False, seed=0, max_new_tokens=new_tokens, eos_token_id=[])


def table(result: dict[str, Any]) -> Table:
    """`run`'s result for a terminal."""
    title = f"tokens/s of all modes and of Hugging Face's generate, {result['shape']}, {result['threads']} thread(s)"
    shown = Table(title=title)
    for column in ("batch", "", "tokens/s", "ratio", "least", "most"):
        shown.add_column(column)
    for row in result["results"]:
        shown.add_row(
            str(row["batch"]),
            row["contender"],
            f"{row['tokens_per_s']:.2f}",
            *(f"{row[name]:.2f}" for name in ("ratio", "ratio_least", "ratio_most")),
        )
    return shown
