"""What OpenAI's clients get for a request: whole, or in chunks that join to the same. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bytefloor.engine.request import Finish
from bytefloor.engine.sampler import Sampled
from bytefloor.server.asked import Asked
from bytefloor.server.event_stream import COMMENT, DONE, HOLE, around, events
from bytefloor.server.floor import Floor
from bytefloor.server.ids import new_id
from bytefloor.text.reasoning import Channel
from bytefloor.text.reply import CallArguments, CallBegin, Text, collected
from bytefloor.text.reply import Event as Piece
from bytefloor.text.tokenizer import Tokenizer

Json = dict[str, Any]
_FIELDS: dict[Channel, str] = {"content": "content", "reasoning": "reasoning_content"}
_REASONS = {"stop": "stop", "length": "length", "loop": "length"}
"""OpenAI knows no word for an answer that was cut because it repeats itself; `finish_detail` says it."""


# Not frozen: there is one for every token, and frozen ones take three times as long to make.
@dataclass(slots=True)
class Event:
    """What one step made known of a choice, named by its place. queue_s: with the finish, how long it had waited."""

    choice: int
    pieces: Sequence[Piece]
    sampled: Sampled | None
    finish: Finish | None = None
    queue_s: float = 0.0


@dataclass
class _Record:
    """A choice so far. n_characters: of the tokens' own text, for `text_offset`."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    n_characters: int = 0
    finish: Finish | None = None
    queue_s: float = 0.0


class Told(Protocol):
    """An answer as some API tells it: `whole` after all events, or `opening`, `chunks` of each event, `closing`.

    encoded: `chunks` in the bytes of a stream, instead of them.
    beside: what is no part of the answer. quiet: what a stream sends while nothing happens; end: what it sends at last.
    facts: for the log.
    """

    asked: Asked
    quiet: bytes
    end: bytes

    @property
    def facts(self) -> Json: ...
    def take(self, event: Event) -> object: ...
    def whole(self) -> Json: ...
    def opening(self) -> list[Json]: ...
    def chunks(self, event: Event) -> list[Json]: ...
    def encoded(self, event: Event) -> bytes: ...
    def closing(self) -> list[Json]: ...
    def beside(self, value: Json) -> Json: ...


