"""One server: the model, the worker, what is allowed, and whether new requests are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bytefloor.engine.loading import Opened
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.errors import RequestError
from bytefloor.server.floor import Floor
from bytefloor.server.metrics import Metrics
from bytefloor.server.served import Served
from bytefloor.server.worker import Worker


@dataclass(frozen=True)
class ServerOptions:
    """What a server allows.

    name: what requests call the model, None for the file's own. api_key: None lets everybody in.
    cors: origins whose pages may ask; ``*`` is all. timeout_s: of a whole request. keep_alive_s: how long a stream may
    be quiet. drain_s: how long requests may still run once the server is told to stop. max_open: requests at a time,
    queued ones included.
    """

    name: str | None = None
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    timeout_s: float = 600.0
    max_body_bytes: int = 16 << 20
    keep_alive_s: float = 5.0
    drain_s: float = 25.0
    max_open: int = 1024

    def __post_init__(self) -> None:
        for flag, value in (("--timeout", self.timeout_s), ("--max-body", self.max_body_bytes)):
            if not value > 0:
                raise RequestError(f"{flag} {value}: expected more than 0")
        if self.name is not None and not self.name.strip():
            raise RequestError("--alias: expected a name")
        if self.api_key is not None and not (self.api_key.strip() == self.api_key != "" and self.api_key.isascii()):
            raise RequestError("--api-key: expected a key of ASCII characters without spaces around it")


class Service:
    """What the endpoints share."""

    def __init__(self, opened: Opened, options: ServerOptions, limit: StreamLimit | None = None) -> None:
        """limit: of the device, None where it was not measured; then nothing is said of shares."""
        self.options = options
        executor = opened.engine.executor
        self.floor = Floor(executor.step, limit.gb_s, executor.plan.budget) if limit is not None else None
        self.served = Served.of(opened, options.name)
        self.worker = Worker(opened.engine)
        self.metrics = Metrics(lambda: self.worker.load)
        self.worker.watch = self.metrics.take
        self._is_draining = False
        self._n_begun = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around a request that was let in: it may have more for the engine than it has submitted."""
        self._n_begun += 1
        self._is_quiet.clear()
        try:
            yield
        finally:
            self._n_begun -= 1
            if self._n_begun == 0:
                self._is_quiet.set()

    @property
    def closed(self) -> str | None:
        """Why nothing new is begun; None while requests are taken."""
        if self.worker.broken is not None:
            return self.worker.broken
        return "the server is stopping: it finishes what runs and takes nothing new" if self._is_draining else None

    async def drain(self) -> int:
        """Take nothing new and wait for what was let in, up to the limit; returns how many were cut short."""
        self._is_draining = True
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.options.drain_s
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_quiet.wait(), self.options.drain_s)
        return await self.worker.drain(ends_at - loop.time())
