"""`python -m benchmarks VERB`: measure on this machine. Imports are local, so that --help stays fast."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cqwen_dist.cli import answer
from cqwen_dist.config import UserError
from cqwen_dist.config.errors import Said
from cqwen_dist.console import AsJson, ConfigFile, Overrides, echo, load, print_document, quiet_libraries

DataFolder = Annotated[Path, typer.Option(help="Folder with the data files (docs/numbers-benchmark.md).")]
BaseFolder = Annotated[str, typer.Option(help="A model's folder or hub name.")]


def data(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds per contender.")] = 3,
    repeat: Annotated[int, typer.Option(min=1, help="Repeat the text this many times.")] = 1,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Worker processes; may be repeated. Default: 1, and one per core."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time and memory of `cqwen prepare` by number of workers, compared with the plain tokenizer."""
    checked = load(config, overrides)
    quiet_libraries()
    from benchmarks import data as bench
    from cqwen_dist.data.load import tokenizer_of

    cores = len(os.sched_getaffinity(0))
    result = bench.run(checked.data, tokenizer_of(checked), rounds, repeat, workers or sorted({1, cores}))
    print_document(result, as_json, bench.table)


def loss(
    tokens: Annotated[int, typer.Option(min=1, help="N, tokens.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, help="H, the width of U.")] = 896,
    vocab: Annotated[int, typer.Option(min=1, help="V, words.")] = 151_936,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    impl: Annotated[str, typer.Option(help="auto, chunked, triton, fused or reference.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each contender.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """The OvR loss, forward and backward, compared with its matrix products, plain formulas and peers' kernels."""
    quiet_libraries()
    from benchmarks.loss import run, table

    try:
        result = run(tokens, hidden, vocab, dtype, device, impl, rounds, only or None)
    except ValueError as error:
        allowed, _, found = str(error).rpartition(", found ")
        raise UserError("benchmarks loss", Said(found), allowed) from None
    print_document(result, as_json, table)


def step(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Counted steps of each contender.", min=1)] = 10,
    peers: Annotated[bool, typer.Option(help="Also HF + PEFT with a trained softmax head, and with Liger.")] = True,
    both: Annotated[bool, typer.Option("--both", help="Ours and the peers eager and compiled, like for like.")] = False,
    profile: Annotated[Path | None, typer.Option(help="Folder for a profiler trace and a table.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU whose peak defines MFU: h200, h100, ...; default: the local one.")] = "",
    as_json: AsJson = False,
) -> None:
    """A training step by part at a config's shapes, compared with HF + PEFT and with the plan."""
    checked = load(config, overrides)
    quiet_libraries()
    from benchmarks.step import measure
    from benchmarks.step_table import table

    result = measure(checked, gpu=gpu, rounds=rounds, peers=peers, profile=profile, both=both)
    if result is not None:
        print_document(result, as_json, table)


def packed(
    config: ConfigFile,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Counted steps of each contender.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Real texts packed with or without a mask, compared with padded texts by real tokens/s."""
    checked = load(config, overrides)
    quiet_libraries()
    from benchmarks.packed import measure, table
    from cqwen_dist.data.load import tokenizer_of

    print_document(measure(checked, tokenizer_of(checked), rounds), as_json, table)


def memory(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CONFIG]...", help="With --world: measure these; default: the package's, or small ones."
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only configurations whose name contains this.")] = None,
    world: Annotated[int | None, typer.Option(help="Measure rank 0 in a simulated world with this many ranks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory in real training steps over a list of configurations, compared with `cqwen plan`."""
    quiet_libraries()
    from benchmarks.memory_check import measure_all, measure_world, table

    if configs and world is None:
        raise UserError(
            "benchmarks memory", str(configs[0]), "a config with --world (without, a fixed list is measured)"
        )
    rows, device = measure_all(only or []) if world is None else measure_world(world, configs or [], only or [])
    print_document({"device": device, "rows": rows}, as_json, lambda found: table(found["rows"], found["device"]))


def ranks(
    out: Annotated[Path | None, typer.Option(help="Also write the results to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Training steps on the ranks of a launcher: messages and memory compared with the plan, and tokens/s."""
    quiet_libraries()
    from benchmarks.ranks import lines, measure_ranks
    from cqwen_dist.run.files import write_atomically

    found = measure_ranks()
    if found is None:
        return
    if out is not None:
        write_atomically(out, json.dumps(found, indent=1))
    print_document(found, as_json, lines)


def scale(as_json: AsJson = False) -> None:
    """Traffic and time of a step on 2 to 1,024 GPUs: arithmetic from the plan and steps measured on one GPU."""
    from benchmarks.scale import run, table

    print_document(run(), as_json, table)


def generate(
    hidden: Annotated[int, typer.Option(min=1, help="H; the default shape is Qwen2.5-0.5B.")] = 896,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the backbone.")] = 24,
    vocab: Annotated[int, typer.Option(min=1, help="V, words.")] = 151_936,
    batch: Annotated[list[int] | None, typer.Option(help="Prompts per batch; may be repeated.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each contender.")] = 3,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if available.")] = None,
    precision: Annotated[str | None, typer.Option(help="Backbone precision: fp32 or bf16 (default on cuda).")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="dynamic or static; default: both.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="A mode; may be repeated; default: all.")] = None,
    compile_on_cpu: Annotated[bool, typer.Option("--compile-on-cpu", help="Also compile static steps.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens/s in each mode, compared with Hugging Face's generate on the same base model with random weights."""
    quiet_libraries()
    import torch

    from benchmarks.generate import MODES, run, table

    for key, given, allowed in (
        ("--precision", [precision or "fp32"], ("fp32", "bf16")),
        ("--cache", cache or [], ("dynamic", "static")),
        ("--mode", mode or [], MODES),
    ):
        if odd := [each for each in given if each not in allowed]:
            raise UserError(key, odd[0], ", ".join(allowed))
    result = run(
        hidden,
        layers,
        vocab,
        tuple(batch or ()),
        new_tokens=new_tokens,
        rounds=rounds,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        precision=precision,
        caches=cache or ("dynamic", "static"),
        modes=mode or MODES,
        compile_on_cpu=compile_on_cpu,
    )
    print_document(result, as_json, table)


def gpu(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and log.txt.")] = Path("runs/gpu-table"),
    budget: Annotated[float, typer.Option(min=1, help="Seconds; groups of rows beyond the budget are skipped.")] = 1200,
    part: Annotated[int | None, typer.Option(min=1, max=2, help="1: loss and step; 2: decoding, memory.")] = None,
    only: Annotated[str, typer.Option(help="Only groups of rows whose name contains this.")] = "",
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run everything at toy size on a CPU.")] = False,
) -> None:
    """Loss, step, decoding, packing and memory on one GPU, the most valuable rows first, within a time budget."""
    from benchmarks.gpu import run

    run(out, budget, (part,) if part else (1, 2), rehearse, only)


def numbers(
    only: Annotated[list[str] | None, typer.Option(help="Only this data set; may be repeated.")] = None,
    data: DataFolder = Path("data"),
    base: BaseFolder = "HuggingFaceTB/SmolLM2-135M",
    splits: Annotated[int, typer.Option(min=1, max=20, help="Splits per data set.")] = 3,
    minutes: Annotated[float, typer.Option(help="Approximate minutes per fit.")] = 10.0,
    heads: Annotated[bool, typer.Option(help="Also train competing heads on the same z.")] = True,
    lora_epochs: Annotated[
        int, typer.Option(min=0, help="Also train these heads with LoRA for so many epochs; 0: no.")
    ] = 0,
    test_rows: Annotated[
        int | None, typer.Option(min=2, help="Maximum number of test rows per split, drawn at random.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder; the same command continues there.")] = Path("bench-numbers"),
    table: Annotated[Path | None, typer.Option(help="Write tables to this Markdown file, and NAME-laws.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """`cqwen fit` on published tables and splits, compared with other heads and with models that read no language."""
    quiet_libraries()
    from rich.markdown import Markdown

    from benchmarks.numbers.benchmark_page import laws_picture, page
    from benchmarks.numbers.published import Benchmark

    say = partial(echo, err=as_json)
    found = Benchmark(data, out, base, minutes, heads, lora_epochs, test_rows, say).run(only or [], splits)
    if table is not None:
        table.write_text(page(found), encoding="utf-8")
        if found["laws"]:
            table.with_name(f"{table.stem}-laws.svg").write_text(laws_picture(found), encoding="utf-8")
    print_document(found, as_json, lambda made: Markdown(page(made)))


def laws(
    only: Annotated[list[str] | None, typer.Option(help="Only this table; may be repeated.")] = None,
    data: DataFolder = Path("data"),
    base: BaseFolder = "HuggingFaceTB/SmolLM2-135M",
    splits: Annotated[int, typer.Option(min=1, max=20, help="Splits per table.")] = 1,
    minutes: Annotated[float, typer.Option(help="Approximate minutes per fit.")] = 2.0,
    out: Annotated[Path, typer.Option(help="Output folder; the same command continues there.")] = Path("bench-laws"),
    as_json: AsJson = False,
) -> None:
    """`cqwen fit`'s training with each law of a number (model.number_head), by CRPS on test rows."""
    quiet_libraries()
    from rich.markdown import Markdown

    from benchmarks.numbers.number_laws import LawBenchmark, law_page

    found = LawBenchmark(data, out, base, minutes, partial(echo, err=as_json)).run(only or [], splits)
    print_document(found, as_json, lambda made: Markdown(law_page(made)))


def gsm8k(
    model: Annotated[Path, typer.Argument(help="A run, a checkpoint, or an exported folder.")],
    data: Annotated[Path, typer.Option(help="JSONL with GSM8K's fields, such as its test file.")],
    problems: Annotated[int, typer.Option(min=1, help="So many, from the file's start.")] = 100,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many lines before.")] = 0,
    prompt: Annotated[str, typer.Option(help="Template of a prompt, as the run was trained.")] = "{question}\\n",
    digits: Annotated[
        str | None, typer.Option(help="Also a causal language model that writes digits, trained on the same prompts.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Also this base, after solved problems of --shots.")] = None,
    shots: Annotated[Path | None, typer.Option(help="File whose first four problems are shown to --base.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Problems side by side.")] = 8,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """GSM8K: the share of problems whose final answer is exactly right, and errors by kind."""
    quiet_libraries()
    from benchmarks import gsm8k as bench

    template = prompt.replace("\\n", "\n")
    asked = bench.read_problems(data, problems, skip)
    writers = {"CausalQwen": bench.causal_writer(model, template, new_tokens, device)}
    if digits is not None:
        writers["digits"] = bench.plain_writer(digits, "", template, new_tokens, device)
    if base is not None:
        if shots is None:
            raise UserError("--shots", "no value", "a file with problems, other than --data's, with --base")
        shown = bench.read_problems(shots, 4)
        known = "".join(template.format(question=question) + f"{answer}\n\n" for question, answer, _ in shown)
        writers["base, four shots"] = bench.plain_writer(base, known, template, new_tokens, device)
    print_document(bench.run(writers, asked, batch, partial(echo, err=True)), as_json, bench.table)


app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Measure on this machine."
)


def together(
    base: BaseFolder,
    data: Annotated[Path, typer.Option(help="GSM8K's train.jsonl.")],
    runs: Annotated[int, typer.Option(min=2, max=8, help="Runs.")] = 8,
    alone: Annotated[int, typer.Option(min=1, max=8, help="Runs to take alone; their seconds are multiplied.")] = 8,
    texts: Annotated[int, typer.Option(min=8, help="Texts to train on.")] = 160,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 40,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters too, with 2 texts a step, not 4.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Runs on one base: in one job, and one after the other."""
    from benchmarks import together as bench

    print_document(bench.run(base, data, runs, alone, texts, steps, lora, overrides or []), as_json, bench.table)


for verb in (data, loss, step, packed, memory, ranks, scale, generate, gpu, numbers, laws, gsm8k, together):
    app.command()(verb)

if __name__ == "__main__":
    answer(app)
