"""`cqwen serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cqwen_dist.config.errors import Said, UserError
from cqwen_dist.console import Checkpoint, echo, quiet_libraries


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
    adapter: Annotated[
        list[str] | None, typer.Option(help="With vllm: NAME=FOLDER of a LoRA adapter; clients ask for model NAME.")
    ] = None,
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
        server = _batched(Path(checkpoint), called, limits, engine_args, adapter or [])
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


def _batched(folder: Path, name: str, limits: Any, options: str, adapters: list[str]) -> Any:
    """A server in front of vLLM. Raises `UserError`."""
    from cqwen_dist.tools.serve.batched import BatchedServer
    from cqwen_dist.tools.vllm.vllm_writer import VllmWriter

    try:
        found = dict(json.loads(options))
    except (ValueError, TypeError):
        raise UserError("--engine-args", options, """a JSON object, such as '{"max_num_seqs": 64}'""") from None
    if odd := next((each for each in adapters if "=" not in each), None):
        raise UserError("--adapter", odd, "NAME=FOLDER")
    named = dict(each.split("=", 1) for each in adapters)
    return BatchedServer(VllmWriter(folder, named, **found), name, limits)
