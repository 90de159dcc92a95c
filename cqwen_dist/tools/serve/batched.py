"""The same server in front of vLLM (`tools.vllm`), which batches texts."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from cqwen_dist.tools.serve.server import Done, Limits, Refused, Server
from cqwen_dist.tools.vllm.vllm_writer import VllmWriter

GRACE_S = 5.0  # how long after its time a request may wait for the step in progress


class BatchedServer(Server):
    """`Server` where the work is a coroutine: vLLM has a queue and a process of its own, which all runs share."""

    def __init__(self, engine: VllmWriter, name: str, limits: Limits, first: Server | None = None) -> None:
        super().__init__(engine, engine.tokenizer, name, limits, first)
        self.engine = engine

    async def work(  # type: ignore[override]
        self, options: dict[str, Any], prompts: list[str], n: int, until: float, stop: threading.Event, **more: Any
    ) -> Done:
        """Continue each prompt n times, all together. Raises `UserError` and `Refused`."""
        seed, texts = options.get("seed"), [prompt for prompt in prompts for _ in range(n)]
        seeds = [None if seed is None else seed + i for i in range(len(texts))]
        writing = (
            self.engine.write(text, until=until, **{**options, "seed": own}, **more)
            for text, own in zip(texts, seeds, strict=True)
        )
        try:
            written = await asyncio.wait_for(asyncio.gather(*writing), until + GRACE_S - time.monotonic())
        except asyncio.TimeoutError:
            raise Refused(503, "too many requests wait: try again later") from None
        return Done([text for text, _ in written], sum(tokens for _, tokens in written[::n]))

    def start(self, work: Callable[[threading.Event], Any], stop: threading.Event) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work(stop))

    def end(self, future: asyncio.Future[Any], stop: threading.Event) -> None:
        future.cancel()

    def close(self) -> None:
        super().close()
        self.engine.close()
