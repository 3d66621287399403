"""How long an answer may think: after that many tokens the thought is closed for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bytefloor.errors import RequestError
from bytefloor.text.reasoning import ReasoningSplitter, ReasoningTags
from bytefloor.text.stream import StreamDecoder
from bytefloor.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Thinking:
    """How answers to a prompt think. is_open: the prompt has opened the thought.

    n_most: tokens within thoughts, all of an answer's thoughts together; None: as many as the model likes.
    """

    tags: ReasoningTags
    is_open: bool
    tokenizer: Tokenizer = field(repr=False)
    n_most: int | None = None

    def __post_init__(self) -> None:
        if self.n_most is not None and self.n_most < 0:
            raise RequestError(f"the thinking budget is {self.n_most} tokens, expected 0 or more")

    def start(self, stream: StreamDecoder) -> ReasoningBudget:
        """For one answer. stream: what decodes it, the tags' control tokens kept."""
        return ReasoningBudget(self, stream)


class ReasoningBudget:
    """Counts an answer's tokens of thought and says when to close it.

    The text of each token of the answer is pushed, forced ones included. Where `push` gives tokens, the engine takes
    them for the next ones instead of sampling. Neither tags nor forced tokens count. A thought is not cut inside a
    character, which may take up to three tokens more.
    """

    def __init__(self, thinking: Thinking, stream: StreamDecoder) -> None:
        self.n_used = 0
        self._thinking = thinking
        self._stream = stream
        self._splitter = ReasoningSplitter(thinking.tags, is_open=thinking.is_open)
        self._n_forced = 0  # tokens that were given and not pushed yet
        self._ends_line = True

    def start(self) -> list[int]:
        """Tokens to begin the answer with, if the prompt opened a thought that may have no tokens."""
        return self._closing()

    def push(self, text: str) -> list[int]:
        """Takes what the answer's next token added to its text; gives tokens that must follow it, if any."""
        was_thinking = self._splitter.is_thinking
        self._splitter.push(text)
        if self._n_forced:
            self._n_forced -= 1
            return []
        is_thinking = self._splitter.is_thinking
        if was_thinking and is_thinking:
            self.n_used += 1
        if text:
            self._ends_line = text.endswith("\n")
        return self._closing() if is_thinking else []

    def _closing(self) -> list[int]:
        thinking, splitter = self._thinking, self._splitter
        is_spent = splitter.is_thinking and thinking.n_most is not None and self.n_used >= thinking.n_most
        if not is_spent or self._stream.is_inside_character:
            return []
        n_begun, close = splitter.n_of_closing, thinking.tags.close
        # The model may be about to close the thought itself; then only the rest of its tag is missing.
        text = close[n_begun:] if n_begun else ("" if self._ends_line else "\n") + close
        forced = thinking.tokenizer.encode(text, parse_special=True, add_bos=False)
        self._n_forced = len(forced)
        return forced
