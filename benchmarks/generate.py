"""Tokens/s in every mode, compared with Hugging Face's generate on the same base model.

Both use the same cache: dynamic, or static with compiled steps on CUDA (on a CPU if asked for). Weights are random, as
speed depends only on shapes, with one exception: on a CPU, mode `standard` computes few scales if P separates words
well, else all of them (`ops.ovr.best`). Row "standard" has equal scales, like a calibrated start. Row "standard, all
scales" is the worst case. The heads are always fp32. With a bf16 backbone, on CUDA or with a static cache, the modes
with argmax P use a bf16 copy of W_cls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import CompileConfig

from benchmarks.launches import Launches
from benchmarks.timing import device_name, in_turn, seconds_of
from cqwen_dist.config.architectures.base_architecture import USUAL
from cqwen_dist.model import CausalQwenForCausalLM, CausalQwenModel
from cqwen_dist.model.base_loading import build_base
from cqwen_dist.ops.ovr.best import A_FEW
from cqwen_dist.ops.products import dtype_of

MODES = ("standard", "compatible", "ovr", "causal", "individual", "noise", "sample")
THEIRS = "Hugging Face"
# By device: prompts per batch, new tokens, backbone precision
SHAPES = {"cpu": ((1, 4), 8, "fp32"), "cuda": ((1, 8, 64), 128, "bf16")}


def run(
    hidden: int = 896,
    layers: int = 24,
    vocab: int = 151_936,
    batches: Sequence[int] = (),
    prompt: int = 32,
    new_tokens: int | None = None,
    rounds: int = 3,
    device: str = "cpu",
    precision: str | None = None,
    caches: Sequence[str] = ("dynamic", "static"),
    modes: Sequence[str] = MODES,
    compile_on_cpu: bool = False,
) -> dict[str, Any]:
    """Medians over rounds, and the ratio of each mode to Hugging Face with the same cache in the same round.

    batches, new_tokens, precision: the defaults depend on the device (`SHAPES`).
    """
    own = SHAPES[torch.device(device).type]
    batches, new_tokens, precision = batches or own[0], new_tokens or own[1], precision or own[2]
    base = _base(hidden, layers, vocab, torch.device(device), precision)
    model = _causal(base, vocab)
    contenders = {
        (cache, name): work
        for cache in caches
        for name, work in _contenders(base, model, modes, cache, new_tokens, compile_on_cpu).items()
    }
    results = []
    for batch in batches:
        ids = _prompts(batch, prompt, vocab).to(device)
        works = {key: partial(seconds_of, partial(work, ids), ids.device) for key, work in contenders.items()}
        results += [{"batch": batch, **row} for row in _timed(works, rounds, batch * new_tokens)]
    shape = {"hidden": hidden, "layers": layers, "vocab": vocab, "prompt": prompt, "new_tokens": new_tokens}
    place = {"device": device_name(ids.device), "precision": precision, "compiled": compile_on_cpu or ids.is_cuda}
    launched = operations((THEIRS, *modes)) if "dynamic" in caches else {}
    return {"shape": shape, "rounds": rounds, **place, "results": results, "operations": launched}


def prepared(
    name: str,
    batch: int,
    cache: str,
    device: torch.device,
    new_tokens: int,
    *,
    hidden: int = 896,
    layers: int = 24,
    vocab: int = 151_936,
) -> Callable[[], Any]:
    """A function that generates once with one contender, from prompts of 32 tokens."""
    base = _base(hidden, layers, vocab, device, SHAPES[device.type][2])
    model = _causal(base, vocab)
    modes = () if name == THEIRS else (name,)
    work = _contenders(base, model, modes, cache, new_tokens, compile_on_cpu=False)[name]
    return partial(work, _prompts(batch, 32, vocab).to(device))


def operations(names: Sequence[str], layers: int = 4) -> dict[str, float]:
    """Operations that the host launches for a decoded token with a dynamic cache, by contender.

    Counted on a CPU, with more prompts than those for which `ops.ovr.best` takes its way of a few tokens on a CPU.
    """
    found = {}
    for name in names:
        counts = []
        for tokens in (8, 24):
            place = torch.device("cpu")
            work = prepared(name, A_FEW + 1, "dynamic", place, tokens, hidden=128, layers=layers, vocab=2048)
            with torch.no_grad(), Launches() as seen:
                work()
                seen.end("")
            counts.append(seen.operations[""].total())
        found[name] = (counts[1] - counts[0]) / 16
    return found


def _prompts(batch: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab - 2, (batch, length), generator=torch.Generator().manual_seed(batch))


def _base(hidden: int, layers: int, vocab: int, device: torch.device, precision: str) -> Any:
    """A Qwen2 model with this shape and random weights."""
    base: Any = build_base(
        {
            "model_type": USUAL,
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
    )
    return base.to(device=device, dtype=dtype_of(precision)).eval()


def _timed(works: Mapping[tuple[str, str], Callable[[], float]], rounds: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yields a row per (cache, contender); a failed contender's row contains the reason. works: return seconds."""
    failed: dict[tuple[str, str], str] = {}
    warm = in_turn(works, 2, failed)  # warm-up: compile and record CUDA graphs
    times = in_turn({key: works[key] for key in warm}, rounds, failed)
    for cache, name in works:
        row: dict[str, Any] = {"cache": cache, "contender": name}
        if (cache, name) in failed:
            row["skipped"] = failed[cache, name]
        else:
            row["tokens_per_s"] = tokens / median(times[cache, name])
            if (cache, THEIRS) in times:
                ratios = [a / b for a, b in zip(times[cache, THEIRS], times[cache, name], strict=True)]
                row |= {"ratio": median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}
        yield row


