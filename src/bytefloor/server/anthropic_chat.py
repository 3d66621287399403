"""Anthropic's bodies as the chat that `asked.py` takes, and what is wrong with that chat in the body's own words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bytefloor.server.anthropic_bodies import (
    CountBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ThinkingBody,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
)
from bytefloor.server.asked import Asked, ask_chat, chat_prompt
from bytefloor.server.bodies import Body, ChatBody, FunctionCall, MessageBody, ToolCallBody, convert
from bytefloor.server.origins import own_words
from bytefloor.server.refusal import Refusal, bad_field
from bytefloor.server.served import Served

T = TypeVar("T")
_TEXT: dict[str, type[Body]] = {"text": TextBlock}
_BLOCKS: dict[str, dict[str, type[Body]]] = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {**_TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def ask_messages(body: MessagesBody, served: Served) -> Asked:
    """What /v1/messages is asked. Refusal with the field's name."""
    return _translated(body, lambda chat: ask_chat(chat, served))


def count_tokens(body: CountBody, served: Served) -> int:
    """How many tokens the prompt has, however many may be."""
    served.check_name(body.model)
    return _translated(body, lambda chat: len(chat_prompt(chat, served).ids))


def _translated(body: CountBody, ask: Callable[[ChatBody], T]) -> T:
    conversion = _Conversion()
    chat = conversion.chat(body)
    try:
        return ask(chat)
    except Refusal as refusal:
        raise own_words(refusal, conversion.origins) from None


class _Conversion:
    """One body's. Remembers which of its fields each of the chat's came from."""

    def __init__(self) -> None:
        self.origins = {"stop": "stop_sequences", "response_format": "output_config.format"}
        self.origins["thinking_budget"] = "thinking.budget_tokens"
        self.origins["response_format.json_schema.schema"] = "output_config.format.schema"
        self._messages: list[MessageBody] = []

    def chat(self, body: CountBody) -> ChatBody:
        """The body as a chat."""
        if body.system is not None:
            self._add_system(body.system, "system")
        for place, turn in enumerate(body.messages):
            at = f"messages[{place}]"
            if turn.role not in _BLOCKS:
                raise bad_field(f"{at}.role", f"{at}.role = {turn.role!r}: expected 'user', 'assistant' or 'system'")
            if turn.role == "system":
                self._add_system(turn.content, f"{at}.content")
            elif turn.role == "user":
                self._add_user(turn.content, at)
            else:
                self._add_answer(turn.content, at)
        if body.messages and body.messages[-1].role == "assistant":
            at = f"messages[{len(body.messages) - 1}].role"
            raise bad_field(at, f"{at} = 'assistant': expected 'user' at the end, an answer is not continued here")
        chat = ChatBody(messages=self._messages, model=body.model, tools=self._tools(body))
        if body.tool_choice is not None:
            chat.tool_choice, is_single = _choice(body), body.tool_choice.disable_parallel_tool_use
            chat.parallel_tool_calls = not is_single
        if body.thinking is not None:
            chat.chat_template_kwargs = {"enable_thinking": body.thinking.type != "disabled"}
            chat.thinking_budget = _budget(body.thinking)
        if body.output_config is not None and body.output_config.format is not None:
            schema = {"schema": body.output_config.format.schema}
            chat.response_format = {"type": "json_schema", "json_schema": schema}
        if isinstance(body, MessagesBody):
            for name in ("max_tokens", "temperature", "top_p", "top_k", "stream"):
                setattr(chat, name, getattr(body, name))
            chat.stop = body.stop_sequences
        return chat

    # Messages ---------------------------------------------------------------------------------------------------------

    def _add(self, message: MessageBody, at: str) -> None:
        self.origins[f"messages[{len(self._messages)}]"] = at
        self._messages.append(message)

    def _add_system(self, content: str | list[Any], at: str) -> None:
        self._add(MessageBody("system", _lines(content, at)), at)

    def _add_user(self, content: str | list[Any], at: str) -> None:
        """A turn's results, then its text. Turns of one speaker are one: templates want them to alternate."""
        texts: list[str] = []
        has_results = False
        for path, block in _blocks(content, "user", f"{at}.content"):
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            assert isinstance(block, ToolResultBlock)
            if texts:
                raise bad_field(path, f"{path}: a tool_result comes after text, expected all of them before it")
            self.origins[f"messages[{len(self._messages)}].tool_call_id"] = f"{path}.tool_use_id"
            self._add(MessageBody("tool", _result(block, path), tool_call_id=block.tool_use_id), path)
            has_results = True
        if has_results and not texts:
            return
        before = self._last("user")
        if before is None:
            self._add(MessageBody("user", "\n".join(texts)), at)
        else:
            before.content = "\n".join([str(before.content), *texts])

    def _add_answer(self, content: str | list[Any], at: str) -> None:
        """Thoughts, text and calls, in the order in which templates show them."""
        message = self._last("assistant")
        if message is None:
            message = MessageBody("assistant", "", tool_calls=[])
            self._add(message, at)
            self.origins[f"messages[{len(self._messages) - 1}].tool_calls"] = f"{at}.content"
        calls = message.tool_calls
        assert calls is not None
        for path, block in _blocks(content, "assistant", f"{at}.content"):
            match block:
                case TextBlock(text=text):
                    message.content = _joined(message.content, text)
                case ThinkingBlock(thinking=thought):
                    message.reasoning_content = _joined(message.reasoning_content, thought)
                case ToolUseBlock(id=id, name=name, input=arguments):
                    call = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}].function"
                    self.origins[f"{call}.name"] = f"{path}.name"
                    self.origins[f"{call}.arguments"] = f"{path}.input"
                    calls.append(ToolCallBody(FunctionCall(name, arguments), id))

    def _last(self, role: str) -> MessageBody | None:
        """The message before, if it is that speaker's."""
        return self._messages[-1] if self._messages and self._messages[-1].role == role else None

    # Tools ------------------------------------------------------------------------------------------------------------

    def _tools(self, body: CountBody) -> list[dict[str, Any]]:
        is_demanded = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        return [self._tool(given, f"tools[{place}]", is_demanded) for place, given in enumerate(body.tools or ())]

    def _tool(self, given: Any, at: str, is_demanded: bool) -> dict[str, Any]:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise bad_field(
                f"{at}.type", f"{at}.type = {kind!r}: expected 'custom', the server has no tools of its own"
            )
        tool = convert(given, ToolBody, at)
        if tool.strict and not is_demanded:
            held = "without a tool_choice of any or tool arguments are not held to their schema"
            raise bad_field(f"{at}.strict", f"{at}.strict = true: {held}")
        if not isinstance(tool.input_schema, dict):
            found = type(tool.input_schema).__name__
            raise bad_field(f"{at}.input_schema", f"{at}.input_schema: expected a JSON schema, found {found}")
        self.origins[f"{at}.function"] = at
        self.origins[f"{at}.function.parameters"] = f"{at}.input_schema"
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _blocks(content: str | list[Any], role: str, at: str) -> list[tuple[str, Body]]:
    """(where it stands, block) of each."""
    if isinstance(content, str):
        return [(at, TextBlock(content))]
    return [
        (path, _block(value, _BLOCKS[role], path))
        for path, value in ((f"{at}[{place}]", value) for place, value in enumerate(content))
    ]


