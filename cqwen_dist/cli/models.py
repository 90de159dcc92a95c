"""Verbs that use a trained model: generate, explain, serve, export. Imports are local: --help is instant."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.console import AsJson, Checkpoint, echo, print_document, print_json, quiet_libraries

if TYPE_CHECKING:
    from cqwen_dist.generate.continuation import Written

Device = Annotated[str, typer.Option(help="cpu, cuda:N, or auto (a GPU; an exported folder uses all GPUs).")]
DigitsOption = Annotated[str, typer.Option(help="Significant digits: 1 to 17, or auto (by the number's uncertainty).")]
ABSTAIN = "Answer only as surely as this share of the held-out answers, such as 0.8; "
_MODES = "standard, compatible, ovr, causal, individual, noise, sample, or words=..,numbers=..; default: standard or "
Mode = Annotated[str | None, typer.Option(help=f"{_MODES}compatible with --temperature, --top-k or --top-p.")]


@dataclass(frozen=True)
class Sampling:
    """Options of `continue_text` in every mode."""

    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens.")] = 64
    seed: Annotated[int | None, typer.Option(help="Seed for modes with random draws.")] = None
    temperature: Annotated[
        float | None, typer.Option(help="Divides logits in compatible, log P in ovr; multiplies scales in other modes.")
    ] = None
    word_temperature: Annotated[
        float | None, typer.Option(help="Multiplies scales for words only; default: as diverse as the softmax.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Only in modes compatible and ovr.")] = None
    top_p: Annotated[float | None, typer.Option(help="Only in modes compatible and ovr.")] = None
    abstain: Annotated[float | None, typer.Option(help=ABSTAIN + "a text ends before what is less sure.")] = None
    decode_rule: Annotated[str | None, typer.Option(help="Rank words by ovr (P) or loc (loc_S).")] = None
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None
    cache_implementation: Annotated[
        str | None, typer.Option(help="dynamic, or static: fixed shapes, compiled on CUDA; pays for many tokens.")
    ] = None


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; repeat the option for a batch.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template: prompts are user messages.")] = False,
    mode: Mode = None,
    *,
    sampling: Sampling,
    individuals: Annotated[
        int | None, typer.Option(min=1, help="Number of individuals that continue it; in mode noise: of noises.")
    ] = None,
    digits: DigitsOption = "auto",
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while generating (one prompt).")] = False,
    device: Device = "auto",
    above: Annotated[float | None, typer.Option(help="Generate no text; list words with P above this.")] = None,
    decision_threshold: Annotated[
        float | None, typer.Option(help="With --above: one threshold C for all words.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts. Numbers have 50, 90 and 95 % intervals (--json: a record per token)."""
    if decision_threshold is not None and above is None:
        raise UserError("--decision-threshold", decision_threshold, "with --above")
    if individuals is not None and len(prompt) > 1:
        allowed = "one with --individuals; the same --seed draws the same ones for another"
        raise UserError("--prompt", f"{len(prompt)} prompts", allowed)
    drawn = individuals is not None
    modes, kind = _check_together(mode, drawn, above, alone=stream, several=len(prompt) > 1 or as_json)
    quiet_libraries()
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.generate.continuation import continue_text, counterfactuals
    from cqwen_dist.generate.generation_settings import mode_as_asked

    model, tokenizer = load_trained(checkpoint, device)
    prompt = [Chat(tokenizer.tokenizer).question(message) for message in prompt] if chat else prompt
    options: dict[str, Any] = {name: value for name, value in vars(sampling).items() if value is not None}
    options |= {"digits": digits_of(digits), "begin": not chat}
    if above is not None:
        encoded = [tokenizer.encode(text, begin=not chat) for text in prompt]
        _print_words(model, tokenizer, prompt, encoded, above, decision_threshold, as_json)
    elif individuals is None:
        if mode is None:
            mode, options = mode_as_asked(options)
        if stream:
            echo(prompt[0], nl=False)
            options["on_text"] = lambda text: echo(text, nl=False)
        _print_continued(continue_text(model, tokenizer, prompt, mode=mode, **options), mode, stream, as_json)
    else:
        written = counterfactuals(model, tokenizer, prompt[0], individuals, modes, **options)
        _print_counterfactuals(written, kind, as_json)


