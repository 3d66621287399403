"""What each token is: its text as the file spells it, its kind, the bytes it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from bytefloor.errors import RequestError

#: Ends of a turn or of a text, whatever the rest of the file says about them.
TURN_ENDERS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|end|>",
        "<|eot|>",
        "<|return|>",
        "<|call|>",
        "</s>",
    }
)

#: Added tokens that files mark as ordinary but that only a template, or the model itself, may write. HTML-like added
#: tokens (`<table>`, `<s>` in Gemma's vocabulary) are text and are not matched.
_STRUCTURE = re.compile(r"<\|[^\s<>|]{1,40}\|?>|<[^\s<>|]{1,40}\|>|</?(think|tool_call|tool_response)>")
_PADDING = re.compile(r"\[PAD\d+\]|<\|?unused_?\d+\|?>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: How a string holds a byte that is no text.
_SURROGATE = re.compile("[\ud800-\udfff]")

SPACE = "\u2581"  # how sentencepiece spells a space


class Kind(IntEnum):
    """Token types as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level BPE writes for each byte: itself where printable, else from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_LETTER_BYTES = {letter: byte for byte, letter in byte_letters().items()}


def settled_kind(text: str, kind: int) -> Kind:
    """The kind a token is treated as, where files are known to label it wrongly or too loosely."""
    if kind == 1 and text not in TURN_ENDERS:  # nearly all of them: no look-up of the enumeration's member
        return Kind.NORMAL
    if kind in (Kind.USER_DEFINED, Kind.UNUSED) and _PADDING.fullmatch(text):
        return Kind.UNUSED
    if kind == Kind.USER_DEFINED and _STRUCTURE.fullmatch(text):
        return Kind.CONTROL
    # Old converters wrote turn enders as normal tokens; `</s>` may really be text (an HTML tag).
    if kind == Kind.NORMAL and text in TURN_ENDERS and text != "</s>":
        return Kind.CONTROL
    return Kind(kind) if 1 <= kind <= 6 else Kind.NORMAL


@dataclass(frozen=True)
class Vocabulary:
    """All tokens in id order. `is_byte_level`: normal tokens spell bytes as letters; else spaces are U+2581."""

    texts: Sequence[str]
    kinds: Sequence[Kind]
    is_byte_level: bool
    control: dict[str, int] = field(init=False)
    unused: frozenset[int] = field(init=False)
    #: What `bytes_of` has found: answers are made of few tokens, again and again.
    _bytes: dict[int, bytes] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        control: dict[str, int] = {}
        for id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind == Kind.CONTROL and text:
                control.setdefault(text, id)
        object.__setattr__(self, "control", control)
        unused = frozenset(id for id, kind in enumerate(self.kinds) if kind == Kind.UNUSED)
        object.__setattr__(self, "unused", unused)

    def spellable(self) -> Iterator[tuple[int, str, Kind]]:
        """(id, text, kind) of every token whose text is text: no other can come of a text that is encoded."""
        # Hardly any file has one that is not, so that one search is enough.
        has_others = _SURROGATE.search("".join(self.texts)) is not None
        for id, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if text and not (has_others and _SURROGATE.search(text)):
                yield id, text, kind

    def missing_bytes(self) -> list[int]:
        """Bytes of ordinary text that no token spells: encoding would silently lose them.

        Control characters and planes without writing do not count; SmolLM2's vocabulary has no token for some.
        """
        if not self.is_byte_level:
            return []
        known = set(self.texts)
        ordinary = {0x09, 0x0A, 0x0D, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)}
        return [byte for letter, byte in _LETTER_BYTES.items() if letter not in known and byte in ordinary]

    def __len__(self) -> int:
        return len(self.texts)

    def text(self, id: int) -> str:
        """The token as the file spells it."""
        if not 0 <= id < len(self.texts):
            raise RequestError(f"token id {id} is not in the vocabulary: expected 0 to {len(self.texts) - 1}")
        return self.texts[id]

    def bytes_of(self, id: int) -> bytes:
        """The bytes the token stands for; a control token stands for its own spelling."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spelled(id)
        return found

    def _spelled(self, id: int) -> bytes:
        text = self.text(id)
        kind = self.kinds[id]
        if kind == Kind.BYTE and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        # Runs of spaces are tokens of their own in Gemma 3's vocabulary, which tokenizer.json spells as it does spaces.
        is_spelled = kind == Kind.USER_DEFINED and not self.is_byte_level
        if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNUSED) and not is_spelled:
            return raw_bytes(text)
        if not self.is_byte_level:
            return raw_bytes(text.replace(SPACE, " "))
        try:
            return bytes([_LETTER_BYTES[letter] for letter in text])
        except KeyError:  # an added token that was not marked as one: its text is what it says
            return raw_bytes(text)


def raw_bytes(text: str) -> bytes:
    """A token's bytes as its file has them, text or not."""
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # a half of a surrogate pair, which JSON can spell
        return text.encode("utf-8", errors="replace")


class ControlFinder:
    """Cuts text at control tokens: leftmost first, and the longest of those that start at the same place."""

    def __init__(self, control: dict[str, int]) -> None:
        self._control = control
        self._lengths: dict[str, list[int]] = {}
        for text in control:
            self._lengths.setdefault(text[0], []).append(len(text))
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        starts = "".join(map(re.escape, self._lengths))
        # A search for the first letter, then look-ups: Gemma has 6,000 control tokens, too many to try one by one.
        self._start = re.compile(f"[{starts}]") if starts else None

    def find(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of every control token in the text."""
        found: list[tuple[int, int]] = []
        if self._start is None:
            return found
        position = 0
        while match := self._start.search(text, position):
            start = match.start()
            length = self._length_at(text, start)
            if length:
                found.append((start, start + length))
            position = start + (length or 1)
        return found

    def cut(self, text: str) -> list[int | str]:
        """The text as pieces: control tokens as ids, what lies between them as text (never empty)."""
        pieces: list[int | str] = []
        position = 0
        for start, end in self.find(text):
            if start > position:
                pieces.append(text[position:start])
            pieces.append(self._control[text[start:end]])
            position = end
        if position < len(text):
            pieces.append(text[position:])
        return pieces

    def _length_at(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._control:
                return length
        return 0
