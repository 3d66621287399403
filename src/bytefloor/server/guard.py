"""What every request passes: an id, a log line, the key, the state of the server, and an answer whatever happens."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bytefloor.server.anthropic_errors import body_of, is_anthropic, status_of
from bytefloor.server.log import request_id
from bytefloor.server.metrics import Metrics
from bytefloor.server.page import FILES
from bytefloor.server.refusal import Refusal
from bytefloor.server.wire import to_json

LOG = logging.getLogger("bytefloor.server")
PUBLIC = {"/health", *FILES}
"""Paths that need no key."""
OPEN_TO_THE_END = {"/health", "/metrics"}
"""Paths that answer while the server drains."""


def error_body(refusal: Refusal, scope: Scope) -> dict[str, Any]:
    """A refusal as the path's clients know it."""
    return body_of(refusal, scope["state"]["id"]) if is_anthropic(scope["path"]) else refusal.body


def refused(refusal: Refusal, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal as a response. Clients that try again by themselves are told where that is no use."""
    headers = dict(headers or {})
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.status in (429, 503):
        headers["retry-after"] = "1"
    if refusal.status in (500, 504):
        headers["x-should-retry"] = "false"
    status = status_of(refusal) if is_anthropic(scope["path"]) else refusal.status
    return Response(to_json(error_body(refusal, scope)), status, headers, media_type="application/json")


def failure(error: Exception) -> Refusal:
    """What a client is told of a mistake of the server's own; the log has the rest."""
    return Refusal(500, f"the server failed: {type(error).__name__}", code="internal_error")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body. Refusal for one that is too long, before all of it has come, or is not said to be JSON.

    The last keeps pages of other sites out: a browser sends any other type without asking the server first.
    """
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise Refusal(415, f"content-type is {kind!r}: expected 'application/json'", code="unsupported_media_type")
    parts: list[bytes] = []
    n_bytes = 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes > most_bytes:
            message = f"the body has more than {most_bytes} bytes, this server's limit (--max-body)"
            raise Refusal(413, message, code="body_too_large")
        parts.append(part)
    return b"".join(parts)


class Guard:
    """Around the application, as plain ASGI: what comes from the client passes through untouched.

    closed: why nothing new is begun; None while the server takes requests. turn: waits until reading a request does
    not keep the engine from its work. begun: around what was let in.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        api_key: str | None,
        closed: Callable[[], str | None],
        paths: frozenset[str],
        turn: Callable[[], Awaitable[None]],
        begun: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = api_key.encode() if api_key is not None else None
        self._closed = closed
        self._paths = paths
        self._turn = turn
        self._begun = begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id")
        id, began, status = request_id(given.encode("latin-1") if given else None), time.perf_counter(), 0
        facts: dict[str, object] = {}
        scope["state"] = {**scope.get("state", {}), "facts": facts, "id": id}

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Anthropic's clients look for the second.
                ids = [(name, id.encode()) for name in (b"x-request-id", b"request-id")]
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            await self._answer(scope, receive, noted, headers)
        except Refusal as refusal:
            await refused(refusal, scope)(scope, receive, noted)
        except Exception as error:
            LOG.error("a request failed", exc_info=error, extra={"facts": {"id": id}})
            facts["error"] = f"{type(error).__name__}: {error}"
            if status == 0:
                await refused(failure(error), scope)(scope, receive, noted)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.responded(path, status)
        if status >= 400:
            self._metrics.failed(status)
        ms = round(1e3 * (time.perf_counter() - began), 1)
        line = {"id": id, "method": scope["method"], "path": scope["path"], "status": status, "ms": ms, **facts}
        LOG.info("request", extra={"facts": line})

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        path = scope["path"]
        if path not in PUBLIC:
            self._check_key(headers)
        if scope["method"] == "POST":
            await self._turn()
        reason = self._closed()
        if path in OPEN_TO_THE_END:
            await self._app(scope, receive, send)
            return
        if reason is not None:
            raise Refusal(503, reason, code="unavailable")
        with self._begun():
            await self._app(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        """As OpenAI's clients send it, or as Anthropic's do."""
        if self._key is None:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        found = [bearer.strip()] if scheme.lower() == "bearer" else []
        found.append(headers.get("x-api-key", ""))
        if not any([hmac.compare_digest(key.encode("latin-1"), self._key) for key in found]):  # noqa: C419 (all of them)
            message = "a key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY', and this is not it"
            raise Refusal(401, message, code="invalid_api_key")
