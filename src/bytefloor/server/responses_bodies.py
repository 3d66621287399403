"""The body of OpenAI's /v1/responses, parsed as strictly as those of `bodies.py`."""

from __future__ import annotations

from typing import Any, Literal

from bytefloor.server.bodies import Body, SamplingFields

Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(Body):
    """A piece of a message, or of what a call came to."""

    type: str
    text: str


class OutputTextPart(InputTextPart):
    """A piece of an earlier answer. What answers carry beside the text changes nothing."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class InputMessage(Body):
    """A message, or an earlier answer's text: a text, or parts of it."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    type: str = "message"
    id: str | None = None
    status: Status | None = None


class InputCall(Body):
    """A call in an earlier answer. arguments: JSON text."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None


class InputCallOutput(Body):
    """What a call came to."""

    type: str
    call_id: str
    output: str | list[Any]
    id: str | None = None
    status: Status | None = None


class ReasoningPart(Body):
    """A piece of a thought."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    """A thought in an earlier answer. What only other servers can read is refused: a summary is not the thought."""

    type: str
    content: list[ReasoningPart] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None


class FunctionTool(Body):
    """A function that the model may call. `strict` changes nothing, as in a chat."""

    type: str
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class TextOptions(Body):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    """How much the model thinks; summaries are not made."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Body):
    """Changes nothing: nothing is ever padded."""

    include_obfuscation: bool | None = None


class ResponseBody(SamplingFields, kw_only=True):
    """POST /v1/responses. Sampling parameters beyond temperature and top_p are this server's own."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    # Accepted where they ask for what is done anyway.
    background: bool | None = None
    store: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    # Change nothing.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Of features that are not there.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    context_management: Any = None
