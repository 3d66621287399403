"""Decoding a reply while it is being made: never half a character, never anything twice."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class Bytes(Protocol):
    """What decoding needs to know of a tokenizer."""

    @property
    def control_ids(self) -> frozenset[int]: ...

    @property
    def add_space_prefix(self) -> bool: ...

    def token_bytes(self, id: int) -> bytes: ...


class Walker:
    """The bytes each token adds to a text. Its only memory is whether a text starts here."""

    def __init__(self, tokenizer: Bytes, keep_special: bool | Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._keep = keep_special
        self._is_start = True

    def step(self, id: int) -> bytes:
        """Bytes of the next token."""
        if id in self._tokenizer.control_ids:
            # Encoding puts its extra space after each control token, so here another text starts.
            self._is_start = True
            return self._tokenizer.token_bytes(id) if self._is_kept(id) else b""
        data = self._tokenizer.token_bytes(id)
        if self._is_start and data:
            self._is_start = False
            if self._tokenizer.add_space_prefix and data.startswith(b" "):
                return data[1:]
        return data

    def _is_kept(self, id: int) -> bool:
        return self._keep if isinstance(self._keep, bool) else id in self._keep


class StreamDecoder:
    """Pieces of text, token by token; joined, they equal decoding all tokens at once.

    Bytes of an unfinished character wait here, at most three of them, so a token costs the same however long the
    reply is. `finish` gives what is left, broken characters replaced.
    """

    def __init__(
        self, tokenizer: Bytes, prompt_ids: Sequence[int] = (), keep_special: bool | Collection[int] = False
    ) -> None:
        self._walker = Walker(tokenizer, keep_special)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.is_inside_character = False  # bytes of an unfinished character wait
        # Only whether the reply goes on in the middle of a text matters, and the last token knows that.
        for id in prompt_ids[-1:]:
            self._walker.step(id)

    def push(self, id: int) -> str:
        """The text that has become certain with this token."""
        data = self._walker.step(id)
        if data.isascii() and not self.is_inside_character:
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self.is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What was held back."""
        self.is_inside_character = False
        return self._decoder.decode(b"", final=True)
