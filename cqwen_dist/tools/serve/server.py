"""The server: one model, or several by name, one text at a time, any number of clients.

Requests wait in one queue. A client that goes away, or a text that takes longer than allowed, ends its generation after
the token in progress. Bodies, waiting requests, tokens and time are bounded, so one client cannot stop the others.
It has no accounts and no encryption: put a proxy in front of it, or let it listen on this machine only.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from cqwen_dist.config.errors import UserError
from cqwen_dist.generate.continuation import Written, continue_text, end_ids
from cqwen_dist.generate.facts import counterfactual
from cqwen_dist.generate.numbers import GeneratedNumbers, NumberRecord
from cqwen_dist.generate.streaming import NumberStreamer, as_prompt
from cqwen_dist.tools.serve.requests import Answer, ChatCompletion, Completion, Counterfactual, stop_at_end

LOOK_S = 0.25  # how often a waiting request looks whether its client is still there


@dataclass(frozen=True)
class Limits:
    """Limits of one request. Seconds are from a request's arrival, waiting included."""

    tokens: int = 2048
    texts: int = 16  # prompts times n
    body_bytes: int = 1 << 20
    waiting: int = 64
    seconds: float = 300.0
    body_seconds: float = 30.0


class Done(NamedTuple):
    """The body of a request."""

    written: list[Written]
    prompt_tokens: int


class Refused(Exception):
    """The request is refused, with this HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """Runs the generations of a model in one thread, which all models share."""

    def __init__(self, model: Any, tokenizer: Any, name: str, limits: Limits, first: "Server | None" = None) -> None:
        """first: the server whose queue this one joins."""
        self.model, self.tokenizer, self.name, self.limits = model, tokenizer, name, limits
        self.first = first or self
        self.worker: ThreadPoolExecutor = first.worker if first else ThreadPoolExecutor(1, "generate")
        self.waiting, self.named = 0, dict[str, Server]()  # of the first one
        self.first.named[name] = self

    def close(self) -> None:
        """End the worker after the token in progress."""
        self.worker.shutdown(wait=False, cancel_futures=True)

    def admit(self, model: str) -> "Server":
        """The server of a model. Raises `UserError` for an unknown one, `Refused` if too many requests wait."""
        if model and model not in self.named:
            raise UserError("model", model, ", ".join(self.named))
        if self.waiting >= self.limits.waiting:
            raise Refused(429, f"{self.waiting} requests wait: try again later")
        return self.named[model or self.name]

    def begin(self, asked: Completion | ChatCompletion) -> tuple[dict[str, Any], list[str]]:
        """(options, prompts). Raises `UserError`."""
        options, prompts = asked.options(self.limits.tokens), asked.prompts(self.tokenizer)
        if not 0 < len(prompts) * asked.n <= self.limits.texts:
            raise UserError("n", len(prompts) * asked.n, f"1 to {self.limits.texts} texts a request (prompts times n)")
        if asked.stream and len(prompts) * asked.n > 1:
            raise UserError("stream", len(prompts) * asked.n, "one text a stream")
        return options, prompts

    def work(
        self, options: dict[str, Any], prompts: list[str], n: int, until: float, stop: threading.Event, **more: Any
    ) -> Done:
        """Continue each prompt n times. Runs in the worker. Raises `UserError` and `Refused`."""
        if stop.is_set() or time.monotonic() > until:
            raise Refused(503, "too many requests wait: try again later")

        def over(ids: Tensor, scores: Any) -> Tensor:
            return torch.full((len(ids),), stop.is_set() or time.monotonic() > until, device=ids.device)

        texts = [prompt for prompt in prompts for _ in range(n)]
        written = continue_text(self.model, self.tokenizer, texts, stopping_criteria=[over], **options, **more)
        begin = options.get("begin", True)
        return Done(written, sum(len(self.tokenizer.encode(prompt, begin)[0]) for prompt in prompts))

    def start(self, work: Callable[[threading.Event], Any], stop: threading.Event) -> asyncio.Future[Any]:
        """Work in the worker, which looks at `stop` now and then."""
        return asyncio.get_running_loop().run_in_executor(self.worker, work, stop)

    def end(self, future: asyncio.Future[Any], stop: threading.Event) -> None:
        """Stop the work that `start` returned, if it still runs."""
        stop.set()

    async def run(self, request: Request, work: Callable[[threading.Event], Any]) -> Any:
        """The result of work, which is ended when the client has gone."""
        stop = threading.Event()
        future = self.start(work, stop)
        self.first.waiting += 1
        try:
            while not (await asyncio.wait([future], timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    self.end(future, stop)
            return await future
        finally:
            self.end(future, stop)  # also when the server ends this request
            self.first.waiting -= 1

    async def answer(self, asked: Completion | ChatCompletion, request: Request) -> Any:
        """The answer to a request, whole or as a stream."""
        options, prompts = self.begin(asked)
        answer = Answer(asked, self.name)
        work = partial(self.work, options, prompts, asked.n, time.monotonic() + self.limits.seconds)
        if not asked.stream:
            whole = answer.whole(*await self.run(request, work))
            return Response(to_json(whole, inf_nan_mode="null"), media_type="application/json")
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        events = _events(answer, self.pieces(request, work, options, prompts[0]), with_usage)
        return StreamingResponse(events, media_type="text/event-stream")

    async def pieces(
        self, request: Request, work: Callable[..., Done], options: dict[str, Any], prompt: str
    ) -> AsyncIterator[tuple[str, list[NumberRecord]] | Done]:
        """(text, its numbers) during generation, then the whole text."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ends = end_ids(self.model, self.tokenizer)
        put: Any = queue.put_nowait
        tokenizer = as_prompt(self.tokenizer, prompt, options["stop"])
        sender = _Sender(tokenizer, partial(loop.call_soon_threadsafe, put), options, ends)
        task = asyncio.ensure_future(self.run(request, partial(work, streamer=sender)))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            done = await task
            if sender.waiting:
                yield "", sender.waiting
            yield done
        finally:
            task.cancel()


