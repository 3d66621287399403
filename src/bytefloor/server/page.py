"""The chat page: four files that ask nobody but this server, which their headers make the browser see to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
}
"""Path: file in this folder, type. They need no key: what the page then asks does."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file, read once."""
    folder = files("bytefloor.server")
    return [
        Route(path, _endpoint((folder / name).read_bytes(), kind), methods=["GET"])
        for path, (name, kind) in FILES.items()
    ]


def _endpoint(data: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return Response(data, media_type=kind, headers=HEADERS)

    return answer