class Answer:
    """OpenAI's objects of one request."""

    quiet = COMMENT
    end = DONE

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer, floor: Floor | None = None) -> None:
        self.asked = asked
        self._floor = floor
        self._is_chat = asked.kind == "chat"
        self._tokenizer = tokenizer
        self._records = [_Record() for _ in asked.choices]
        self._around: dict[tuple[int, Channel], tuple[bytes, bytes]] = {}
        name = "chat.completion" if self._is_chat else "text_completion"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{new_id(12)}"
        self._head = {"id": self.id, "object": name, "created": int(time.time()), "model": model}

    def take(self, event: Event) -> Json | None:
        """Note an event; what it adds to the choice, None for nothing that could be seen."""
        record = self._records[event.choice]
        record.pieces += event.pieces
        pieces = _delta(event.pieces)
        logprobs = self._logprobs(event, record)
        record.logprobs += logprobs
        record.finish = event.finish or record.finish
        record.queue_s = event.queue_s or record.queue_s
        if not pieces and not logprobs and event.finish is None:
            return None
        return {**self._piece(event.choice, pieces, logprobs), **_ending(event.finish, record.pieces)}

    def opening(self) -> list[Json]:
        """The chunks before any token: in a chat, who speaks."""
        if not self._is_chat:
            return []
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": place, **start}) for place in range(len(self._records))]

    def chunks(self, event: Event) -> list[Json]:
        """The event as a chunk, or nothing. Timings come with the last one, unless usage follows and brings them."""
        choice = self.take(event)
        if choice is None:
            return []
        is_last = all(record.finish is not None for record in self._records)
        timings = {"timings": self.timings()} if is_last and not self.asked.includes_usage else {}
        return [{**self._chunk(choice), **timings}]

    def encoded(self, event: Event) -> bytes:
        """As `chunks`; what is more text and nothing else, which nearly all is, is put into bytes that are there."""
        if event.finish is not None or self.asked.has_logprobs or len(event.pieces) > 1:
            return events(self.chunks(event))
        if not event.pieces:
            return b""
        (piece,) = event.pieces
        if not isinstance(piece, Text):
            return events(self.chunks(event))
        at = (event.choice, piece.channel)
        if at not in self._around:
            chunk = self._chunk({**self._piece(event.choice, {_FIELDS[piece.channel]: HOLE}, []), **_ending(None, ())})
            self._around[at] = around(chunk)
        before, behind = self._around[at]
        return before + msgspec.json.encode(piece.text) + behind

    def closing(self) -> list[Json]:
        """The chunk with the usage, where it was asked for."""
        if not self.asked.includes_usage:
            return []
        return [{**self._chunk(), "usage": self.usage(), "timings": self.timings()}]

    def whole(self) -> Json:
        """The answer in one piece."""
        choices = [self._whole_choice(place, record) for place, record in enumerate(self._records)]
        return {**self._head, "choices": choices, "usage": self.usage(), "timings": self.timings()}

    def usage(self) -> Json:
        """Tokens. A prompt counts once, however many answers it got; cached ones are those of its first."""
        firsts = self._firsts()
        n_prompt = sum(finish.n_prompt for finish in firsts)
        n_generated = sum(finish.n_generated for finish in self._finishes())
        n_thought = sum(finish.n_thought for finish in self._finishes())
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": sum(finish.n_cached for finish in firsts)},
            "completion_tokens_details": {"reasoning_tokens": n_thought},
        }

    def timings(self) -> Json:
        """How long it took, and what share of the floor that is."""
        finishes = self._finishes()
        if not finishes:
            return {}
        return {**timings(finishes, max(record.queue_s for record in self._records)), **self._share(finishes)}

    def _share(self, finishes: list[Finish]) -> Json:
        """Of one answer. Several share what is read, so that none of them has a floor of its own."""
        if self._floor is None or len(self._records) > 1:
            return {}
        share = self._floor.share(finishes[0].n_prompt, finishes[0].n_generated, finishes[0].decode_s)
        return {} if share is None else {"floor_share": round(share, 4)}

    def beside(self, value: Json) -> Json:
        """A chunk without a choice, for what is no part of the answer."""
        return {**self._chunk(), **value}

    @property
    def facts(self) -> Json:
        """For the log."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasons = ",".join(finish.reason for finish in self._finishes())
        counts = {"prompt": usage["prompt_tokens"], "cached": cached, "generated": usage["completion_tokens"]}
        return {"answer": self.id, **counts, "finish": reasons, **self.timings()}

    def _finishes(self) -> list[Finish]:
        return [record.finish for record in self._records if record.finish is not None]

    def _firsts(self) -> list[Finish]:
        """Of each prompt the first choice's."""
        found: dict[int, Finish] = {}
        for choice, record in zip(self.asked.choices, self._records, strict=True):
            if record.finish is not None:
                found.setdefault(choice.prompt, record.finish)
        return list(found.values())

    def _chunk(self, choice: Json | None = None) -> Json:
        head = {**self._head, "object": "chat.completion.chunk"} if self._is_chat else self._head
        usage = {"usage": None} if self.asked.includes_usage else {}
        return {**head, "choices": [] if choice is None else [choice], **usage}

    def _piece(self, place: int, pieces: Json, logprobs: list[Json]) -> Json:
        shown = self._shown(logprobs) if logprobs else None
        if self._is_chat:
            return {"index": place, "delta": pieces, "logprobs": shown}
        return {"index": place, "text": pieces.get("content", ""), "logprobs": shown}

    def _whole_choice(self, place: int, record: _Record) -> Json:
        reply = collected(record.pieces)
        logprobs = self._shown(record.logprobs) if self.asked.has_logprobs else None
        ending = {"logprobs": logprobs, **_ending(record.finish, record.pieces)}
        if not self._is_chat:
            return {"index": place, "text": reply.content, **ending}
        content = None if reply.calls and not reply.content else reply.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in reply.calls]
        return {"index": place, "message": message, **ending}

    def _logprobs(self, event: Event, record: _Record) -> list[Json]:
        """An entry for the token, but for the one that ended the turn: it is no part of the answer."""
        sampled = event.sampled
        is_end = event.finish is not None and sampled is not None and sampled.id in self._tokenizer.end_ids
        if sampled is None or is_end or not self.asked.has_logprobs:
            return []
        entry = self._entry(sampled.id, sampled.logprob)
        entry["top_logprobs"] = [self._entry(id, logprob) for id, logprob in sampled.top]
        entry["text_offset"] = record.n_characters
        record.n_characters += len(entry["token"])
        return [entry]

    def _entry(self, id: int, logprob: float) -> Json:
        # A padded table has rows that are nobody's text; they are never sampled, but may be among the best.
        data = self._tokenizer.token_bytes(id) if id < self._tokenizer.n_tokens else b""
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    def _shown(self, entries: list[Json]) -> Json:
        if self._is_chat:
            return {"content": [{k: v for k, v in entry.items() if k != "text_offset"} for entry in entries]}
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{_name(top): top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
            "text_offset": [entry["text_offset"] for entry in entries],
        }


