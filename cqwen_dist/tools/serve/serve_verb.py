"""`cqwen serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
) -> None:
    """Serve a model by OpenAI's protocol: completions and chats, with values and intervals of numbers."""
    quiet_libraries()
    try:
        import uvicorn

        from cqwen_dist.tools.serve.server import Limits, Server, make_app
    except ModuleNotFoundError as error:
        raise UserError("serve", Said(f"no {error.name} here"), "pip install 'cqwen-dist[serve]'") from None
    from cqwen_dist.checkpoint.trained import load_trained

    model, tokenizer = load_trained(checkpoint, device)
    called = name or Path(checkpoint).resolve().name
    server = Server(model, tokenizer, called, Limits(tokens=max_tokens, seconds=max_seconds, waiting=max_waiting))
    config = uvicorn.Config(make_app(server), host=host, port=port, log_level="warning", timeout_keep_alive=15)
    try:
        socket = config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason
        raise UserError("--port", port, f"a free port of {host}") from None
    bound = socket.getsockname()
    echo(f"serving {called} at http://{host}:{bound[1]}/v1; /docs describes it; Ctrl-C ends it")
    uvicorn.Server(config).run([socket])
