"""What a grammar allows next in one answer, which may have to think first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from llguidance import LLMatcher

from bytefloor.errors import RequestError
from bytefloor.text.guide import Bools
from bytefloor.text.tokenizer import Tokenizer

#: start: a thought may open or the answer begin; opening: inside the tag; gap: just behind the thought.
_State = Literal["start", "opening", "thought", "gap", "answer"]


@dataclass(frozen=True)
class Thought:
    """A thought before the answer. open: the tokens of its opening tag, the first a control token. close: the token
    behind which the answer begins. is_open: the prompt has opened it, and the answer cannot do without."""

    open: tuple[int, ...]
    close: int
    is_open: bool


class Constraint:
    """One answer's place in its grammar: `allowed`, then `accept`, by turns. It depends on the tokens alone.

    In a thought everything goes but an end of the reply; its tags are forced and closed by the model. White space
    right behind it belongs to the thought, as for ReasoningSplitter, and is no part of what the grammar sees.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: Tokenizer, thought: Thought | None, prompt_ids: Sequence[int]
    ) -> None:
        self._matcher, self._tokenizer, self._thought = matcher, tokenizer, thought
        self._guide = tokenizer.guide
        self._state: _State = "answer" if thought is None else "thought" if thought.is_open else "start"
        self._n_opened = 0
        self._bits: bytes | None = None
        # Where a text starts, decoding drops a leading space.
        self._is_text_start = self._guide.without_space is not None
        for id in prompt_ids[-1:]:
            self._pass(id)

    @property
    def is_complete(self) -> bool:
        """The answer is whole and nothing can follow."""
        return self._state == "answer" and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is open, in which any token goes."""
        return self._state == "thought"

    def prepare(self) -> None:
        """Compute the next mask now, so that `allowed` does not have to: while a device is busy."""
        if self._bits is None and self._state in ("start", "gap", "answer") and not self._matcher.is_error():
            self._bits = self._matcher.compute_bitmask()

    def allowed(self) -> Bools:
        """[n_tokens]: which tokens may come next. RequestError where the grammar takes too much work to follow."""
        guide, thought = self._guide, self._thought
        if self._state == "thought":
            return ~guide.is_end
        if self._state == "opening" and thought is not None:
            return _only(thought.open[self._n_opened], len(guide.is_end))
        self.prepare()
        if self._matcher.is_error() or self._bits is None:
            # The rest of the message is llguidance's own state.
            reason = " ".join(self._matcher.get_error().split("<state>")[0].split())
            raise RequestError(f"the grammar cannot be followed: {reason[:300]}")
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=len(guide.is_end), bitorder="little")
        mask = bits.view(np.bool_)
        if self._is_text_start and guide.without_space is not None:
            mask = mask[guide.without_space] & (guide.without_space >= 0)
        if self._state == "gap":
            mask = mask | guide.is_white
        if self._state == "start" and thought is not None:
            mask = mask | _only(thought.open[0], len(mask))
        return mask

    def accept(self, id: int) -> None:
        """Take in the next token. RequestError for one that was not allowed."""
        thought = self._thought
        if self._state in ("start", "opening") and thought is not None and id == thought.open[self._n_opened]:
            self._n_opened += 1
            self._state = "opening" if self._n_opened < len(thought.open) else "thought"
        elif self._state == "thought" and thought is not None:
            self._state = "gap" if id == thought.close else "thought"
        else:
            self._advance(id)
        self._pass(id)

    def _advance(self, id: int) -> None:
        if self._state == "gap" and self._guide.is_white[id]:
            # Once: a model that writes nothing but white space would go on for ever.
            self._state = "answer"
            return
        self._state, self._bits = "answer", None
        seen = id
        if self._is_text_start and self._guide.without_space is not None:
            seen = int(self._guide.without_space[id])
        if seen < 0 or not self._matcher.consume_token(seen):
            raise RequestError(f"token {id} ({self._tokenizer.token_text(id)!r}) is not what the grammar allows here")

    def _pass(self, id: int) -> None:
        """The rule of stream.Walker: a control token ends a text, and behind it another starts."""
        if self._guide.without_space is None:
            return
        if id in self._tokenizer.control_ids:
            self._is_text_start = True
        elif self._tokenizer.token_bytes(id):
            self._is_text_start = False


def _only(id: int, n_tokens: int) -> Bools:
    mask = np.zeros(n_tokens, np.bool_)
    mask[id] = True
    return mask
