"""The works for `python -m benchmarks gpu`: each warms up, yields, measures, and yields a JSON-ready result."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.contenders import Work

TOLERANCE = 4e-3  # relative gradient error; bf16 entries are rounded to 2^-9 = 2e-3


class Size(NamedTuple):
    """The problem sizes: for a GPU, or for a trial run on a CPU."""

    tokens: int
    hiddens: tuple[int, int]
    vocab: int
    odd: tuple[int, int]  # tokens and words in the float64 check; not multiples of any tile size
    rounds: int
    square: int  # side of the square matrices whose product measures the peak rate
    copy_bytes: int
    layers: int | None  # backbone layers; None keeps the config's number
    rows: int  # sequences per micro-batch
    length: int  # tokens per sequence
    batches: tuple[int, int]  # prompts decoded at once
    new_tokens: int


GPU = Size(8192, (896, 3584), 151_936, (200, 1_003), 7, 8192, 4 << 30, None, 8, 1024, (1, 64), 128)
TOY = Size(48, (32, 64), 259, (37, 131), 2, 128, 1 << 20, 2, 2, 32, (1, 2), 4)


def machine(size: Size) -> Work:
    """Library versions, the device name, copy bandwidth and bf16 matrix product rate."""

    def work() -> Iterator[Any]:
        import transformers
        from triton import __version__ as triton_version

        from benchmarks.timing import device_name, seconds_of

        device = _device()
        a, b = (torch.randn(size.square, size.square, device=device).bfloat16() for _ in range(2))
        source = torch.empty(size.copy_bytes, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        steps: list[Callable[[], object]] = [lambda: target.copy_(source), lambda: a @ b]
        for step in steps:
            step()
        yield None
        copy_s, product_s = (statistics.median(seconds_of(step, device) for _ in range(10)) for step in steps)
        yield {
            "device": device_name(device),
            "torch": torch.__version__,
            "triton": triton_version,
            "transformers": transformers.__version__,
            "copy_tb_per_s": 2 * size.copy_bytes / copy_s / 1e12,
            "product_tflops": 2 * size.square**3 / product_s / 1e12,
        }

    return work


def loss(name: str, size: Size, hidden: int, tokens: int | None = None) -> Work:
    """A loss implementation: checks ours against float64 first, then measures time, memory and kernels.

    Raises `ArithmeticError` if an error is above `TOLERANCE`.
    """

    def work() -> Iterator[Any]:
        from benchmarks.loss import OURS, contenders, extra_mib, make_problem, one_step
        from benchmarks.timing import seconds_of

        device = _device()
        make = contenders("auto")[name]
        errors: dict[str, float] = {}
        if name in OURS:
            for c in (128 if device.type == "cuda" else 24, hidden):
                odd = make_problem(size.odd[0], c, size.odd[1], torch.bfloat16, device, spread=True)
                errors |= {f"{what}, C={c}": error for what, error in _errors(odd, make).items()}
        # `not <=` rather than `>`, so that a NaN counts as wrong.
        wrong = {what: error for what, error in errors.items() if not error <= TOLERANCE}
        if wrong:
            raise ArithmeticError(f"wrong against float64: {wrong}")
        problem = make_problem(tokens or size.tokens, hidden, size.vocab, torch.bfloat16, device)
        step = one_step(make(problem), problem)
        step()
        extra = extra_mib(step, problem, device)
        yield None
        step()
        seconds = [seconds_of(step, device) for _ in range(size.rounds)]
        yield {
            "hidden": hidden,
            "name": name,
            "ms": 1e3 * statistics.median(seconds),
            "least_ms": 1e3 * min(seconds),
            "most_ms": 1e3 * max(seconds),
            "extra_mib": extra,
            "errors": errors,
            "kernels_ms": _by_kind(step) if device.type == "cuda" else {},
        }

    return work


def ours(config: str, size: Size, *, whole: bool = False, graphs: bool = False, **changes: Any) -> Work:
    """Our training step in the config's last stage, by part. changes: dotted config keys.

    whole: compile the backbone as one graph, as the peer is. graphs: replay what is compiled as CUDA graphs. No run has
    these two: they are timed for a decision.
    """

    def work() -> Iterator[Any]:
        from torch._inductor import config as inductor

        from benchmarks.rig import build_rig
        from benchmarks.step import WARM_UP, Timer, sizes_of, stage_parts
        from cqwen_dist.parallel.runtime import distributed

        inductor.triton.cudagraphs = graphs
        checked, architecture = _trained(config, size, changes | {"model.compile_layers": False} if whole else changes)
        with distributed() as runtime:
            before = torch.cuda.memory_allocated()
            rig = build_rig(checked, architecture, runtime)
            if whole:
                rig.model.transformer.compile()
            elif graphs:  # without a mark, each layer's outputs may overwrite those of the layer before
                rig.model.transformer.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
            plan = rig.enter(0)
            batches = rig.batches(plan)
            for _ in range(WARM_UP + 1):
                rig.step(batches, plan)
            loss = float(rig.step(batches, plan, looking=True)["train/total_loss"])  # of steps that are alike
            yield None
            timer = Timer(runtime.device, _peak(runtime.device), size.rounds)
            s = sizes_of(checked, architecture, runtime.device)[0]
            yield stage_parts(timer, rig, plan, batches, s, before) | {"loss": loss}

    return work


def peer(config: str, size: Size, *, liger: bool, **changes: Any) -> Work:
    """The same step by Hugging Face and PEFT."""

    def work() -> Iterator[Any]:
        from benchmarks.parts import device_counts
        from benchmarks.peer import peer_step
        from benchmarks.rig import random_batches
        from benchmarks.step import WARM_UP, Timer, sizes_of
        from cqwen_dist.parallel.runtime import distributed

        checked, architecture = _trained(config, size, changes)
        with distributed() as runtime:
            device = runtime.device
            s = sizes_of(checked, architecture, device)[-1]
            batches = random_batches(checked, checked.stages[0], int(architecture["vocab_size"]) - 1)
            before = torch.cuda.memory_allocated()
            step = peer_step(checked, architecture, device, liger, checked.model.compile_layers)
            for _ in range(WARM_UP + 1):
                step(batches)
            yield None
            row = Timer(device, None, size.rounds).row("peer", lambda: step(batches), s)
            peak = torch.cuda.max_memory_allocated() - before
            counts = device_counts(lambda: step(batches)) if device.type == "cuda" else {}
            yield row | {"peak_gib": peak / 2**30} | counts

    return work


def decoding(name: str, size: Size, batch: int, cache: str) -> Work:
    """Tokens/s in one of our generation modes, or with Hugging Face's generate on the same base model."""

    def work() -> Iterator[Any]:
        from benchmarks.generate import prepared
        from benchmarks.timing import seconds_of

        device = _device()
        shape: dict[str, Any] = {} if size is GPU else {"hidden": 64, "layers": 2, "vocab": 503}
        step = prepared(name, batch, cache, device, size.new_tokens, **shape)
        for _ in range(2):  # compiles, and records CUDA graphs
            step()
        yield None
        seconds = [seconds_of(step, device) for _ in range(3)]
        yield {"tokens_per_s": batch * size.new_tokens / statistics.median(seconds)}

    return work


