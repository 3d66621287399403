"""Messages to a prompt, through the model's own template, and what is needed to read the reply.

Text of users, tools and earlier replies is encoded as plain text whatever it spells; only the template makes control
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bytefloor.errors import RequestError
from bytefloor.text.builtin import source_for
from bytefloor.text.reasoning import CHANNEL, THINK, ReasoningSplitter, ReasoningTags, split_reasoning
from bytefloor.text.sandbox import compiled
from bytefloor.text.shield import Shield
from bytefloor.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "ChatTemplate", "Message", "ReasoningSplitter", "ReasoningTags", "ToolCall"]

# A role is written by templates into the turn's very tokens, so it cannot be free text.
_ROLES = ("system", "developer", "user", "assistant", "tool")


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


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt and how to read what follows it.

    The reply is decoded with `tokenizer.stream(prompt.ids, keep_special=prompt.keep_special)`, and its text goes
    through `prompt.splitter()`.
    """

    text: str
    ids: list[int]
    is_thought_open: bool  # the prompt ends inside a thought that the template opened
    reasoning_tags: ReasoningTags | None  # None: the reply is content only
    keep_special: frozenset[int]  # control tokens whose text the splitter needs to see

    @classmethod
    def plain(cls, text: str, ids: list[int]) -> ChatPrompt:
        """A text to go on with as it is: no template, no thoughts."""
        return cls(text, ids, is_thought_open=False, reasoning_tags=None, keep_special=frozenset())

    def splitter(self) -> ReasoningSplitter:
        """A splitter for one reply to this prompt."""
        return ReasoningSplitter(self.reasoning_tags, is_open=self.is_thought_open)


@dataclass(frozen=True)
class _Rendered:
    marked: str
    marker: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.marker, "")


