"""Tells a reply's thinking from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bytefloor.text.stop import n_begun

Channel = Literal["content", "reasoning"]
_State = Literal["start", "thought", "after", "answer"]


@dataclass(frozen=True)
class ReasoningTags:
    """What stands before and after a thought. `is_anywhere`: thoughts may follow text, not only begin a reply."""

    open: str
    close: str
    is_anywhere: bool


#: Only at the start: an answer that explains the tag would otherwise vanish into the thought.
THINK = ReasoningTags("<think>", "</think>", is_anywhere=False)
CHANNEL = ReasoningTags("<|channel>thought", "<channel|>", is_anywhere=True)


class ReasoningSplitter:
    """Routes a stream of text into its channels; tags vanish, also where they are cut over several pieces.

    `tags` None sends everything to content. `is_open`: the prompt already opened the thought.
    White space inside and behind a thought's tags belongs to them and vanishes too.
    """

    def __init__(self, tags: ReasoningTags | None, *, is_open: bool = False) -> None:
        self._tags = tags
        self._held = ""
        self._state: _State = "thought" if is_open else "start"
        self._is_fresh = True  # nothing of this thought has been let through yet
        # Some models repeat the opening tag that the prompt has already written.
        self._may_repeat_open = is_open

    @property
    def is_thinking(self) -> bool:
        """Whether what has come ends inside a thought."""
        return self._tags is not None and self._state == "thought"

    @property
    def n_of_closing(self) -> int:
        """How many letters of the thought's closing tag have come."""
        return n_begun(self._held, self._tags.close) if self._tags and self.is_thinking else 0

    def push(self, text: str) -> list[tuple[Channel, str]]:
        """Pieces of (channel, text) that have become certain."""
        if self._tags is None:
            return [("content", text)] if text else []
        certain = self._passed(self._tags, text)
        if certain is not None:
            return [("reasoning" if self._state == "thought" else "content", certain)] if certain else []
        self._held += text
        pieces: list[tuple[Channel, str]] = []
        steps = {"start": self._start, "thought": self._thought, "after": self._after, "answer": self._answer}
        while steps[self._state](self._tags, pieces):
            pass
        return pieces

    def _passed(self, tags: ReasoningTags, text: str) -> str | None:
        """What becomes certain where no tag is in sight, which is nearly always; None where one may be."""
        if self._state == "answer" and not self._held:
            return None if tags.is_anywhere and tags.open[0] in text else text
        if self._state != "thought" or self._is_fresh or self._may_repeat_open:
            return None
        held = self._held + text
        if tags.close[0] in held:
            return None
        certain = held.rstrip()
        self._held = held[len(certain) :]
        return certain

    def finish(self) -> list[tuple[Channel, str]]:
        """What was held back."""
        held, self._held = self._held, ""
        pieces: list[tuple[Channel, str]] = []
        if self._state == "thought":
            _add(pieces, "reasoning", held.rstrip())
        else:
            _add(pieces, "content", held)
        return pieces

    # Each state returns True when it has handed over to another, False when it needs more text.

    def _start(self, tags: ReasoningTags, pieces: list[tuple[Channel, str]]) -> bool:
        body = self._held.lstrip()
        if body.startswith(tags.open):
            self._held = body[len(tags.open) :]
            return self._to("thought")
        return False if tags.open.startswith(body) else self._to("answer")

    def _thought(self, tags: ReasoningTags, pieces: list[tuple[Channel, str]]) -> bool:
        if self._is_fresh:
            self._held = self._held.lstrip()
        if self._may_repeat_open and self._held:
            if self._held.startswith(tags.open):
                self._held = self._held[len(tags.open) :].lstrip()
            elif tags.open.startswith(self._held):
                return False
            self._may_repeat_open = False
        end = self._held.find(tags.close)
        if end >= 0:
            _add(pieces, "reasoning", self._held[:end].rstrip())
            self._held = self._held[end + len(tags.close) :]
            return self._to("after")
        certain = self._held[: len(self._held) - n_begun(self._held, tags.close)].rstrip()
        self._held = self._held[len(certain) :]
        self._is_fresh = self._is_fresh and not certain
        _add(pieces, "reasoning", certain)
        return False

    def _after(self, tags: ReasoningTags, pieces: list[tuple[Channel, str]]) -> bool:
        self._held = self._held.lstrip()
        return self._to("answer") if self._held else False

    def _answer(self, tags: ReasoningTags, pieces: list[tuple[Channel, str]]) -> bool:
        start = self._held.find(tags.open) if tags.is_anywhere else -1
        if start >= 0:
            _add(pieces, "content", self._held[:start])
            self._held = self._held[start + len(tags.open) :]
            return self._to("thought")
        cut = len(self._held) - (n_begun(self._held, tags.open) if tags.is_anywhere else 0)
        _add(pieces, "content", self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _to(self, state: _State) -> bool:
        self._state, self._is_fresh, self._may_repeat_open = state, True, False
        return True


def split_reasoning(text: str, tags: ReasoningTags, *, is_open: bool = False) -> tuple[str, str]:
    """(thought, answer) of a whole reply."""
    splitter = ReasoningSplitter(tags, is_open=is_open)
    pieces = [*splitter.push(text), *splitter.finish()]
    thought, answer = ("".join(part for at, part in pieces if at == channel) for channel in ("reasoning", "content"))
    return thought, answer


def _add(pieces: list[tuple[Channel, str]], channel: Channel, text: str) -> None:
    if text:
        pieces.append((channel, text))
