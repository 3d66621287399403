"""The body of /v1/responses as the chat that `asked.py` takes, and what is wrong with that chat in the body's words."""

from __future__ import annotations

from typing import Any

from bytefloor.server.asked import Asked, ask_chat
from bytefloor.server.bodies import ChatBody, FunctionCall, MessageBody, SamplingFields, ToolCallBody, convert
from bytefloor.server.origins import own_words
from bytefloor.server.refusal import Refusal, bad_field
from bytefloor.server.responses_bodies import (
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputTextPart,
    OutputTextPart,
    ResponseBody,
)
from bytefloor.server.served import Served

NOT_STORED = "nothing is stored here: send what came before as input items"
_PARTS: dict[str, type[InputTextPart]] = {"input_text": InputTextPart, "output_text": OutputTextPart}


def ask_response(body: ResponseBody, served: Served) -> tuple[Asked, dict[str, Any]]:
    """What /v1/responses is asked, and what its answer repeats of the body. Refusal with the field's name."""
    _refuse(body)
    conversion = _Conversion()
    chat = conversion.chat(body)
    try:
        asked = ask_chat(chat, served)
    except Refusal as refusal:
        raise own_words(refusal, conversion.origins) from None
    return asked, _repeated(body, asked)


def _refuse(body: ResponseBody) -> None:
    """What is not there, or would have to be something else than it is here."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise bad_field(name, f"{name}: {NOT_STORED}", "unsupported_parameter")
    if body.store:
        raise bad_field("store", "store = true: nothing is stored here, leave it out or say false")
    if body.background:
        raise bad_field("background", "background = true: an answer is only in the reply to its request")
    for name in ("prompt", "max_tool_calls", "context_management"):
        if getattr(body, name) is not None:
            raise bad_field(name, f"{name} is not supported by this server; leave it out", "unsupported_parameter")
    if body.truncation not in (None, "disabled"):
        message = f"truncation = {body.truncation!r}: expected 'disabled', nothing is ever cut from a prompt"
        raise bad_field("truncation", message)
    if body.include:
        raise bad_field("include", f"include = {body.include!r}: expected nothing, there is no more to include")
    if body.top_logprobs:
        message = f"top_logprobs = {body.top_logprobs}: expected 0, /v1/chat/completions has log-probabilities"
        raise bad_field("top_logprobs", message)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        found = f"text.verbosity = {body.text.verbosity!r}"
        raise bad_field("text.verbosity", f"{found}: expected 'medium' or nothing, a model here has one verbosity")
    for name in ("summary", "generate_summary"):
        if body.reasoning is not None and getattr(body.reasoning, name) is not None:
            message = f"reasoning.{name}: no summaries are made, expected nothing; thoughts come whole"
            raise bad_field(f"reasoning.{name}", message)
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options is given without stream: set stream to true")


def _repeated(body: ResponseBody, asked: Asked) -> dict[str, Any]:
    """With the values that were taken where the body left something out."""
    sampling = asked.choices[0].request.sampling
    tools = [convert(tool, FunctionTool, "tools") for tool in body.tools or ()]
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": [
            {
                "type": tool.type,
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in tools
        ],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


class _Conversion:
    """One body's. Remembers which of its fields each of the chat's came from."""

    def __init__(self) -> None:
        self.origins = {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
        }
        self._messages: list[MessageBody] = []

    def chat(self, body: ResponseBody) -> ChatBody:
        """The body as a chat."""
        if body.instructions is not None:
            self._add(MessageBody("system", body.instructions), "instructions")
        if isinstance(body.input, str):
            self._add(MessageBody("user", body.input), "input")
        else:
            for place, item in enumerate(body.input):
                self._add_item(item, f"input[{place}]")
        chat = ChatBody(messages=self._messages, model=body.model, stream=body.stream)
        for name in (*SamplingFields.__struct_fields__, "tool_choice", "parallel_tool_calls", "chat_template_kwargs"):
            setattr(chat, name, getattr(body, name))
        chat.max_completion_tokens = body.max_output_tokens
        chat.thinking_budget = body.thinking_budget
        chat.reasoning_effort = body.reasoning.effort if body.reasoning is not None else None
        chat.tools = [self._tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]
        chat.response_format = _format(body.text.format if body.text is not None else None)
        return chat

    # Items ------------------------------------------------------------------------------------------------------------

    def _add_item(self, item: Any, at: str) -> None:
        if not isinstance(item, dict):
            raise bad_field(at, f"{at}: expected an item, an object, found {type(item).__name__}")
        match item.get("type", "message" if "role" in item else None):
            case "message":
                self._add_message(convert(item, InputMessage, at), at)
            case "function_call":
                self._add_call(convert(item, InputCall, at), at)
            case "function_call_output":
                found = convert(item, InputCallOutput, at)
                output = _text(found.output, f"{at}.output")
                self.origins[f"messages[{len(self._messages)}].tool_call_id"] = f"{at}.call_id"
                self._add(MessageBody("tool", output, tool_call_id=found.call_id), at)
            case "reasoning":
                self._add_thought(convert(item, InputReasoning, at), at)
            case "item_reference":
                raise bad_field(f"{at}.type", f"{at}.type = 'item_reference': {NOT_STORED}")
            case kind:
                known = "message, function_call, function_call_output or reasoning"
                raise bad_field(f"{at}.type", f"{at}.type = {kind!r}: expected {known}")

    def _add_message(self, found: InputMessage, at: str) -> None:
        text = _text(found.content, f"{at}.content")
        if found.role != "assistant":
            self._add(MessageBody(found.role, text), at)
            return
        turn = self._answer(at)
        turn.content = text if turn.content is None else f"{turn.content}\n{text}"

    def _add_call(self, found: InputCall, at: str) -> None:
        # One that did not come to its end is text of the message behind it.
        if found.status == "incomplete":
            return
        turn = self._answer(at)
        call = ToolCallBody(FunctionCall(found.name, found.arguments), id=found.call_id)
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _add_thought(self, found: InputReasoning, at: str) -> None:
        if found.summary:
            raise bad_field(f"{at}.summary", f"{at}.summary: expected nothing, a summary is not what the model thought")
        text = "\n".join(part.text for part in found.content or ())
        turn = self._answer(at)
        turn.reasoning_content = text if turn.reasoning_content is None else f"{turn.reasoning_content}\n{text}"

    def _answer(self, at: str) -> MessageBody:
        """The turn of the assistant that is open: items of one answer that follow each other are one turn."""
        if not self._messages or self._messages[-1].role != "assistant":
            self._add(MessageBody("assistant"), at)
        return self._messages[-1]

    def _add(self, message: MessageBody, at: str) -> None:
        self.origins[f"messages[{len(self._messages)}]"] = at
        self._messages.append(message)

    def _tool(self, tool: Any, at: str) -> dict[str, Any]:
        """In the form that chats have."""
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise bad_field(f"{at}.type", f"{at}.type = {kind!r}: expected 'function', there are no other tools here")
        found = convert(tool, FunctionTool, at)
        self.origins[f"{at}.function"] = at
        function = {"name": found.name, "description": found.description, "parameters": found.parameters}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _text(content: str | list[Any], at: str) -> str:
    """Parts of a text are lines of it."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{at}[{place}]") for place, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _PARTS:
        raise bad_field(
            f"{at}.type", f"{at}.type = {kind!r}: expected 'input_text' or 'output_text', there is only text"
        )
    return convert(part, _PARTS.get(str(kind), InputTextPart), at).text


def _format(given: dict[str, Any] | None) -> Any:
    """A schema's fields stand beside its type; in a chat they are an object of their own."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}
