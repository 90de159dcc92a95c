"""Verbs that use a trained model: explain, serve, export. Imports are local: --help is instant."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.console import AsJson, Checkpoint, echo, print_document, quiet_libraries


def explain(
    checkpoint: Checkpoint,
    prompt: Annotated[list[str], typer.Option(help="Text whose next word is explained; repeatable.")],
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template: prompts are user messages.")] = False,
    dims: Annotated[int, typer.Option(min=1, help="How many of U's dimensions to name.")] = 8,
    individuals: Annotated[int, typer.Option(min=0, help="Also draw this many individuals.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda:N, or auto.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Show which dimensions of U decide the word after a prompt, and the choices of other individuals."""
    quiet_libraries()
    from cqwen_dist.checkpoint.trained import load_trained
    from cqwen_dist.data.chat import Chat
    from cqwen_dist.tools.report.why import tables, why

    model, tokenizer = load_trained(checkpoint, device)
    texts = [Chat(tokenizer.tokenizer).question(message) for message in prompt] if chat else prompt
    found = [why(model, tokenizer, text, None, dims, individuals, seed, not chat) for text in texts]
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
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
    if engine == "vllm":
        from cqwen_dist.tools.serve.batched import BatchedServer
        from cqwen_dist.tools.vllm.vllm_writer import VllmWriter

        try:
            more = dict(json.loads(engine_args))
        except (ValueError, TypeError):
            raise UserError("--engine-args", engine_args, """a JSON object, such as '{"max_num_seqs": 64}'""") from None
        server: Any = BatchedServer(VllmWriter(Path(checkpoint), **more), called, limits)
    elif engine == "generate":
        from cqwen_dist.checkpoint.trained import load_trained

        server = Server(*load_trained(checkpoint, device), called, limits)
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


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Fold the adapters into the backbone.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Backbone dtype, fp32 or bf16; default: as trained. Heads: fp32.")
    ] = None,
    as_base: Annotated[
        bool, typer.Option("--as-base", "--as-qwen2", help="Write a plain model of the base's class: logits are loc_S.")
    ] = False,
    drop_bias: Annotated[bool, typer.Option("--drop-bias", help="With --as-base: omit the bias.")] = False,
    shard_size: Annotated[str, typer.Option(help="Maximum file size, such as 5GB.")] = "5GB",
) -> None:
    """Write a folder for from_pretrained, with a model card. The folder is verified before it appears."""
    if drop_bias and not as_base:
        raise UserError("--drop-bias", True, "with --as-base")
    quiet_libraries()
    from cqwen_dist.tools.export.export import export as write

    folder = write(checkpoint, out, merge, dtype=dtype, as_base=as_base, drop_bias=drop_bias, shard_size=shard_size)
    echo(f"exported to {folder}")
    if as_base:
        echo("It is a plain language model and writes no numbers: it writes <NUM> in their place.", err=True)