def _contenders(
    base: Any, model: CausalQwenForCausalLM, modes: Sequence[str], cache: str, new_tokens: int, compile_on_cpu: bool
) -> dict[str, Callable[[Tensor], Any]]:
    """Hugging Face's generate and our modes with one cache: {name: function of ids [B,T]}."""
    options: dict[str, Any] = {"cache_implementation": cache, "max_new_tokens": new_tokens}
    if cache == "static" and compile_on_cpu:
        options["compile_config"] = CompileConfig()
        options["compile_config"]._compile_all_devices = True
    theirs = {"do_sample": False, "min_new_tokens": new_tokens, "pad_token_id": 0, **options}
    found: dict[str, Callable[[Tensor], Any]] = {THEIRS: lambda ids: base.generate(ids, **theirs)}
    even = model.model.action.b_noise.detach().clone()
    for mode in modes:
        found[mode] = partial(_generate, model, mode, even, options)
    if cache == "dynamic" and even.device.type == "cpu":
        uneven = even * torch.logspace(-2, 2, even.numel())
        found["standard, all scales"] = partial(_generate, model, "standard", uneven, options)
    return found


def _causal(base: Any, vocab: int) -> CausalQwenForCausalLM:
    """A CausalQwen with the same weights. The transformer is shared, the heads are copies."""
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
def _generate(model: CausalQwenForCausalLM, mode: str, b_noise: Tensor, options: dict[str, Any], ids: Tensor) -> None:
    """Generate with this b_noise [C]."""
    model.model.action.b_noise.copy_(b_noise)
    # Other modes draw their noise themselves, or use none.
    greedy: dict[str, Any] = {"do_sample": False} if mode == "compatible" else {}
    model.generate(ids, mode=mode, seed=0, eos_token_id=[], **greedy, **options)


def table(result: dict[str, Any]) -> Table:
    """The result of `run` for a terminal."""
    steps = "static steps compiled" if result["compiled"] else "nothing compiled"
    place = f"{result['device']}, backbone in {result['precision']}, {steps}"
    launched = ", ".join(f"{name} {count:.0f}" for name, count in result["operations"].items())
    note = f"operations a token with a dynamic cache, four layers: {launched}" if launched else None
    title = f"tokens/s of all modes and of Hugging Face's generate, {result['shape']}, {place}"
    shown = Table("batch", "cache", "", "tokens/s", "ratio", "least", "most", title=title, caption=note)
    for row in result["results"]:
        numbers = [row[name] for name in ("tokens_per_s", "ratio", "ratio_least", "ratio_most") if name in row]
        cells = ["skipped", row["skipped"]] if "skipped" in row else [f"{number:.2f}" for number in numbers]
        shown.add_row(str(row["batch"]), row["cache"], row["contender"], *cells)
    return shown
