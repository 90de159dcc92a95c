"""A server of `cqwen serve` in a thread, on a port of its own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(server: Any) -> Iterator[str]:
    """Inside, the server answers; gives the URL of its protocol."""
    import uvicorn

    from cqwen_dist.tools.serve.server import make_app

    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(make_app(server), log_level="warning"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
    thread.start()
    while not serving.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    serving.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