def facts_of(id: str, finish: Finish | None, queue_s: float) -> Json:
    """For the log, of a request with one answer."""
    if finish is None:
        return {"answer": id}
    counts = {"prompt": finish.n_prompt, "cached": finish.n_cached, "generated": finish.n_generated}
    return {"answer": id, **counts, "finish": finish.reason, **timings([finish], queue_s)}


def timings(finishes: Sequence[Finish], queue_s: float) -> Json:
    """How long an answer took, in ms. Of several choices: tokens of all, the time of the slowest.

    prompt_n counts computed tokens, cache_n the others. draft_n and draft_n_accepted: only where there were drafts.
    """
    if not finishes:
        return {}
    prompt_s, decode_s = max(each.prompt_s for each in finishes), max(each.decode_s for each in finishes)
    n_read = sum(each.n_prompt - each.n_cached for each in finishes)
    n_generated = sum(each.n_generated for each in finishes)
    n_later = sum(max(each.n_generated - 1, 0) for each in finishes)
    n_draft, n_accepted = sum(each.n_draft for each in finishes), sum(each.n_draft_accepted for each in finishes)
    return {
        "queue_ms": round(1e3 * queue_s, 3),
        "cache_n": sum(each.n_cached for each in finishes),
        "prompt_n": n_read,
        "prompt_ms": round(1e3 * prompt_s, 3),
        "prompt_per_second": round(n_read / prompt_s, 2) if prompt_s > 0 else None,
        "predicted_n": n_generated,
        "predicted_ms": round(1e3 * decode_s, 3),
        "predicted_per_second": round(n_later / decode_s, 2) if decode_s > 0 and n_later else None,
        "seed": finishes[0].seed,
        **({"draft_n": n_draft, "draft_n_accepted": n_accepted} if n_draft else {}),
    }


def _name(entry: Json) -> str:
    """The token's text; where its bytes are none, their codes, as OpenAI names them: names must differ."""
    data = bytes(entry["bytes"])
    is_text = data == entry["token"].encode()
    return entry["token"] if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _call(id: str, name: str, arguments: str) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(pieces: Sequence[Piece]) -> Json:
    """What pieces add to a message: texts, and calls by their index."""
    delta: Json = {}
    calls: list[Json] = []
    for piece in pieces:
        match piece:
            case Text(channel, text):
                delta[_FIELDS[channel]] = delta.get(_FIELDS[channel], "") + text
            case CallBegin(index, id, name):
                calls.append({"index": index, **_call(id, name, "")})
            case CallArguments(index, text):
                if calls and calls[-1]["index"] == index:
                    calls[-1]["function"]["arguments"] += text
                else:
                    calls.append({"index": index, "function": {"arguments": text}})
    return {**delta, "tool_calls": calls} if calls else delta


def _ending(finish: Finish | None, pieces: Sequence[Piece]) -> Json:
    """pieces: the choice's. Why what looked like a call is text stands behind the detail."""
    if finish is None:
        return {"finish_reason": None}
    reply = collected(pieces)
    reason = "tool_calls" if reply.calls and finish.reason == "stop" else _REASONS[finish.reason]
    return {"finish_reason": reason, "finish_detail": "; ".join((finish.detail, *reply.notes))}