class _Sender(NumberStreamer):
    """Sends text together with the numbers in it, and holds back as much as a stop string may take."""

    def __init__(self, tokenizer: Any, send: Callable[[Any], Any], options: dict[str, Any], ends: list[int]) -> None:
        super().__init__(tokenizer, self._with_numbers, digits=options["digits"], ends=ends, stop=options["stop"])
        self.send, self.waiting, self.held = send, list[NumberRecord](), ""
        self.late = max(map(len, self.stop), default=0)

    def _with_numbers(self, text: str) -> None:
        self.held += text
        if now := self.held[: max(0, len(self.held) - self.late)]:
            self.send((now, self.waiting))
            self.held, self.waiting = self.held[len(now) :], []

    def end(self) -> None:
        super().end()
        self.late = stop_at_end(self.held, self.stop)
        self._with_numbers("")

    def put(self, value: Tensor, numbers: GeneratedNumbers | None = None, prompt: int = 0) -> None:
        record = None if numbers is None else numbers.record(0, value.shape[1] - 1, self.digits)
        self.waiting += [] if record is None else [record]
        super().put(value, numbers, prompt)


async def _events(
    answer: Answer, pieces: AsyncIterator[tuple[str, list[NumberRecord]] | Done], with_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first is an event too, as the status is sent already."""

    def event(document: Any) -> bytes:
        return b"data: " + to_json(document, inf_nan_mode="null") + b"\n\n"

    try:
        async for piece in pieces:
            if not isinstance(piece, Done):
                yield event(answer.piece(*piece))
                continue
            yield event(answer.piece("", [], piece.written[0].end))
            if with_usage:
                yield event(answer.last(*piece))
    except (UserError, Refused) as error:
        yield event(_error(str(error)))
    yield b"data: [DONE]\n\n"


def _error(text: str, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": param, "code": None}}


class _Bounded:
    """Refuses bodies that are too long, and clients that send one too slowly."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, until = bytearray(), time.monotonic() + self.limits.body_seconds
        try:
            more = True
            while more:
                message = await asyncio.wait_for(receive(), max(until - time.monotonic(), 0.001))
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > self.limits.body_bytes:
                    raise Refused(413, f"a body of more than {self.limits.body_bytes:,} bytes")
        except asyncio.TimeoutError:  # on Python 3.10 no TimeoutError
            await JSONResponse(_error("the body did not arrive in time"), 408)(scope, receive, send)
            return
        except Refused as error:
            await JSONResponse(_error(str(error)), error.status)(scope, receive, send)
            return
        sent = False

        async def again() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, again, send)


def make_app(server: Server) -> FastAPI:
    """The application: /v1/completions, /v1/chat/completions, /v1/counterfactual, ...; /docs describes them."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.close()

    app = FastAPI(title="cqwen serve", lifespan=life)
    app.add_middleware(_Bounded, limits=server.limits)

    @app.post("/v1/completions")
    async def completions(asked: Completion, request: Request) -> Any:
        return await server.admit(asked.model).answer(asked, request)

    @app.post("/v1/chat/completions")
    async def chats(asked: ChatCompletion, request: Request) -> Any:
        return await server.admit(asked.model).answer(asked, request)

    @app.post("/v1/counterfactual")
    async def counterfactuals(asked: Counterfactual, request: Request) -> Any:
        chosen = server.admit(asked.model)
        if not isinstance(chosen.model, torch.nn.Module):
            raise UserError("--engine", "vllm", "generate, for facts")
        given = asked.model_dump(exclude={"model"})
        return await chosen.run(request, lambda _: counterfactual(chosen.model, chosen.tokenizer, **given))

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": n, "object": "model", "owned_by": "cqwen"} for n in server.named]}

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "waiting": server.waiting}

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> Any:
        return JSONResponse(_error(str(error), param=error.key), 404 if error.key == "model" else 400)

    @app.exception_handler(Refused)
    async def busy(request: Request, error: Refused) -> Any:
        kind = "rate_limit_error" if error.status == 429 else "server_error"
        return JSONResponse(_error(str(error), kind), error.status, {"Retry-After": "5"})

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Any:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(_error(f"{field}: {first['msg']}".removeprefix(": "), param=field or None), 400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Any:
        said = f"{request.method} {request.url.path}: {error.detail} (/docs lists what there is)"
        return JSONResponse(_error(said), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Any:
        return JSONResponse(_error("an error of the server; its log has the traceback", "server_error"), 500)

    return app
