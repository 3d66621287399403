"""Messages of a body as the chat template's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytefloor.server.bodies import MessageBody, TextPart, convert
from bytefloor.server.refusal import bad_field
from bytefloor.text.chat import Message, ToolCall

_OURS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "fold_system",
    "thinking",
    "thinking_budget",
    "bos_token",
    "eos_token",
    "self",
)
"""Variables of a template that do not come from chat_template_kwargs."""


def as_messages(bodies: Sequence[MessageBody]) -> list[Message]:
    """Refusal with the place of the first that cannot be shown to a model."""
    return [_as_message(body, f"messages[{place}]") for place, body in enumerate(bodies)]


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the template, none of which may take the place of the server's own."""
    kwargs = given or {}
    for name in kwargs:
        if name in _OURS or name.startswith("_"):
            at = f"chat_template_kwargs.{name}"
            raise bad_field(at, f"{at}: the server sets this variable itself")
    thinking = kwargs.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        at = "chat_template_kwargs.enable_thinking"
        raise bad_field(at, f"{at} = {thinking!r}: expected true or false")
    return kwargs


def _as_message(body: MessageBody, at: str) -> Message:
    calls = tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in body.tool_calls or ())
    if body.content is None and not (body.role == "assistant" and (calls or body.reasoning_content)):
        raise bad_field(f"{at}.content", f"{at}.content: null, expected a text")
    return Message(
        role=body.role,
        content=_text(body.content, f"{at}.content"),
        reasoning=body.reasoning_content,
        tool_calls=calls,
        name=body.name,
        tool_call_id=body.tool_call_id,
    )


def _text(content: str | list[Any] | None, at: str) -> str:
    """Parts of a text are lines of it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, f"{at}[{place}]") for place, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise bad_field(f"{at}.type", f"{at}.type = {kind!r}: expected 'text', the only input there is")
    return convert(part, TextPart, at).text
