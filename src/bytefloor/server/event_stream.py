"""Server-sent events, and answers that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from bytefloor.server.wire import to_json

T = TypeVar("T")
Write: TypeAlias = Callable[[bytes], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
COMMENT = b": still here\n\n"
"""Keeps proxies from dropping a quiet connection; clients skip it."""


def event(value: dict[str, Any]) -> bytes:
    """A value as an event, named where the value says its type."""
    kind = value.get("type")
    name = f"event: {kind}\n".encode() if isinstance(kind, str) else b""
    return name + b"data: " + to_json(value) + b"\n\n"


def events(values: Iterable[dict[str, Any]]) -> bytes:
    """Several, one after another."""
    return b"".join(map(event, values))


HOLE = msgspec.Raw(b"\0")
"""In place of a text: what no JSON has."""


def around(value: dict[str, Any]) -> tuple[bytes, bytes]:
    """An event's bytes before the hole that is somewhere in it, and behind. So an event that differs from another by a
    text alone is no object to build."""
    before, hole, behind = event(value).partition(bytes(HOLE))
    assert hole, "there is no hole"
    return before, behind


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of work; None, with the work cancelled, when the client goes first.

    receive: of a request whose body has been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response that tell writes part by part, until it ends, the client goes or limit_s is over; then close is
    called.

    tell returns the last part, which goes out with the end. Where the client does not read, writing waits for it: then
    the limit ends the response without its end, and the connection with it, and is_late is called first.
    """

    def __init__(
        self,
        tell: Callable[[Write], Coroutine[Any, Any, bytes]],
        close: Callable[[], None],
        limit_s: float,
        is_late: Callable[[], None],
    ) -> None:
        self._tell = tell
        self._close = close
        self._limit_s = limit_s
        self._is_late = is_late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            async with asyncio.timeout(self._limit_s):
                await unless_gone(receive, self._send(send))
        except TimeoutError:
            self._is_late()
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = await self._tell(lambda part: send({"type": "http.response.body", "body": part, "more_body": True}))
        await send({"type": "http.response.body", "body": last, "more_body": False})
