"""The verbs that use a trained model: generate, predict, export. Heavy imports inside, so that --help is instant."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cqwen_dist.config import UserError
from cqwen_dist.config.errors import writing
from cqwen_dist.console import AsJson, Checkpoint, print_document, print_json, quiet_libraries

if TYPE_CHECKING:
    from cqwen_dist.generate.continuation import Individual, Written

Device = Annotated[str, typer.Option(help="cpu, cuda:N, or auto: all GPUs; an exported folder is spread over them.")]
DigitsOption = Annotated[str, typer.Option(help="Significant digits of a number: auto (what its uncertainty leaves).")]
Mode = Annotated[str, typer.Option(help="standard, compatible, ovr, causal, individual, noise or sample.")]


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; give it several times for a batch.")],
    chat: Annotated[bool, typer.Option("--chat", help="A prompt is a user's message: fill the chat template.")] = False,
    mode: Mode = "standard",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to write.")] = 64,
    seed: Annotated[int | None, typer.Option(help="Seed for the modes that draw.")] = None,
    individuals: Annotated[int | None, typer.Option(help="Individuals under which every prompt is continued.")] = None,
    noises: Annotated[int | None, typer.Option(help="Noises under which every prompt is continued.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Divides compatible's logits; multiplies the scales of the modes that draw.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="For compatible.")] = None,
    top_p: Annotated[float | None, typer.Option(help="For compatible.")] = None,
    decode_rule: Annotated[str | None, typer.Option(help="Rank words by ovr (P) or loc (loc_S).")] = None,
    digits: DigitsOption = "auto",
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    cache_implementation: Annotated[
        str | None, typer.Option(help="dynamic, or static: steps of fixed shapes, compiled on CUDA; for many tokens.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is written (one prompt).")] = False,
    device: Device = "auto",
    plot: Annotated[Path | None, typer.Option(help="With --individuals or --noises: first numbers as SVG.")] = None,
    above: Annotated[float | None, typer.Option(help="Write no text; list the words whose P is above this.")] = None,
    decision_threshold: Annotated[
        float | None, typer.Option(help="With --above: one C in place of the words'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts; numbers come with 50, 90 and 95 % intervals (--json: a record of every token)."""
    kind, drawn = _drawn(individuals, noises, plot, prompt)
    if decision_threshold is not None and above is None:
        raise UserError("--decision-threshold", decision_threshold, "with --above")
    _check_together(mode, kind, drawn is not None, above, alone=stream, several=len(prompt) > 1 or as_json)
    quiet_libraries()
    from cqwen_dist.checkpoint.export import load_trained
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.generate.continuation import continue_text, counterfactuals, treatments

    model, tokenizer = load_trained(checkpoint, device)
    prompt = [Chat(tokenizer.tokenizer).question(message) for message in prompt] if chat else prompt
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "decode_rule": decode_rule}
    given["cache_implementation"] = cache_implementation
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options |= {"max_new_tokens": max_new_tokens, "seed": seed, "digits": _digits(digits), "stop": stop or ()}
    if above is not None:
        print_document(_words_above(model, tokenizer, prompt, above, decision_threshold), as_json, _lines_of_words)
    elif drawn is None:
        if stream:
            typer.echo(prompt[0], nl=False)
            options["on_text"] = lambda text: typer.echo(text, nl=False)
        _print_continued(continue_text(model, tokenizer, prompt, mode=mode, **options), mode, stream, as_json)
    elif len(prompt) > 1:
        _print_treatments(treatments(model, tokenizer, prompt, drawn, kind, **options), prompt, kind, as_json)
    else:
        _print_counterfactuals(
            counterfactuals(model, tokenizer, prompt[0], drawn, kind, **options), kind, plot, as_json
        )


def _check_together(mode: str, kind: str, drawn: bool, above: float | None, alone: bool, several: bool) -> None:
    """Refuse options that would have no effect beside others. alone: --stream; several: prompts, or --json."""
    if above is not None and (alone or drawn or mode != "standard"):
        raise UserError("--above", above, "in mode standard, without --stream, --individuals and --noises")
    if alone and (drawn or several):
        raise UserError("--stream", True, "with one prompt, without --json, --individuals and --noises")
    if drawn and mode not in ("standard", kind):
        raise UserError("--mode", mode, f"{kind}, as with --individuals or --noises, or none")


