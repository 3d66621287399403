"""How each family of models writes its tool calls, and parsers for it.

Which format a model has is read off its template, which tells the model how to write calls; an answer's text decides
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bytefloor.text import json_pieces
from bytefloor.text.gemma_calls import CLOSE as GEMMA_CLOSE
from bytefloor.text.gemma_calls import OPEN as GEMMA_OPEN
from bytefloor.text.gemma_calls import QUOTE as GEMMA_QUOTE
from bytefloor.text.gemma_calls import read_gemma_call
from bytefloor.text.pieces import SPACES, MalformedError, Pieces, Steps, ignore, shown


class Calls(Protocol):
    """Where a parser reports what it reads. Each may raise MalformedError."""

    def named(self, name: str) -> None:
        """The call's name is known."""

    def write(self, text: str) -> None:
        """More of the arguments' JSON text. It may come before the name."""

    def end(self, *, may_lack_arguments: bool = False) -> None:
        """The call is whole."""


@dataclass(frozen=True)
class CallFormat:
    """One family's way to write calls.

    opens: texts that begin calls anywhere in an answer. is_bare: an answer may also begin with a call's "{" itself.
    tags: all texts of the format that may be control tokens. read: the parser for what follows an opening, up to
    and including the closing. n_a_turn: how many calls the template shows in one turn; None is any number.
    """

    name: str
    opens: tuple[str, ...]
    is_bare: bool
    tags: tuple[str, ...]
    read: Callable[[Pieces, Calls], Steps[None]]
    n_a_turn: int | None = None


_ARGUMENTS = ("arguments", "parameters")
_LLAMA_GAP = re.compile(r"[ \t\r\n;]*")


def _read_hermes(source: Pieces, calls: Calls) -> Steps[None]:
    """One call, several one after another, or a list of them, and the closing tag."""
    yield from source.space(ignore)
    is_list = yield from source.accepts("[")
    while True:
        yield from source.space(ignore)
        yield from _read_json_call(source, calls, may_lack_arguments=True)
        if is_list:
            yield from source.space(ignore)
            letter = yield from json_pieces.read_separator(source, ignore, "]")
            if letter == "]":
                source.skip(1)
                break
        elif not (yield from _follows(source, "{")):
            break
    yield from source.accepts("</tool_call>")


def _read_llama(source: Pieces, calls: Calls) -> Steps[None]:
    """One call, or several with semicolons or line breaks between them; there is no closing."""
    while True:
        yield from source.space(ignore)
        yield from _read_json_call(source, calls, may_lack_arguments=False)
        if not (yield from _follows(source, "{", _LLAMA_GAP)):
            return


def _read_json_call(source: Pieces, calls: Calls, *, may_lack_arguments: bool) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`, in any order; "parameters" is another word for "arguments"."""
    yield from source.expect("{")
    seen: set[str] = set()
    yield from source.space(ignore)
    letter = yield from source.peek()
    while letter != "}":
        key = yield from json_pieces.read_text(source)
        yield from source.space(ignore)
        yield from source.expect(":")
        yield from source.space(ignore)
        settled = "arguments" if key in _ARGUMENTS else key
        if settled in seen:
            raise MalformedError(f"a call has two values for {settled!r}")
        seen.add(settled)
        yield from _read_member(source, calls, settled)
        letter = yield from json_pieces.read_separator(source, ignore, "}")
    source.skip(1)
    calls.end(may_lack_arguments=may_lack_arguments)


def _read_member(source: Pieces, calls: Calls, key: str) -> Steps[None]:
    if key == "name":
        name = yield from json_pieces.read_text(source)
        calls.named(name)
    elif key == "arguments":
        letter = yield from source.peek()
        if letter != "{":
            raise MalformedError(f"expected the arguments as an object, found {shown(letter)}")
        yield from json_pieces.read_value(source, calls.write)
    elif key in ("id", "type"):
        yield from json_pieces.read_value(source, ignore)
    else:
        raise MalformedError(f"a call has the unknown key {key!r}")


def _follows(source: Pieces, wanted: str, between: re.Pattern[str] = SPACES) -> Steps[bool]:
    """Whether the letter `wanted` follows; what lies before it is read then, the letter itself is not."""
    while True:
        found = between.match(source.rest)
        n_between = found.end() if found else 0
        following = source.rest[n_between : n_between + 1]
        if following or source.is_over:
            if following == wanted:
                source.skip(n_between)
            return following == wanted
        yield


HERMES = CallFormat("Hermes", ("<tool_call>",), False, ("<tool_call>", "</tool_call>"), _read_hermes)
LLAMA3 = CallFormat("Llama 3", ("<|python_tag|>",), True, ("<|python_tag|>",), _read_llama, n_a_turn=1)
GEMMA4 = CallFormat("Gemma 4", (GEMMA_OPEN,), False, (GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE), read_gemma_call)

#: Formats that share a tag with one of the above and write something else inside it.
_OTHERS = ("<function=", "<arg_key>", "<parameter=")


def format_of(source: str) -> CallFormat | None:
    """The format that a template's source tells its model to use; None where it is none of those known."""
    if any(mark in source for mark in _OTHERS):
        return None
    if GEMMA_OPEN in source:
        return GEMMA4
    if "<tool_call>" in source:
        return HERMES
    return LLAMA3 if "<|start_header_id|>" in source and '"parameters": ' in source else None
