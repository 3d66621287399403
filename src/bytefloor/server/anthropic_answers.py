"""What Anthropic's clients get for a request: a message, or the events that tell it block by block. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from bytefloor.engine.request import Finish
from bytefloor.server.answers import Event, Json, facts_of
from bytefloor.server.asked import Asked
from bytefloor.server.event_stream import HOLE, around, events
from bytefloor.server.ids import new_id
from bytefloor.text.reasoning import Channel
from bytefloor.text.reply import CallArguments, CallBegin, CallEnd, CallFailed, Text
from bytefloor.text.reply import Event as Piece

_KINDS: dict[Channel, str] = {"content": "text", "reasoning": "thinking"}


@dataclass
class _Block:
    """A block so far. head: what a call has besides its input. around: the bytes of a delta around its text."""

    kind: str
    head: Json = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    around: tuple[bytes, bytes] | None = None

    def begun(self) -> Json:
        """As a stream begins it: without its content."""
        return self._with("" if self.kind != "tool_use" else msgspec.Raw(b"{}"))

    def whole(self) -> Json:
        """With all of it. A call's input stays the very text that a stream tells."""
        text = "".join(self.parts)
        return self._with(text if self.kind != "tool_use" else msgspec.Raw(text.encode()))

    def delta(self, text: str | msgspec.Raw) -> Json:
        """More of it."""
        kind, name = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[self.kind]
        return {"type": kind, name: text}

    def _with(self, content: Any) -> Json:
        if self.kind == "tool_use":
            return {"type": self.kind, **self.head, "input": content}
        signature = {"signature": ""} if self.kind == "thinking" else {}  # nothing here signs thoughts
        return {"type": self.kind, self.kind: content, **signature}


class MessageAnswer:
    """The objects of one request: `whole` after all events, or `opening`, `chunks` of each event, `closing`.

    A call is told when it is whole, since what begins as one may turn out to be text, and blocks cannot be taken back.
    """

    quiet = events([{"type": "ping"}])
    end = b""

    def __init__(self, asked: Asked, model: str) -> None:
        self.asked = asked
        (self._choice,) = asked.choices
        self._blocks: list[_Block] = []
        self._is_open = False
        self._calls: dict[int, tuple[CallBegin, list[str]]] = {}
        self._notes: list[str] = []
        self._finish: Finish | None = None
        self._queue_s = 0.0
        self.id = f"msg_{new_id(12)}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}

    def take(self, event: Event) -> None:
        """Note an event."""
        self.chunks(event)

    def opening(self) -> list[Json]:
        """The message before any token. How much of the prompt is in the cache is not known yet."""
        n_prompt = len(self._choice.request.prompt_ids)
        usage = {"input_tokens": n_prompt, "cache_read_input_tokens": None, "output_tokens": 0}
        message: Json = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def chunks(self, event: Event) -> list[Json]:
        """The event as events of the stream; none for what could not be seen."""
        told = [each for piece in event.pieces for each in self._told(piece)]
        if event.finish is not None:
            self._finish, self._queue_s = event.finish, event.queue_s
            told += self._closed()
        return told

    def encoded(self, event: Event) -> bytes:
        """The same as bytes; more of a block's text is put into those that are there."""
        block = self._blocks[-1] if self._is_open else None
        if block is None or event.finish is not None or len(event.pieces) != 1:
            return events(self.chunks(event))
        (piece,) = event.pieces
        if not isinstance(piece, Text) or _KINDS[piece.channel] != block.kind:
            return events(self.chunks(event))
        block.parts.append(piece.text)
        block.around = block.around or around(self._delta(HOLE))
        return block.around[0] + msgspec.json.encode(piece.text) + block.around[1]

    def closing(self) -> list[Json]:
        """How it ended, and what it took."""
        return [{"type": "message_delta", "delta": self._ending(), "usage": self.usage()}, {"type": "message_stop"}]

    def beside(self, value: Json) -> Json:
        """A ping that says more, for what is no part of the answer."""
        return {"type": "ping", **value}

    def whole(self) -> Json:
        """The message in one piece."""
        content = [block.whole() for block in self._blocks]
        return {**self._head, "content": content, **self._ending(), "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens. input_tokens are those that were computed: with the cached ones they are the prompt."""
        finish = self._finish
        n_prompt, n_cached = (finish.n_prompt, finish.n_cached) if finish else (0, 0)
        return {
            "input_tokens": n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": finish.n_generated if finish else 0,
            "output_tokens_details": {"thinking_tokens": finish.n_thought if finish else 0},
        }

    @property
    def facts(self) -> Json:
        """For the log."""
        return facts_of(self.id, self._finish, self._queue_s)

    def _told(self, piece: Piece) -> list[Json]:
        match piece:
            case Text(channel, text):
                kind = _KINDS[channel]
                is_more = self._is_open and self._blocks[-1].kind == kind
                return [*([] if is_more else self._began(_Block(kind))), self._more(text)]
            case CallBegin(index):
                self._calls[index] = (piece, [])
            case CallArguments(index, text):
                self._calls[index][1].append(text)
            case CallEnd(index):
                begin, parts = self._calls.pop(index)
                head = {"id": begin.id, "name": begin.name}
                return [*self._began(_Block("tool_use", head)), self._more("".join(parts)), *self._closed()]
            case CallFailed(_, reason):
                self._notes.append(reason)
        return []

    def _began(self, block: _Block) -> list[Json]:
        closed = self._closed()
        self._blocks.append(block)
        self._is_open = True
        return [*closed, {"type": "content_block_start", "index": self._place, "content_block": block.begun()}]

    def _more(self, text: str) -> Json:
        self._blocks[-1].parts.append(text)
        return self._delta(text)

    def _delta(self, text: str | msgspec.Raw) -> Json:
        return {"type": "content_block_delta", "index": self._place, "delta": self._blocks[-1].delta(text)}

    def _closed(self) -> list[Json]:
        was_open, self._is_open = self._is_open, False
        return [{"type": "content_block_stop", "index": self._place}] if was_open else []

    @property
    def _place(self) -> int:
        return len(self._blocks) - 1

    def _ending(self) -> Json:
        finish = self._finish
        assert finish is not None, "the answer has not ended"
        has_calls = any(block.kind == "tool_use" for block in self._blocks)
        detail = "; ".join((finish.detail, *self._notes))
        reason = _stop_reason(finish, self._choice.request.max_tokens, has_calls)
        return {"stop_reason": reason, "stop_sequence": finish.stop, "finish_detail": detail}


def _stop_reason(finish: Finish, max_tokens: int | None, has_calls: bool) -> str:
    """Anthropic knows no word for an answer that was cut because it repeats itself; `finish_detail` says it."""
    if finish.reason == "stop":
        return "stop_sequence" if finish.stop is not None else "tool_use" if has_calls else "end_turn"
    if finish.reason == "length" and finish.n_generated != max_tokens:
        return "model_context_window_exceeded"
    return "max_tokens"