class ChatTemplate:
    """A model's chat template, ready to be filled in.

    `family` is the architecture's name ("llama", "qwen3", "gemma3", "gemma4"). `tool_source` is used for requests
    with tools where a model has a template of its own for them.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, family: str, *, tool_source: str | None = None) -> None:
        self.source = source
        self.notices: tuple[str, ...] = ()
        self._tokenizer = tokenizer
        self._render = compiled(source)
        self._render_tools = compiled(tool_source) if tool_source else self._render
        control = tokenizer.vocabulary.control
        self.reasoning_tags = _tags(source, control, family)
        tags = (self.reasoning_tags.open, self.reasoning_tags.close) if self.reasoning_tags else ()
        self.reasoning_ids = frozenset(id for text, id in control.items() if any(tag.startswith(text) for tag in tags))
        self.supports_thinking = "enable_thinking" in source or any(tag in source for tag in tags)
        self._shield = Shield([*control, *(tag for tag in tags if tag.endswith(">"))])
        self._always_opens_thought = self._finds_open_thought()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, family: str, *, bare_model_turn: bool = False) -> ChatTemplate:
        """The file's template; where there is none a built-in one for its turn tokens, with a notice that says so."""
        if tokenizer.chat_template is not None:
            return cls(tokenizer.chat_template, tokenizer, family, tool_source=tokenizer.templates.get("tool_use"))
        found = source_for(tokenizer.vocabulary.control, bare_model_turn=bare_model_turn)
        if found is None:
            raise RequestError(
                "the model has no chat template and no turn tokens that tell which format it was trained on; "
                "use plain completion, or put the model's chat_template.jinja beside it"
            )
        name, source = found
        template = cls(source, tokenizer, family)
        template.notices = (
            f"the model has no chat template; the built-in {name} format is used because its turn tokens are in the "
            "vocabulary. A base model was never trained on it.",
        )
        return template

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        fold_system: bool = False,
        **kwargs: Any,
    ) -> ChatPrompt:
        """Renders and encodes. `thinking` None leaves it to the template; `kwargs` are variables for the template.

        `fold_system` puts the system's text before the first user's, for templates that know no system turn.
        """
        thinking = kwargs.pop("enable_thinking", thinking) if thinking is None else thinking
        if thinking and not self.supports_thinking:
            raise RequestError("thinking was asked for, but the model's chat template has no thinking to turn on")
        rendered = self._rendered(messages, tools, thinking, add_generation_prompt, fold_system, kwargs)
        is_open = self._opens_thought(rendered)
        if is_open and thinking is False:
            raise RequestError("the model's chat template always opens a thought: thinking cannot be turned off")
        tags = None if thinking is False else self.reasoning_tags
        return ChatPrompt(
            text=rendered.text,
            ids=self._encoded(rendered),
            is_thought_open=is_open,
            reasoning_tags=tags,
            keep_special=self.reasoning_ids if tags else frozenset(),
        )

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt as text, as `prepare` renders it. For people to read: encoding it again is not safe."""
        return self.prepare(messages, **options).text

    def encode(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt as token ids, as `prepare` encodes it."""
        return self.prepare(messages, **options).ids

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        thinking: bool | None,
        add_generation_prompt: bool,
        fold_system: bool,
        kwargs: Mapping[str, Any],
    ) -> _Rendered:
        _check(messages)
        turns = _system_folded(messages) if fold_system else list(messages)
        given = [self._variables(message) for message in turns]
        marker = self._shield.marker(given, tools, kwargs, self.source)
        variables = {name: self._shield.broken(value, marker) for name, value in kwargs.items()}
        variables["tools"] = self._shield.broken(list(tools), marker) if tools else None
        variables["messages"] = [
            {"role": turn["role"], **self._shield.broken({k: v for k, v in turn.items() if k != "role"}, marker)}
            for turn in given
        ]
        variables["add_generation_prompt"] = add_generation_prompt
        if thinking is not None:
            variables["enable_thinking"] = thinking
        for name, id in (("bos_token", self._tokenizer.bos_id), ("eos_token", self._tokenizer.eos_id)):
            variables[name] = "" if id is None else self._tokenizer.vocabulary.text(id)
        render = self._render_tools if tools else self._render
        return _Rendered(render(variables), marker)

    def _encoded(self, rendered: _Rendered) -> list[int]:
        # Text of template and users between two control tokens is one piece: tokens may span where they meet.
        pieces = self._tokenizer.finder.cut(rendered.marked)
        return self._tokenizer.encode_pieces(
            [piece if isinstance(piece, int) else piece.replace(rendered.marker, "") for piece in pieces]
        )

    def _opens_thought(self, rendered: _Rendered) -> bool:
        # In the marked text no user's spelling of the tag is whole.
        return self.reasoning_tags is not None and rendered.marked.rstrip().endswith(self.reasoning_tags.open)

    def _finds_open_thought(self) -> bool:
        """Whether a plain request ends inside a thought."""
        try:
            return self._opens_thought(self._rendered([Message("user", "Hello")], None, None, True, False, {}))
        except RequestError:  # a template may ask for more than a plain request has
            return False

    def _variables(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it."""
        content, reasoning = message.content, message.reasoning
        if message.role == "assistant" and reasoning is None and self.reasoning_tags:
            # Clients send whole replies back; the template can only drop a thought that it is told of.
            # Where the prompt opened it, the reply has only the closing tag.
            is_open = self._always_opens_thought and self.reasoning_tags.close in content
            reasoning, content = split_reasoning(content, self.reasoning_tags, is_open=is_open)
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning:
            turn |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if message.tool_calls:
            turn["tool_calls"] = [_call_variables(call) for call in message.tool_calls]
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        return turn


def _tags(source: str, control: Mapping[str, int], family: str) -> ReasoningTags | None:
    if "<|channel>" in source or "<|channel>" in control or family == "gemma4":
        return CHANNEL
    return THINK if "<think>" in source or "</think>" in source or "<think>" in control else None


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("there are no messages to reply to")
    for message in messages:
        if message.role not in _ROLES:
            raise RequestError(f"a message has the role {message.role!r}, expected one of {', '.join(_ROLES)}")


def _system_folded(messages: Sequence[Message]) -> list[Message]:
    system = [message.content for message in messages if message.role in ("system", "developer")]
    others = [message for message in messages if message.role not in ("system", "developer")]
    if not system:
        return others
    text = "\n\n".join(system)
    for at, message in enumerate(others):
        if message.role == "user":
            others[at] = replace(message, content=f"{text}\n\n{message.content}")
            return others
    return [Message("user", text), *others]


def _call_variables(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        # Clients send JSON text; most templates want the object, and would quote text a second time.
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    variables: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return variables if call.id is None else {"id": call.id, **variables}
