"""Gemma 4's tool calls: `call:name{key:value,...}` between two tags, keys bare, texts between quotation tokens.

Its own way to write values becomes JSON here, as it comes.
"""

from __future__ import annotations

import json
import re
from typing import Protocol

from bytefloor.text import json_pieces
from bytefloor.text.pieces import MalformedError, Pieces, Sink, Steps, ignore, shown
from bytefloor.text.stop import n_begun

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_KEY = re.compile(r'[^:{}\[\],"<>\r\n\t]*')
_SCALAR = re.compile(r"[^:{}\[\],\"<>\s]*")
#: None is how the template itself prints a missing value.
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


class _Calls(Protocol):
    def named(self, name: str) -> None: ...

    def write(self, text: str) -> None: ...

    def end(self) -> None: ...


def read_gemma_call(source: Pieces, calls: _Calls) -> Steps[None]:
    """What follows the opening tag, up to and including the closing one."""
    yield from source.space(ignore)
    yield from source.expect("call:")
    name = yield from source.word(_NAME, 128, "a name")
    calls.named(name)
    yield from source.space(ignore)
    yield from _read_object(source, calls.write, 1)
    calls.end()
    yield from source.accepts(CLOSE)


def _read_value(source: Pieces, sink: Sink, depth: int) -> Steps[None]:
    letter = yield from source.peek()
    if letter == "<":
        yield from _read_text(source, sink)
    elif letter == "{":
        yield from _read_object(source, sink, depth + 1)
    elif letter == "[":
        yield from _read_array(source, sink, depth + 1)
    else:
        word = yield from source.word(_SCALAR, json_pieces.MAX_NUMBER, "a number")
        if not word:
            raise MalformedError(f"expected a value, found {shown(letter)}")
        sink(_WORDS[word] if word in _WORDS else json_pieces.number(word))


def _read_text(source: Pieces, sink: Sink) -> Steps[None]:
    """A text between quotation tokens, which knows no escapes."""
    yield from source.expect(QUOTE)
    sink('"')
    while True:
        rest = source.rest
        end = rest.find(QUOTE)
        certain = rest[: end if end >= 0 else len(rest) - n_begun(rest, QUOTE)]
        if certain:
            sink(json.dumps(certain, ensure_ascii=False)[1:-1])
            source.skip(len(certain))
        if end >= 0:
            source.skip(len(QUOTE))
            sink('"')
            return
        if source.is_over:
            raise MalformedError("the answer ends inside a text")
        yield


def _read_object(source: Pieces, sink: Sink, depth: int) -> Steps[None]:
    json_pieces.deeper(depth)
    yield from source.expect("{")
    sink("{")
    yield from source.space(sink)
    letter = yield from source.peek()
    while letter != "}":
        if letter == "<":
            yield from _read_text(source, sink)
        else:
            key = yield from source.word(_KEY, json_pieces.MAX_KEY, "a name")
            if not key:
                raise MalformedError(f"expected an argument's name, found {shown(letter)}")
            sink(json.dumps(key.rstrip(" "), ensure_ascii=False))
        yield from source.space(sink)
        yield from source.expect(":")
        sink(":")
        yield from source.space(sink)
        yield from _read_value(source, sink, depth)
        letter = yield from json_pieces.read_separator(source, sink, "}")
    source.skip(1)
    sink("}")


def _read_array(source: Pieces, sink: Sink, depth: int) -> Steps[None]:
    json_pieces.deeper(depth)
    yield from source.expect("[")
    sink("[")
    yield from source.space(sink)
    letter = yield from source.peek()
    while letter != "]":
        yield from _read_value(source, sink, depth)
        letter = yield from json_pieces.read_separator(source, sink, "]")
    source.skip(1)
    sink("]")
