"""An answer as it is being made, told apart: its text, its thought, its tool calls.

The same events come whatever pieces the text comes in, so an answer that is streamed and one that is not are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from bytefloor.text.calls import CallFormat
from bytefloor.text.pieces import MalformedError, Pieces, Steps
from bytefloor.text.reasoning import Channel, ReasoningSplitter
from bytefloor.text.stop import n_begun


# Not frozen: there is one for every token, and frozen ones take three times as long to make.
@dataclass(slots=True)
class Text:
    """More text of the answer or of the thought."""

    channel: Channel
    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call to a tool of the request. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is whole: its arguments, joined, are a JSON object."""

    index: int


@dataclass(frozen=True)
class CallFailed:
    """What looked like a call is none, or is cut off. `index` is None if no CallBegin was given for it.

    What the model wrote, tags and all, follows as text of the answer.
    """

    index: int | None
    reason: str


Event: TypeAlias = Text | CallBegin | CallArguments | CallEnd | CallFailed


@dataclass(frozen=True)
class FinishedCall:
    """A whole call; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass
class Reply:
    """A whole answer. `notes` say why something that looked like a call is in `content` instead."""

    content: str = ""
    reasoning: str = ""
    calls: list[FinishedCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collected(events: Iterable[Event]) -> Reply:
    """The whole answer that events tell of. Calls that were begun and not ended are in its content."""
    texts: dict[Channel, list[str]] = {"content": [], "reasoning": []}
    begun: dict[int, tuple[CallBegin, list[str]]] = {}
    reply = Reply()
    for event in events:
        match event:
            case Text(channel, text):
                texts[channel].append(text)
            case CallBegin(index):
                begun[index] = (event, [])
            case CallArguments(index, text):
                begun[index][1].append(text)
            case CallEnd(index):
                head, arguments = begun[index]
                reply.calls.append(FinishedCall(head.id, head.name, "".join(arguments)))
            case CallFailed(_, reason):
                reply.notes.append(reason)
    reply.content, reply.reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
    return reply


def call_id(answer_id: str, index: int) -> str:
    """The id of an answer's call: the same for the same answer, different for any two."""
    return "call_" + hashlib.blake2b(f"{answer_id}/{index}".encode(), digest_size=12).hexdigest()


class ReplySplitter:
    """Pushes text in, gives events out.

    `format` None: the answer has no calls, whatever it looks like. `tools`: names that may be called; a call of
    another is no call. White space around calls belongs to them and vanishes.
    """

    def __init__(
        self, reasoning: ReasoningSplitter, format: CallFormat | None, tools: Collection[str], answer_id: str
    ) -> None:
        self._reasoning = reasoning
        self._calls = _CallSplitter(format, tools, answer_id) if format else None

    def push(self, text: str) -> list[Event]:
        """Events that have become certain."""
        if self._calls is None:
            return [Text(channel, part) for channel, part in self._reasoning.push(text)]
        while text:
            # Inside a call nothing opens a thought, so each piece ends where a tag may end, and a call may have begun.
            cut = len(text) if self._calls.is_inside else text.find(">") + 1 or len(text)
            rest = ""
            if self._calls.is_inside:
                rest = self._calls.push(text)
            else:
                rest = self._routed(self._reasoning.push(text[:cut]), self._calls)
            text = rest + text[cut:]
        return self._calls.taken()

    def finish(self) -> list[Event]:
        """What was held back. A call that is not whole by now is text."""
        if self._calls is None:
            return [Text(channel, part) for channel, part in self._reasoning.finish()]
        rest = self._routed(self._reasoning.finish(), self._calls)
        while rest:
            rest = self._calls.push(rest)
        self._calls.finish()
        return self._calls.taken()

    def _routed(self, parts: list[tuple[Channel, str]], calls: _CallSplitter) -> str:
        """What came after a call that ended within these parts."""
        rest = ""
        for channel, part in parts:
            if channel == "reasoning":
                calls.thought(part)
            else:
                rest += calls.push(part)
        return rest