def packing(kind: str, size: Size, folder: Path) -> Work:
    """Tokens/s without padding, for padded texts, packed rows with a mask, or packed rows without one."""

    def work() -> Iterator[Any]:
        from benchmarks.packed import one_kind
        from cqwen_dist.config import load_config
        from cqwen_dist.data.load import tokenizer_of

        source = _pages(folder, kind)
        small = {} if size is GPU else {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        large = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        changes = [
            *(f"data.train={source}", "data.text_template=null", "data.text_field=text"),
            "model.tokenizer=train",
            f"data.sequence_length={1024 if size is GPU else 256}",
            *(f"model.architecture.{key}={value}" for key, value in (small or large).items()),
            *(f"train.{key}={size.rows}" for key in ("global_batch_size", "micro_batch_size")),
            "train.precision=bf16",
        ]
        config = load_config(_config("gsm8k"), changes)
        step = one_kind(config, tokenizer_of(config), kind)
        next(step)
        yield None
        yield [next(step) for _ in range(size.rounds)]

    return work


def memory(case: str) -> Work:
    """Measured and planned peak memory for one `python -m benchmarks memory` case."""

    def work() -> Iterator[Any]:
        from benchmarks.memory_check import cases
        from benchmarks.step_memory import config_of, measure
        from cqwen_dist.parallel.runtime import distributed

        with distributed() as runtime:
            found = cases(runtime.device.type)
            chosen = next((each for each in found if each.name == case), found[0])
            yield None
            yield measure(config_of(chosen), chosen.architecture, runtime)

    return work


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _peak(device: torch.device) -> float | None:
    from cqwen_dist.sizes.flops import peak_tflops
    from cqwen_dist.tools.plan.cost import TERA

    peak = peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return None if peak is None else peak * TERA


def _config(name: str) -> Path:
    from importlib.resources import files

    return Path(str(files("cqwen_dist") / "configs" / f"{name}.yaml"))


def _trained(name: str, size: Size, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the config reduced to its last stage and this size, its architecture)."""
    from cqwen_dist.config import load_config
    from cqwen_dist.sizes.architecture import read_architecture

    given = {
        "data.pack": False,
        "data.sequence_length": size.length,
        "train.global_batch_size": size.rows,
        "train.micro_batch_size": size.rows,
        "parallel.vocab_group_size": 1,
        **changes,
    }
    config = load_config(_config(name), [f"{key}={json.dumps(value)}" for key, value in given.items()])
    config = config.model_copy(update={"stages": config.stages[-1:]})
    architecture = read_architecture(config)
    if size is not GPU:
        narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        architecture = {**architecture, **narrow, "num_hidden_layers": size.layers, "vocab_size": 503}
    return config, architecture


def _errors(problem: Any, make: Callable[[Any], Callable[[], object]]) -> dict[str, float]:
    """Relative errors in the loss and the four gradients against the plain formula in float64."""
    from benchmarks.loss import stable_loss

    exact = type(problem)(*(leaf.detach().double().requires_grad_() for leaf in problem[:4]), problem.labels)
    wanted = stable_loss(exact)
    wanted.backward()
    problem.clear()
    found = make(problem)()
    names = ("d_loc_u", "d_scale_u", "d_weight", "d_threshold")
    errors = {
        name: float((leaf.grad.double() - right.grad).norm() / right.grad.norm())
        for name, leaf, right in zip(names, problem[:4], exact[:4], strict=True)
    }
    if isinstance(found, torch.Tensor):
        errors["loss"] = abs(float(found.detach().double() / wanted.detach()) - 1.0)
    return errors


def _by_kind(step: Callable[[], object]) -> dict[str, float]:
    """GPU milliseconds in one step, split into our kernels, matrix products and other kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    kinds = {"kernel": 0.0, "products": 0.0, "rest": 0.0}
    for event in traced.key_averages():
        name = event.key.lower()
        ours = "_tile_kernel" in name
        product = any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma", "splitk"))
        kinds["kernel" if ours else "products" if product else "rest"] += event.self_device_time_total / 1e3
    return kinds


def _pages(folder: Path, name: str) -> Path:
    """Writes the paragraphs in this project's docs to FOLDER/NAME.jsonl: real texts with very different lengths."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    texts = [text for page in pages for text in page.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    if not texts:
        raise FileNotFoundError("packing is measured on this project's own pages: run it from a checkout")
    path = folder / f"{name.replace(', ', '-')}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
