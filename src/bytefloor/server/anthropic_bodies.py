"""The bodies of Anthropic's paths, parsed as strictly as those of `bodies.py`."""

from __future__ import annotations

from typing import Any, Literal

from bytefloor.server.bodies import Body


class CacheControl(Body):
    """Changes nothing: what a prompt shares with an earlier one is found without marks."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(Body):
    """A piece of a message's text."""

    text: str
    type: str = "text"
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Body):
    """A thought in an earlier answer. Its signature proves nothing here."""

    thinking: str
    type: str = "thinking"
    signature: str | None = None


class ToolUseBlock(Body):
    """A call in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResultBlock(Body):
    """What a call came to: text, or blocks of it."""

    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    type: str = "tool_result"
    cache_control: CacheControl | None = None


class TurnBody(Body):
    """A message: text, or blocks."""

    role: str
    content: str | list[Any]


class ToolBody(Body):
    """A tool of the client's own."""

    name: str
    input_schema: Any
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceBody(Body):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    """Whether the model thinks, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class FormatBody(Body):
    """The form of an answer."""

    type: Literal["json_schema"]
    schema: Any


class OutputConfig(Body):
    """How the answer is to be."""

    format: FormatBody | None = None


class CountBody(Body, kw_only=True):
    """POST /v1/messages/count_tokens: what becomes a prompt."""

    messages: list[TurnBody]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages. The last two change nothing."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