def _check_together(mode: str | None, drawn: bool, above: float | None, alone: bool, several: bool) -> tuple[str, str]:
    """Reject options that would have no effect in combination. drawn: --individuals; alone: --stream; several: prompts,
    or --json. Returns the mode of `counterfactuals`, and what it draws: individual or noise."""
    if above is not None and (alone or drawn or mode not in (None, "standard")):
        raise UserError("--above", above, "in mode standard, without --stream and --individuals")
    if alone and (drawn or several):
        raise UserError("--stream", True, "with one prompt, without --json and --individuals")
    named = "individual" if mode in (None, "standard") else str(mode)
    kinds = {"individual", "noise"} & {*named.replace("=", ",").split(",")}
    if drawn and not kinds:
        raise UserError("--mode", mode, "individual or noise with --individuals, or none")
    return named, min(kinds, default="")


def _print_continued(written: list["Written"], mode: str, streamed: bool, as_json: bool) -> None:
    if as_json:
        print_json({"mode": mode, "outputs": [w.to_dict() for w in written]})
        return
    for w in written:
        echo("" if streamed else w.prompt + w.text)
        for number in w.numbers:
            low, high = number.intervals["0.9"]
            law = f"90 % interval {low:.6g} to {high:.6g}" if high > low else "no interval: this individual's own"
            law = law if number.source is None else f"exactly {number.source}"
            parts = [f"{number.written:g}", law, f"P(<NUM>) {number.p_num:.3f}"]
            echo("    " + "   ".join(parts), err=True)


def _print_counterfactuals(written: list["Written"], mode: str, as_json: bool) -> None:
    from rich.console import Group
    from rich.table import Table

    from cqwen_dist.generate.continuation import Diversity

    diversity, prompt = Diversity.of([w.text for w in written]), written[0].prompt
    table = Table("", "text", "first number", "90 % interval", title=f"{mode}s of: {prompt}", title_justify="left")
    for i, w in enumerate(written, 1):
        first = w.numbers[0] if w.numbers else None
        low, high = (math.nan, math.nan) if first is None else first.intervals["0.9"]
        interval = f"{low:.4g} to {high:.4g}" if high > low else ""  # a single individual's number has no interval
        table.add_row(str(i), w.text, "" if first is None else f"{first.written:g}", interval)
    differ = f"{diversity.distinct} of {diversity.n} texts differ; mean word distance {diversity.distance:.3f}"
    document = {"mode": mode, "diversity": asdict(diversity), "outputs": [w.to_dict() for w in written]}
    print_document(document, as_json, lambda _: Group(table, differ))


def _print_words(
    model: Any, tokenizer: Any, prompts: list[str], encoded: list[Any], above: float, one: float | None, as_json: bool
) -> None:
    """Every word with P above it, for each prompt. one: a threshold for all words."""
    from cqwen_dist.generate.continuation import padded
    from cqwen_dist.generate.decisions import multi_label

    outputs: list[dict[str, Any]] = []
    lines: list[str] = []
    every = multi_label(model, padded(model, tokenizer, encoded), above, one)
    for prompt, found in zip(prompts, every, strict=True):
        words = [{"text": tokenizer.decode([word.id]), **asdict(word)} for word in found]
        outputs.append({"prompt": prompt, "words": words})
        lines += [prompt, *(f"    {word['text']!r}   P {word['p']:.4g}" for word in words)]
    document = {"above": above, "decision_threshold": one, "outputs": outputs}
    print_document(document, as_json, lambda _: "\n".join(lines))


def digits_of(text: str) -> Any:
    if text != "auto" and not (text.isdecimal() and len(text) <= 2):
        raise UserError("--digits", text, "auto, or 1 to 17")
    return text if text == "auto" else int(text)