def _drawn(
    individuals: int | None, noises: int | None, plot: Path | None, prompts: list[str]
) -> tuple[str, int | None]:
    """The mode of --individuals or --noises, and their number; None without either."""
    drawn = noises if individuals is None else individuals
    if (individuals is not None and noises is not None) or (drawn is not None and drawn < 1):
        raise UserError("--individuals", individuals, "1 or more, and not together with --noises")
    if plot is not None and (drawn is None or len(prompts) > 1):
        raise UserError("--plot", str(plot), "with --individuals or --noises, and one prompt")
    return "individual" if noises is None else "noise", drawn


def _print_continued(written: list[Written], mode: str, streamed: bool, as_json: bool) -> None:
    if as_json:
        print_json({"mode": mode, "outputs": [w.to_dict() for w in written]})
        return
    for w in written:
        typer.echo("" if streamed else w.prompt + w.text)
        for number in w.numbers:
            low, high = number.intervals["0.9"]
            interval = f"90 % interval {low:.6g} to {high:.6g}" if high > low else "no interval: this individual's own"
            parts = [f"{number.written:g}", interval, f"P(<NUM>) {number.p_num:.3f}"]
            parts += [] if number.type is None else [f"type {number.type}"]
            parts += [f"{name} {further.value:.6g}" for name, further in number.more.items()]
            typer.echo("    " + "   ".join(parts), err=True)


def _print_counterfactuals(written: list[Written], mode: str, plot: Path | None, as_json: bool) -> None:
    from rich.console import Group
    from rich.table import Table

    from cqwen_dist.generate.continuation import Diversity
    from cqwen_dist.generate.plot import Mark, interval_plot

    diversity, prompt = Diversity.of([w.text for w in written]), written[0].prompt
    marks = []
    table = Table("", "text", "first number", "90 % interval", title=f"{mode}s of: {prompt}", title_justify="left")
    for i, w in enumerate(written, 1):
        first = w.numbers[0] if w.numbers else None
        value, low, high = (math.nan,) * 3 if first is None else (first.value, *first.intervals["0.9"])
        interval = f"{low:.4g} to {high:.4g}" if high > low else ""  # the number of one individual has none
        table.add_row(str(i), w.text, "" if first is None else f"{first.written:g}", interval)
        marks.append(Mark(f"{mode} {i}", value, low, high))
    if plot is not None:
        with writing("--plot", plot):
            plot.write_text(interval_plot(prompt[-80:], marks, "first number with its 90 % interval"), encoding="utf-8")
    differ = f"{diversity.distinct} of {diversity.n} texts differ; mean word distance {diversity.distance:.3f}"
    document = {"mode": mode, "diversity": asdict(diversity), "outputs": [w.to_dict() for w in written]}
    print_document(document, as_json, lambda _: Group(table, differ))


def _print_treatments(found: list[Individual], prompts: list[str], mode: str, as_json: bool) -> None:
    from rich.table import Table

    names = [f"{i}: {text}" for i, text in enumerate(prompts, 1)]
    title = f"the same {len(found)} {mode}s; values: first numbers (difference from prompt 1)"
    table = Table("", *names, title=title)
    for i, individual in enumerate(found, 1):
        columns = zip(individual.texts, individual.values, individual.differences, strict=True)
        cells = []
        for j, (text, value, difference) in enumerate(columns):
            number = "" if value is None else f"{value:.6g}"
            number += f" ({difference:+.6g})" if j and difference is not None else ""
            cells.append(f"{text}\n{number}")
        table.add_row(str(i), *cells)
    document = {"mode": mode, "prompts": prompts, f"{mode}s": [asdict(individual) for individual in found]}
    print_document(document, as_json, lambda _: table)


