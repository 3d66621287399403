"""Refusals in the shape that Anthropic's clients know, on the paths that are theirs."""

from __future__ import annotations

from typing import Any

from bytefloor.server.refusal import Refusal

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether errors on this path are told in Anthropic's shape."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(refusal: Refusal) -> int:
    """529 is Anthropic's word for "not now"; it has no 503."""
    return 529 if refusal.status == 503 else refusal.status


def body_of(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """``{type, error: {type, message}, request_id}``."""
    status = status_of(refusal)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": request_id}
