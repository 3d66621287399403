"""JSON that comes piece by piece, handed on as it comes, and never anything that would make it invalid."""

from __future__ import annotations

import json
import re

from bytefloor.text.pieces import MalformedError, Pieces, Sink, Steps, shown

MAX_DEPTH = 64
#: More digits than any number has that a program can hold; Python's own parser refuses very long ones.
MAX_NUMBER = 300
MAX_KEY = 1000

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[a-zA-Z]*")
_HEX = re.compile(r"[0-9a-fA-F]")


def read_value(source: Pieces, sink: Sink, depth: int = 0) -> Steps[None]:
    """Any value; its text goes to the sink, white space between its parts included."""
    letter = yield from source.peek()
    if letter == "{":
        yield from _read_object(source, sink, depth + 1)
    elif letter == "[":
        yield from _read_array(source, sink, depth + 1)
    elif letter == '"':
        yield from read_string(source, sink)
    elif letter and letter in "-0123456789":
        text = yield from source.word(_NUMBER_LETTERS, MAX_NUMBER, "a number")
        sink(number(text))
    else:
        word = yield from source.word(_LETTERS, 5, "a word that is no text")
        if word not in ("true", "false", "null"):
            raise MalformedError(f"expected a JSON value, found {word or shown(letter)}")
        sink(word)


def read_string(source: Pieces, sink: Sink) -> Steps[None]:
    """A string with its quotes. Bare line breaks and tabs, which models write and JSON forbids, are escaped."""
    yield from source.expect('"')
    sink('"')
    while True:
        yield from source.run(_PLAIN, sink)
        letter = yield from source.next()
        if letter == "\\":
            escape = yield from _read_escape(source)
            sink(escape)
        elif letter == '"':
            sink(letter)
            return
        elif letter:
            sink(json.dumps(letter)[1:-1])
        else:
            raise MalformedError("the answer ends inside a text")


def _read_escape(source: Pieces) -> Steps[str]:
    kind = yield from source.next()
    digits = ""
    if kind == "u":
        for _ in range(4):
            digits += yield from source.next()
            if not _HEX.fullmatch(digits[-1:]):
                raise MalformedError(f"expected four hexadecimal digits after \\u, found {digits!r}")
    elif not kind or kind not in '"\\/bfnrt':
        raise MalformedError(f"expected an escape after a backslash, found {shown(kind)}")
    return "\\" + kind + digits


def read_text(source: Pieces, most: int = MAX_KEY) -> Steps[str]:
    """A string's meaning: a key or a name."""
    parts: list[str] = []

    def add(text: str) -> None:
        parts.append(text)
        if sum(map(len, parts)) > most:
            raise MalformedError(f"a name has more than {most} letters")

    yield from read_string(source, add)
    return str(json.loads("".join(parts)))


def number(text: str) -> str:
    """The number as it is written, if JSON allows that."""
    if not _NUMBER.fullmatch(text):
        raise MalformedError(f"expected a number, found {text!r}")
    return text


def deeper(depth: int) -> None:
    """Refuses what is nested too deeply."""
    if depth > MAX_DEPTH:
        raise MalformedError(f"values are nested more than {MAX_DEPTH} deep")


def _read_object(source: Pieces, sink: Sink, depth: int) -> Steps[None]:
    deeper(depth)
    yield from source.expect("{")
    sink("{")
    yield from source.space(sink)
    letter = yield from source.peek()
    while letter != "}":
        yield from read_string(source, sink)
        yield from source.space(sink)
        yield from source.expect(":")
        sink(":")
        yield from source.space(sink)
        yield from read_value(source, sink, depth)
        letter = yield from read_separator(source, sink, "}")
    source.skip(1)
    sink("}")


def _read_array(source: Pieces, sink: Sink, depth: int) -> Steps[None]:
    deeper(depth)
    yield from source.expect("[")
    sink("[")
    yield from source.space(sink)
    letter = yield from source.peek()
    while letter != "]":
        yield from read_value(source, sink, depth)
        letter = yield from read_separator(source, sink, "]")
    source.skip(1)
    sink("]")


def read_separator(source: Pieces, sink: Sink, close: str) -> Steps[str]:
    """A comma, behind which something must follow, or `close`, which stays unread."""
    yield from source.space(sink)
    letter = yield from source.peek()
    if letter == ",":
        source.skip(1)
        sink(",")
        yield from source.space(sink)
        letter = yield from source.peek()
        if letter == close:
            raise MalformedError(f"expected a value after ',', found {letter!r}")
    elif letter != close:
        raise MalformedError(f"expected ',' or {close!r}, found {shown(letter)}")
    return letter