def explain(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str], typer.Option(help="Text whose next word is explained; repeatable.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template: prompts are user messages.")] = False,
    dims: Annotated[int, typer.Option(min=1, help="Number of U's dimensions to name.")] = 8,
    individuals: Annotated[int, typer.Option(min=0, help="Number of individuals to draw also.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show which dimensions of U decide the word after a prompt, and the choices of other individuals."""
    quiet_libraries()
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.tools.report.why import tables, why

    model, tokenizer = load_trained(checkpoint, device)
    texts = [Chat(tokenizer.tokenizer).question(message) for message in prompt] if chat else prompt
    found = [why(model, tokenizer, text, dims, individuals, seed, not chat) for text in texts]
    print_document({"outputs": [asdict(each) for each in found]}, as_json, lambda _: tables(found))


def serve(
    checkpoint: Checkpoint,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all, without accounts or TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients; default: the folder's.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a request.")] = 2048,
    max_seconds: Annotated[float, typer.Option(min=1, help="Most seconds of a request, waiting included.")] = 300.0,
    max_waiting: Annotated[int, typer.Option(min=1, help="Most requests that wait; more are refused.")] = 64,
    device: Device = "auto",
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=RUN", help="A further run on the same base; repeatable.")
    ] = None,
    engine: Annotated[str, typer.Option(help="generate: one text at a time; vllm: in batches.")] = "generate",
    engine_args: Annotated[str, typer.Option(help="JSON with further fields of vLLM's AsyncEngineArgs.")] = "{}",
) -> None:
    """Serve a model by OpenAI's protocol: completions and chats, with values and intervals of numbers."""
    quiet_libraries()
    try:
        import uvicorn

        from cqwen_dist.tools.serve.server import Limits, Server, make_app
    except ModuleNotFoundError as error:
        raise UserError("serve", Said(f"no {error.name} here"), "pip install 'cqwen-dist[serve]'") from None
    called = name or Path(checkpoint).resolve().name
    limits = Limits(tokens=max_tokens, seconds=max_seconds, waiting=max_waiting)
    further = _further_runs(adapter or [], called)
    if engine == "vllm":
        from cqwen_dist.tools.serve.batched import BatchedServer
        from cqwen_dist.tools.vllm.vllm_writer import VllmWriter

        try:
            more = dict(json.loads(engine_args))
        except (ValueError, TypeError):
            raise UserError("--engine-args", engine_args, """a JSON object, such as '{"max_num_seqs": 64}'""") from None
        writer = VllmWriter(Path(checkpoint), [Path(run) for run in further.values()], **more)
        server: Any = BatchedServer(writer, called, limits)
        for other, own in zip(further, writer.all[1:], strict=True):
            BatchedServer(own, other, limits, server)
    elif engine == "generate":
        from cqwen_dist.checkpoint.trained import load_trained

        bases: dict[Any, Any] | None = {} if further else None
        server = Server(*load_trained(checkpoint, device, bases=bases), called, limits)
        for other, run in further.items():
            Server(*load_trained(run, device, bases=bases), other, limits, server)
        if bases and len(bases) > 1:
            raise UserError("--adapter", Said(f"runs on {len(bases)} bases"), "runs on one base, in one precision")
    else:
        raise UserError("--engine", engine, "generate, vllm")
    config = uvicorn.Config(make_app(server), host=host, port=port, log_level="warning", timeout_keep_alive=15)
    try:
        socket = config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason
        raise UserError("--port", port, f"a free port of {host}") from None
    bound = socket.getsockname()
    echo(f"serving {called} at http://{host}:{bound[1]}/v1; /docs describes it; Ctrl-C ends it")
    uvicorn.Server(config).run([socket])


def _further_runs(adapters: list[str], called: str) -> dict[str, str]:
    found = {name: run for name, _, run in (each.partition("=") for each in adapters)}
    if not all(found.values()) or len(found) < len(adapters) or called in found:
        raise UserError("--adapter", Said(f"{' '.join(adapters)} beside {called}"), "NAME=RUN, each NAME once")
    return found


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Fold the adapters into the backbone.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Backbone dtype, fp32 or bf16; default: as trained. Heads: fp32.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 5GB.")] = "5GB",
) -> None:
    """Write a folder for from_pretrained, with a model card. The folder is verified before it appears."""
    quiet_libraries()
    from cqwen_dist.tools.export.export import export as write

    folder = write(checkpoint, out, merge, dtype=dtype, shard_size=shard_size)
    echo(f"exported to {folder}")
