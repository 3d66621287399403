"""Everything the server refuses, in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error. param: the body's field it is about; code: a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """``{error: {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_field(param: str, message: str, code: str | None = None) -> Refusal:
    """400 about a field of the body."""
    return Refusal(400, message, param, code)
