"""How long an answer may think: after that many tokens the thought is closed for it."""

from __future__ import annotations

from collections.abc import Callable

from bytefloor.errors import RequestError
from bytefloor.text.reasoning import ReasoningSplitter, ReasoningTags
from bytefloor.text.stream import StreamDecoder


class ReasoningBudget:
    """Counts an answer's tokens of thought and says when to close it.

    Every token of the answer is pushed, forced ones too. Where `push` gives tokens, the engine takes them for the
    next ones instead of sampling. n_tokens: tokens within thoughts, all of an answer's thoughts together, their
    opening tags not counted. A thought is not cut inside a character, which may take up to three tokens more.
    stream, splitter: fresh ones for this answer. encode: text to tokens, control tokens parsed.
    """

    def __init__(
        self,
        n_tokens: int,
        tags: ReasoningTags,
        stream: StreamDecoder,
        splitter: ReasoningSplitter,
        encode: Callable[[str], list[int]],
    ) -> None:
        if n_tokens < 0:
            raise RequestError(f"the thinking budget is {n_tokens} tokens, expected 0 or more")
        self.n_used = 0
        self._n_tokens = n_tokens
        self._tags = tags
        self._stream = stream
        self._splitter = splitter
        self._encode = encode
        self._n_forced = 0  # tokens that were given and not pushed yet
        self._ends_line = True

    def start(self) -> list[int] | None:
        """Tokens to begin the answer with, if the prompt opened a thought that may have no tokens."""
        return self._closing()

    def push(self, token: int) -> list[int] | None:
        """Takes the answer's next token; gives tokens that must follow it, or None."""
        was_thinking = self._splitter.is_thinking
        text = self._stream.push(token)
        self._splitter.push(text)
        if self._n_forced:
            self._n_forced -= 1
            return None
        if was_thinking and self._splitter.is_thinking:
            self.n_used += 1
        if text:
            self._ends_line = text.endswith("\n")
        return self._closing()

    def _closing(self) -> list[int] | None:
        is_spent = self._splitter.is_thinking and self.n_used >= self._n_tokens
        if not is_spent or self._stream.is_inside_character:
            return None
        n_begun = self._splitter.n_of_closing
        # The model may be about to close the thought itself; then only the rest of its tag is missing.
        text = self._tags.close[n_begun:] if n_begun else ("" if self._ends_line else "\n") + self._tags.close
        forced = self._encode(text)
        self._n_forced = len(forced)
        return forced