def _words_above(
    model: Any, tokenizer: Any, prompts: list[str], above: float, decision_threshold: float | None
) -> dict[str, Any]:
    """The document of --above: every word whose P is above it, after each prompt."""
    from cqwen_dist.generate.continuation import padded
    from cqwen_dist.generate.decisions import multi_label

    batch = padded(model, tokenizer, [tokenizer.encode(prompt) for prompt in prompts])
    found = multi_label(model, batch, above, None, decision_threshold)
    outputs = [
        {"prompt": prompt, "words": [{"text": tokenizer.decode([word.id]), **asdict(word)} for word in words]}
        for prompt, words in zip(prompts, found, strict=True)
    ]
    return {"above": above, "decision_threshold": decision_threshold, "outputs": outputs}


def _lines_of_words(document: dict[str, Any]) -> str:
    lines = []
    for output in document["outputs"]:
        lines += [output["prompt"], *(f"    {word['text']!r}   P {word['p']:.4g}" for word in output["words"])]
    return "\n".join(lines)


def predict(
    checkpoint: Checkpoint,
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A table: .csv, .tsv, .parquet or .jsonl.")],
    template: Annotated[str | None, typer.Option(help="A row's prompt, 'age {age}: was'; default: the run's.")] = None,
    out: Annotated[Path | None, typer.Option(help="The CSV to write; default: stdout.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Choose one of these texts, no number; repeat it.")] = None,
    reject_below: Annotated[float, typer.Option(help="With --option: choose none if the best P is below.")] = 0.0,
    digits: DigitsOption = "auto",
    within: Annotated[
        int | None,
        typer.Option(
            min=0, help="The number is among so many tokens; 0: it is next. Default: 8, or 0 without --template."
        ),
    ] = None,
    empty: Annotated[str | None, typer.Option(help="Text for an empty cell, as data.empty_cell in training.")] = None,
    decimal_comma: Annotated[bool, typer.Option("--decimal-comma", help="Read 1.234,5 in a cell as 1234.5.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 16,
    device: Device = "auto",
) -> None:
    """Predict the number that comes next for every row of a table, with intervals, as CSV; or choose among texts."""
    chosen_digits = _digits(digits)
    if out is not None and out.exists():
        raise UserError("--out", str(out), "a file that does not exist yet")
    quiet_libraries()
    from cqwen_dist.api import predict as run
    from cqwen_dist.generate.table import write_table
    from cqwen_dist.run.files import written_whole

    rows = run(
        checkpoint,
        table,
        template,
        options=option or (),
        reject_below=reject_below,
        digits=chosen_digits,
        within=within,
        empty=empty,
        decimal_comma=decimal_comma,
        batch_size=batch_size,
        device=device,
    )
    if out is None:
        write_table(rows, sys.stdout)
        return
    with writing("--out", out), written_whole(out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        write_table(rows, file)
    typer.echo(f"{len(rows)} rows to {out}")


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet, or is empty.")],
    merge: Annotated[bool, typer.Option("--merge", help="Fold the adapters into the backbone.")] = False,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16, of the backbone; default: as trained. Heads: fp32.")] = "",
    as_base: Annotated[
        bool, typer.Option("--as-base", "--as-qwen2", help="A plain model of the base's kind; its logits are loc_S.")
    ] = False,
    drop_bias: Annotated[bool, typer.Option("--drop-bias", help="With --as-base: leave out the bias.")] = False,
    shard_size: Annotated[str, typer.Option(help="The most bytes of one file, such as 5GB.")] = "5GB",
) -> None:
    """Write a folder that from_pretrained loads, with a model card; it is verified before it appears."""
    if drop_bias and not as_base:
        raise UserError("--drop-bias", True, "with --as-base")
    quiet_libraries()
    from cqwen_dist.checkpoint.export import export as write

    folder = write(
        checkpoint, out, merge, dtype=dtype or None, as_base=as_base, drop_bias=drop_bias, shard_size=shard_size
    )
    typer.echo(f"exported to {folder}")
    if as_base:
        typer.echo("It is a plain language model and writes no numbers: it writes <NUM> in their place.", err=True)


def _digits(text: str) -> Any:
    if text != "auto" and not (text.isdecimal() and len(text) <= 2):
        raise UserError("--digits", text, "auto, or 1 to 17")
    return text if text == "auto" else int(text)
