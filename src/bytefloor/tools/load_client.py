"""The client of ``bench serve``, a process of its own: a plan on standard input, what became of it on standard output.

It runs beside the server it measures, so it imports little and does little: prepared bytes go out, what comes in is
noted with its time, and read when all is over.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import httptools

_USAGE = re.compile(rb'"usage": ?\{')
_DATA, _DONE, _ERROR = b"data: ", b"data: [DONE]", b'data: {"error"'


@dataclass
class Plan:
    """What to send. bodies: JSON texts for path, one a request.

    n_streams: so many at a time, each followed by the next. due_s: instead, when each is sent, from the start.
    is_cold: each on a connection of its own, which counts. n_tokens: of each answer, as it should be.
    """

    host: str
    port: int
    path: str
    bodies: list[str]
    n_tokens: list[int]
    n_streams: int = 1
    due_s: list[float] | None = None
    is_cold: bool = False
    timeout_s: float = 600.0


@dataclass
class Outcome:
    """One request. Times are seconds of one clock, error the kind of what went wrong.

    due: when it was sent, or should have been. first, last: when tokens that can be seen came. end: the answer's end.
    digest: of the answer's text.
    """

    due: float
    first: float | None = None
    last: float | None = None
    end: float | None = None
    n_tokens: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    digest: str = ""
    error: str | None = None


@dataclass
class Load:
    """All of them. wall_s: from the start to the last answer's end; cpu_s: what this process computed meanwhile."""

    outcomes: list[Outcome]
    wall_s: float
    cpu_s: float = 0.0


def digest(text: str) -> str:
    """Of an answer, to compare it with another."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Connection(asyncio.Protocol):
    """One connection, one request at a time; httptools calls the methods that begin with ``on_``."""

    def __init__(self) -> None:
        self.is_open = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.WriteTransport | None = None
        self._done: asyncio.Future[None] | None = None
        self._rest = b""
        self.events: list[bytes] = []
        self.first = self.last = self.end = 0.0
        self.status = 0

    async def ask(self, request: bytes) -> None:
        """Send, and wait for the end of the answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._rest, self.events, self.first, self.last, self.end, self.status = b"", [], 0.0, 0.0, 0.0, 0
        assert self._transport is not None
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        """At once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio has it."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that was under way has failed."""
        self.is_open = False
        self._fail(ConnectionResetError("disconnected"))

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.close()

    def on_headers_complete(self) -> None:
        """The status is known."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Events that are whole are kept with the time of the first and the last that brought a token."""
        now = time.perf_counter()
        parts = (self._rest + data).split(b"\n\n")
        self._rest = parts.pop()
        for part in parts:
            if not part.startswith(_DATA):
                continue
            self.events.append(part)
            if part.startswith((_DONE, _ERROR)) or _USAGE.search(part):
                continue
            self.first, self.last = self.first or now, now

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self.end = time.perf_counter()
        self.is_open = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Client:
    """Sends a plan's requests, as they are due."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._idle: list[Connection] = []
        self._requests = deque(
            (_request(plan, body), n_tokens) for body, n_tokens in zip(plan.bodies, plan.n_tokens, strict=True)
        )
        self._answers: list[tuple[Outcome, list[bytes], int]] = []
        self._start = 0.0

    async def run(self) -> Load:
        """All of it."""
        plan = self._plan
        gc.collect()
        gc.freeze()
        cpu_s, self._start = time.process_time(), time.perf_counter()
        if plan.due_s is None:
            await asyncio.gather(*(self._stream() for _ in range(min(plan.n_streams, len(plan.bodies)))))
        else:
            await self._arrive(plan.due_s)
        end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        for connection in self._idle:
            connection.close()
        for outcome, events, n_tokens in self._answers:
            if outcome.error is None:
                _read(outcome, events, n_tokens)
        return Load([outcome for outcome, _, _ in self._answers], end - self._start, cpu_s)

    async def _stream(self) -> None:
        while self._requests:
            await self._ask(*self._requests.popleft(), time.perf_counter())

    async def _arrive(self, due_s: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for (request, n_tokens), due in zip(self._requests, due_s, strict=True):
                await asyncio.sleep(self._start + due - time.perf_counter())
                group.create_task(self._ask(request, n_tokens, self._start + due))

    async def _ask(self, request: bytes, n_tokens: int, due: float) -> None:
        outcome, connection = Outcome(due), None
        events: list[bytes] = []
        self._answers.append((outcome, events, n_tokens))
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                connection = await self._connection()
                await connection.ask(request)
        except TimeoutError:
            outcome.error = "timeout"
        except httptools.HttpParserError:
            outcome.error = "no HTTP"
        except OSError as error:
            outcome.error = "disconnected" if isinstance(error, ConnectionResetError) else type(error).__name__
        if connection is None:
            return
        events += connection.events
        if outcome.error is None and connection.status != 200:
            outcome.error = f"HTTP {connection.status}"
        if outcome.error is None and connection.first:
            outcome.first, outcome.last, outcome.end = connection.first, connection.last, connection.end
        if connection.is_open and outcome.error != "timeout" and not self._plan.is_cold:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            found = self._idle.pop()
            if found.is_open:
                return found
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._plan.host, self._plan.port)
        return made


def _request(plan: Plan, body: str) -> bytes:
    data = body.encode()
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    head = f"POST {plan.path} HTTP/1.1\r\nhost: {host}:{plan.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _read(outcome: Outcome, events: list[bytes], n_tokens: int) -> None:
    """What the events of an answer say; an error where they are not what was asked for."""
    if events and events[-1].startswith(_ERROR):
        outcome.error = "failed midway"
        return
    if not events or not events[-1].startswith(_DONE) or outcome.first is None:
        outcome.error = "no whole answer"
        return
    chunks: list[dict[str, Any]] = [json.loads(part.removeprefix(_DATA)) for part in events[:-1]]
    outcome.digest = digest("".join(choice.get("text", "") for chunk in chunks for choice in chunk["choices"]))
    usage: dict[str, Any] = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), {})
    outcome.n_tokens, outcome.n_prompt = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    outcome.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if outcome.n_tokens != n_tokens:
        outcome.error = "another length"


def main() -> None:
    """The process."""
    plan = Plan(**json.load(sys.stdin))
    json.dump(asdict(asyncio.run(Client(plan).run())), sys.stdout)


if __name__ == "__main__":
    main()
