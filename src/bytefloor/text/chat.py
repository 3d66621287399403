"""Messages to a prompt, through the model's own template, and what is needed to read the reply.

Text of users, tools and earlier replies is encoded as plain text whatever it spells; only the template makes control
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bytefloor.errors import RequestError
from bytefloor.text.builtin import source_for
from bytefloor.text.call_grammar import GrammarSource, call_grammar
from bytefloor.text.calls import CallFormat, format_of
from bytefloor.text.message import Message, ToolCall
from bytefloor.text.reasoning import CHANNEL, THINK, ReasoningSplitter, ReasoningTags, split_reasoning
from bytefloor.text.reasoning_budget import Thinking
from bytefloor.text.reply import ReplySplitter
from bytefloor.text.sandbox import compiled
from bytefloor.text.shield import Shield
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.text.tool_turns import checked_calls, with_calls_apart, with_results_inside
from bytefloor.text.tools import ToolChoice, check_choice, read_tools

__all__ = ["ChatPrompt", "ChatTemplate", "Message", "ReasoningSplitter", "ReasoningTags", "ToolCall"]

# A role is written by templates into the turn's very tokens, so it cannot be free text.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt and how to read what follows it.

    The reply is decoded with `tokenizer.stream(prompt.ids, keep_special=prompt.keep_special)`, and its text goes
    through `prompt.reply(...)`, or where there are no tools through `prompt.splitter()`.
    """

    text: str
    ids: list[int]
    is_thought_open: bool  # the prompt ends inside a thought that the template opened
    reasoning_tags: ReasoningTags | None  # None: the reply is content only
    keep_special: frozenset[int]  # control tokens whose text the splitter needs to see
    call_format: CallFormat | None = None  # None: the reply has no calls
    tool_names: frozenset[str] = frozenset()  # tools that may be called
    grammar: GrammarSource | None = None  # what the reply must be, its thought apart, where a call is demanded
    thinking: Thinking | None = None  # how long the reply may think; None where it has no thoughts

    def reply(self, answer_id: str) -> ReplySplitter:
        """A splitter for one reply to this prompt; the ids of its calls follow from `answer_id`."""
        return ReplySplitter(self.splitter(), self.call_format, self.tool_names, answer_id)

    def raw(self) -> ChatPrompt:
        """The same prompt, its reply's thoughts left in the text with their tags."""
        return replace(self, reasoning_tags=None, thinking=None)

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
        self.call_format = format_of(tool_source or source)
        self._family = family
        calls = self.call_format.tags if self.call_format else ()
        self._call_ids = frozenset(control[tag] for tag in calls if tag in control)
        self._shows_calls = "tool_calls" in (tool_source or source)
        # Templates with this word want results inside the turn that called.
        self._takes_results_inside = "tool_responses" in (tool_source or source)
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
        tool_choice: ToolChoice | None = None,
        parallel_calls: bool = True,
        thinking: bool | None = None,
        thinking_budget: int | None = None,
        add_generation_prompt: bool = True,
        fold_system: bool = False,
        **kwargs: Any,
    ) -> ChatPrompt:
        """Renders and encodes. `thinking` None leaves it to the template; `kwargs` are variables for the template.

        `thinking_budget`: most tokens of thought, which it turns on.

        `tools` are in OpenAI's form. With the choice `none` the model is not shown them, and its reply has no calls.
        `fold_system` puts the system's text before the first user's, for templates that know no system turn.
        """
        choice = tool_choice or ToolChoice()
        known = read_tools(tools or ())
        check_choice(choice, known)
        names = frozenset(tool.name for tool in known)
        messages = checked_calls(messages, names or None)
        if not self._shows_calls and any(message.tool_calls for message in messages):
            raise RequestError(
                f"the messages have tool calls, but the chat template of this {self._family} model does not show them"
            )
        if choice.mode == "none":
            tools, known, names = None, (), frozenset()
        thinking = kwargs.pop("enable_thinking", thinking) if thinking is None else thinking
        if thinking_budget is not None:
            if thinking is False:
                raise RequestError(f"a thinking budget of {thinking_budget} tokens was asked for, but thinking is off")
            thinking = True
        if thinking and not self.supports_thinking:
            raise RequestError(
                f"thinking was asked for, but the chat template of this {self._family} model has no thinking to turn on"
            )
        rendered = self._rendered(messages, tools, thinking, add_generation_prompt, fold_system, kwargs)
        is_open = self._opens_thought(rendered)
        if is_open and thinking is False:
            raise RequestError("the model's chat template always opens a thought: thinking cannot be turned off")
        tags = None if thinking is False else self.reasoning_tags
        format = self._format_for_calls() if tools else None
        grammar = None
        if format is not None:
            grammar = call_grammar(format, known, choice, self._tokenizer.finder.cut, is_parallel=parallel_calls)
        return ChatPrompt(
            text=rendered.text,
            ids=self._encoded(rendered),
            is_thought_open=is_open,
            reasoning_tags=tags,
            keep_special=(self.reasoning_ids if tags else frozenset()) | (self._call_ids if format else frozenset()),
            call_format=format,
            tool_names=names,
            grammar=grammar,
            thinking=Thinking(tags, is_open, self._tokenizer, thinking_budget) if tags else None,
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
        if "developer" not in self.source:
            turns = _developers_as_system(turns)
        given = self._arranged([self._variables(message) for message in turns])
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
        # A conversation that had tools is shown by the template for tools though this request brings none.
        is_of_tools = bool(tools) or any("tool_calls" in turn for turn in given)
        render = self._render_tools if is_of_tools else self._render
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

    def _format_for_calls(self) -> CallFormat:
        if self.call_format is None:
            raise RequestError(
                f"tools were given, but the chat template of this {self._family} model does not tell it to write calls "
                "in a form that is known: Llama 3, Hermes (Qwen3), Gemma 4"
            )
        return self.call_format

    def _arranged(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Calls and results where the template looks for them."""
        if self._takes_results_inside:
            return with_results_inside(turns)
        most = self.call_format.n_a_turn if self.call_format else None
        return turns if most is None else with_calls_apart(turns, most)

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
        if message.role not in ROLES:
            raise RequestError(f"a message has the role {message.role!r}, expected one of {', '.join(ROLES)}")


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


def _developers_as_system(messages: list[Message]) -> list[Message]:
    """For templates that know no developer: most would leave such a turn out without a word. One system message comes
    first, and some refuse a second, so those that lead are joined."""
    if all(message.role != "developer" for message in messages):
        return messages
    turns = [replace(message, role="system") if message.role == "developer" else message for message in messages]
    n_leading = next((i for i, message in enumerate(turns) if message.role != "system"), len(turns))
    if n_leading == 0:
        return turns
    return [Message("system", "\n\n".join(message.content for message in turns[:n_leading])), *turns[n_leading:]]


def _call_variables(call: ToolCall) -> dict[str, Any]:
    variables: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return variables if call.id is None else {"id": call.id, **variables}
