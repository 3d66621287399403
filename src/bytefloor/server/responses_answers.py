"""What /v1/responses gives: a response whole, or the events that tell it item by item. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from bytefloor.engine.request import Finish
from bytefloor.server.answers import Event, Json, facts_of, timings
from bytefloor.server.asked import Asked
from bytefloor.server.event_stream import COMMENT, events
from bytefloor.server.ids import new_id
from bytefloor.server.refusal import Refusal
from bytefloor.text.reasoning import Channel
from bytefloor.text.reply import CallArguments, CallBegin, CallEnd, CallFailed, Text
from bytefloor.text.reply import Event as Piece

_KINDS: dict[Channel, str] = {"content": "message", "reasoning": "reasoning"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass
class _Item:
    """An item of the output. call: what a call has beside its arguments."""

    kind: str
    call: Json = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    status: str = "in_progress"

    def __post_init__(self) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{new_id(12)}"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> Json:
        """Of a message or a thought, which have one each."""
        beside: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PARTS[self.kind], "text": text, **beside}

    def shown(self, is_begun: bool = False) -> Json:
        """is_begun: as a stream begins it, without what is in it."""
        head = {"id": self.id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return {**head, **self.call, "arguments": "" if is_begun else self.text}
        content = [] if is_begun else [self.part(self.text)]
        return {**head, **({"role": "assistant"} if self.kind == "message" else {"summary": []}), "content": content}


class ResponseAnswer:
    """The objects of one request: `whole` after all events, or `opening`, `chunks` of each event, `closing`.

    Each run of pieces of one kind is an item, so that a stream and a whole response have the same ones. A call that
    turns out to be none stays, as incomplete, and what the model wrote follows as a message.

    repeated: fields of the body that every response has.
    """

    quiet = COMMENT
    end = b""

    def __init__(self, asked: Asked, repeated: Json, model: str) -> None:
        self.asked = asked
        self._items: list[_Item] = []
        self._notes: list[str] = []
        self._finish: Finish | None = None
        self._queue_s = 0.0
        self._n_events = 0
        self.id = f"resp_{new_id(16)}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model, **repeated}

    def take(self, event: Event) -> None:
        """Note an event."""
        self.chunks(event)

    def opening(self) -> list[Json]:
        """The response before any token."""
        return [self._told(name, response=self._response("in_progress")) for name in ("created", "in_progress")]

    def chunks(self, event: Event) -> list[Json]:
        """What an event adds, and with the finish the end of the last item."""
        told = [each for piece in event.pieces for each in self._piece(piece)]
        if event.finish is None:
            return told
        self._finish, self._queue_s = event.finish, event.queue_s
        return told + self._end("completed" if event.finish.reason == "stop" else "incomplete")

    def encoded(self, event: Event) -> bytes:
        """The same as bytes."""
        return events(self.chunks(event))

    def closing(self) -> list[Json]:
        """The response as it is now."""
        whole = self.whole()
        return [self._told(whole["status"], response=whole)]

    def beside(self, value: Json) -> Json:
        """An event that is no part of the answer. No field of the body asks for one."""
        return self._told("progress", **value)

    def failed(self, refusal: Refusal) -> list[Json]:
        """The last event of a stream that cannot go on, after the end of an item that is open."""
        error = {"code": "server_error", "message": refusal.message}
        ended = self._end("incomplete")
        return [*ended, self._told("failed", response={**self._response("failed"), "error": error})]

    def whole(self) -> Json:
        """The response in one piece."""
        finish = self._finish
        assert finish is not None
        if finish.reason == "stop":
            return self._response("completed")
        # OpenAI knows no word for an answer that was cut because it repeats itself; `finish_detail` says it.
        return {**self._response("incomplete"), "incomplete_details": {"reason": "max_output_tokens"}}

    def _response(self, status: str) -> Json:
        output = [item.shown() for item in self._items]
        head = {**self._head, "status": status, "error": None, "incomplete_details": None, "output": output}
        finish = self._finish
        if finish is None:
            return {**head, "usage": None}
        usage = {
            "input_tokens": finish.n_prompt,
            "input_tokens_details": {"cached_tokens": finish.n_cached},
            "output_tokens": finish.n_generated,
            "output_tokens_details": {"reasoning_tokens": finish.n_thought},
            "total_tokens": finish.n_prompt + finish.n_generated,
        }
        detail = "; ".join((finish.detail, *self._notes))
        return {**head, "usage": usage, "finish_detail": detail, "timings": timings([finish], self._queue_s)}

    @property
    def facts(self) -> Json:
        """For the log."""
        return facts_of(self.id, self._finish, self._queue_s)

    # Items ------------------------------------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> list[Json]:
        match piece:
            case Text(channel, text):
                kind = _KINDS[channel]
                begun = [] if self._is_open(kind) else [*self._end("completed"), *self._begin(_Item(kind))]
                return [*begun, self._add(text)]
            case CallBegin(_, id, name):
                item = _Item("function_call", {"call_id": id, "name": name})
                return [*self._end("completed"), *self._begin(item)]
            case CallArguments(_, text):
                return [self._add(text)]
            case CallEnd():
                return self._end("completed")
            case CallFailed(index, reason):
                self._notes.append(reason)
                return [] if index is None else self._end("incomplete")

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and (self._items[-1].kind, self._items[-1].status) == (kind, "in_progress")

    def _begin(self, item: _Item) -> list[Json]:
        self._items.append(item)
        told = [self._told("output_item.added", output_index=self._at, item=item.shown(is_begun=True))]
        if item.kind != "function_call":
            told.append(self._of_item("content_part.added", part=item.part("")))
        return told

    def _add(self, text: str) -> Json:
        item = self._items[-1]
        item.texts.append(text)
        beside: Json = {"logprobs": []} if item.kind == "message" else {}
        return self._of_item(f"{_names(item)}.delta", delta=text, **beside)

    def _end(self, status: str) -> list[Json]:
        """Of the last item, where it is open."""
        if not self._items or self._items[-1].status != "in_progress":
            return []
        item = self._items[-1]
        item.status = status
        if item.kind == "function_call":
            told = [self._of_item(f"{_names(item)}.done", name=item.call["name"], arguments=item.text)]
        else:
            beside: Json = {"logprobs": []} if item.kind == "message" else {}
            told = [self._of_item(f"{_names(item)}.done", text=item.text, **beside)]
            told.append(self._of_item("content_part.done", part=item.part(item.text)))
        return [*told, self._told("output_item.done", output_index=self._at, item=item.shown())]

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _of_item(self, kind: str, **fields: Any) -> Json:
        """An event about what is in the last item."""
        item = self._items[-1]
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return self._told(kind, item_id=item.id, output_index=self._at, **place, **fields)

    def _told(self, kind: str, **fields: Any) -> Json:
        """An event, numbered."""
        self._n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_events - 1, **fields}


def _names(item: _Item) -> str:
    return "function_call_arguments" if item.kind == "function_call" else _PARTS[item.kind]
