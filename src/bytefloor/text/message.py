"""A conversation's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. `arguments`: an object, or its JSON text."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn. `reasoning` is the thought of an earlier reply; the template decides whether it is shown again."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    name: str | None = None
    tool_call_id: str | None = None
