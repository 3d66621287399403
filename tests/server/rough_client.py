"""A client without manners: it sends what it likes, and goes when it likes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["headers", "body", "prompt", "stream", "end"]
STAGES: tuple[Stage, ...] = ("headers", "body", "prompt", "stream", "end")
"""Where it goes: in the middle of the head, of the body, before any answer, behind its first bytes, after all of it."""
HARD = struct.pack("ii", 1, 0)
"""SO_LINGER: the connection is reset, not closed."""


@dataclass(frozen=True)
class Reply:
    """status 0 and no data: it went before there was one."""

    status: int
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Of a stream, without the last, which must say that it is."""
        parts = [part.removeprefix("data: ") for part in self.data.decode().split("\n\n") if part.startswith("data: ")]
        assert parts[-1] == "[DONE]", parts[-1]
        return [json.loads(part) for part in parts[:-1]]


GONE = Reply(0, b"")


async def send(port: int, path: str, body: bytes, goes: Stage | None = None, *, is_reset: bool = False) -> Reply:
    """One request on a connection of its own, read to its end unless the client goes before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        method = "POST" if body else "GET"
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        data = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode()
        if goes == "headers":
            writer.write(data[: len(data) // 2])
            return GONE
        writer.write(data + body[: len(body) // 2])
        if goes == "body":
            await writer.drain()
            await asyncio.sleep(0)
            return GONE
        writer.write(body[len(body) // 2 :])
        await writer.drain()
        if goes == "prompt":
            await asyncio.sleep(0.002)
            return GONE
        if goes == "stream":
            await reader.read(200)
            return GONE
        return _parse(await reader.read())
    except ConnectionError:
        if goes is None:
            raise
        return GONE
    finally:
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)
        writer.transport.abort() if goes is not None else writer.close()


def _parse(data: bytes) -> Reply:
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        rest = _joined(rest)
    return Reply(int(head.split(b" ", 2)[1]), rest)


def _joined(data: bytes) -> bytes:
    """Chunks to the last one, which is empty."""
    parts: list[bytes] = []
    while True:
        length, _, data = data.partition(b"\r\n")
        n = int(length, 16)
        if n == 0:
            return b"".join(parts)
        parts.append(data[:n])
        data = data[n + 2 :]