class _CallSplitter:
    """Finds calls in an answer's text. To the format's parser it is the `Calls` that it reports to."""

    def __init__(self, format: CallFormat, tools: Collection[str], answer_id: str) -> None:
        self.is_inside = False
        self._format = format
        self._tools = frozenset(tools)
        self._answer_id = answer_id
        self._events: list[Event] = []
        self._source = Pieces()
        self._is_at_start = True  # nothing of the answer was let through
        self._is_after_call = False  # white space that comes now belongs to the call before
        self._has_left = False  # a call has ended, well or not, in this piece
        self._n_begun = 0
        self._call = _OpenCall()
        self._steps = self._read()
        next(self._steps)

    def taken(self) -> list[Event]:
        """The events since last time, neighbouring pieces of one text put together."""
        events, self._events = self._events, []
        joined: list[Event] = []
        for event in events:
            match (joined[-1] if joined else None), event:
                case Text(channel, before), Text(other, text) if channel == other:
                    joined[-1] = Text(channel, before + text)
                case CallArguments(index, before), CallArguments(_, text):
                    joined[-1] = CallArguments(index, before + text)
                case _:
                    joined.append(event)
        return joined

    def thought(self, text: str) -> None:
        """A piece of the thought, which passes by."""
        self._events.append(Text("reasoning", text))

    def push(self, text: str) -> str:
        """Takes text up to the end of a call; gives back what comes after it."""
        self._has_left = False
        self._source.feed(text)
        next(self._steps)
        return self._source.taken_back() if self._has_left else ""

    def finish(self) -> None:
        """No more text comes."""
        self._source.is_over = True
        for _ in self._steps:
            pass

    # --- what the parser reports ---

    def named(self, name: str) -> None:
        """The call's name is known."""
        if name not in self._tools:
            raise MalformedError(f"a call names {name!r}, which is not among the request's tools")
        self._call.name = name
        self._write_early()

    def write(self, text: str) -> None:
        """More of the arguments."""
        call = self._call
        if call.name is None:
            call.early.append(text)
            return
        if call.index is None:
            call.index = self._n_begun
            self._n_begun += 1
            self._events.append(CallBegin(call.index, call_id(self._answer_id, call.index), call.name))
        self._events.append(CallArguments(call.index, text))

    def end(self, *, may_lack_arguments: bool = False) -> None:
        """The call is whole."""
        if self._call.name is None:
            raise MalformedError("a call has no name")
        if self._call.index is None:
            if not may_lack_arguments:
                raise MalformedError("a call has no arguments")
            self.write("{}")
        assert self._call.index is not None
        self._events.append(CallEnd(self._call.index))
        self._call = _OpenCall()
        self._source.mark()

    def _write_early(self) -> None:
        early, self._call.early = "".join(self._call.early), []
        if early:
            self.write(early)

    # --- the text around calls ---

    def _read(self) -> Steps[None]:
        while (yield from self._pass_text()):
            self.is_inside = True
            try:
                yield from self._format.read(self._source, self)
                self._is_after_call = True
            except MalformedError as problem:
                self._give_back(str(problem))
            self.is_inside, self._is_at_start, self._has_left = False, False, True
            yield

    def _pass_text(self) -> Steps[bool]:
        """Lets text through up to where a call begins: True; or to the end: False."""
        source = self._source
        while True:
            source.mark()
            if self._is_after_call:
                source.skip(_n_spaces(source.rest))
                self._is_after_call = not source.rest
                source.mark()
            rest = source.rest
            n_spaces = _n_spaces(rest)
            if self._format.is_bare and self._is_at_start and rest[n_spaces : n_spaces + 1] == "{":
                source.skip(n_spaces)
                return True
            found = [(at, tag) for tag in self._format.opens if (at := rest.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                before = rest[:at].rstrip(_SPACES)
                self._let_through(before)
                source.skip(at - len(before) + len(tag))
                return True
            if source.is_over:
                self._let_through(rest)
                return False
            n_held = max(n_begun(rest, tag) for tag in self._format.opens)
            self._let_through(rest[: len(rest) - n_held].rstrip(_SPACES))
            yield

    def _let_through(self, text: str) -> None:
        if text:
            self._is_at_start = False
            self._events.append(Text("content", text))
        self._source.skip(len(text))
        self._source.mark()

    def _give_back(self, reason: str) -> None:
        """What was read as a call is text."""
        self._events.append(CallFailed(self._call.index, reason))
        self._call = _OpenCall()
        text = self._source.read_since_mark()
        if text:
            self._events.append(Text("content", text))
        self._source.mark()


@dataclass
class _OpenCall:
    """The call that is being read."""

    name: str | None = None
    index: int | None = None  # given with the first of the arguments
    early: list[str] = field(default_factory=list)  # arguments that came before the name


_SPACES = " \t\r\n"


def _n_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(_SPACES))