def _block(value: Any, kinds: Mapping[str, type[Body]], at: str) -> Body:
    if not isinstance(value, dict):
        raise bad_field(at, f"{at}: expected a block, found {type(value).__name__}")
    kind = value.get("type")
    found = kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        wanted = " or ".join(repr(name) for name in kinds)
        raise bad_field(f"{at}.type", f"{at}.type = {kind!r}: expected {wanted} here")
    return convert(value, found, at)


def _lines(content: str | list[Any], at: str) -> str:
    """Blocks of text are lines of it."""
    blocks = _blocks(content, "system", at)
    return "\n".join(block.text for _, block in blocks if isinstance(block, TextBlock))


def _joined(before: str | list[Any] | None, text: str) -> str:
    return f"{before}\n{text}" if before else text


def _result(block: ToolResultBlock, at: str) -> str:
    """What the model is shown. Templates have no word for a call that failed, so that an object says it."""
    text = "" if block.content is None else _lines(block.content, f"{at}.content")
    return json.dumps({"error": text}, ensure_ascii=False) if block.is_error else text


def _choice(body: CountBody) -> Any:
    choice = body.tool_choice
    assert choice is not None
    if choice.type in ("any", "tool") and not body.tools:
        raise bad_field("tool_choice.type", f"tool_choice.type = {choice.type!r}: the request has no tools")
    if (choice.type == "tool") != (choice.name is not None):
        wanted = "expected a tool's name" if choice.name is None else "expected a name only where the type is 'tool'"
        raise bad_field("tool_choice.name", f"tool_choice.name = {choice.name!r}: {wanted}")
    return _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})


def _budget(thinking: ThinkingBody) -> int | None:
    """Tokens of thought. Without one a thought is as long as the model likes."""
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        at = "thinking.budget_tokens"
        raise bad_field(at, f"{at}: expected only where thinking.type is 'enabled', found with {thinking.type!r}")
    return thinking.budget_tokens
