"""Prepared bytes are those that the objects would give, and what has come together goes out together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.engine.loading import Opened
from bytefloor.engine.request import Finish, Request
from bytefloor.engine.sampler import Sampled
from bytefloor.server import ids
from bytefloor.server.answers import Answer, Event, Told
from bytefloor.server.anthropic_answers import MessageAnswer
from bytefloor.server.asked import Asked, Choice
from bytefloor.server.event_stream import events
from bytefloor.server.generation import Generation
from bytefloor.server.refusal import Refusal
from bytefloor.server.responses_answers import ResponseAnswer
from bytefloor.server.worker import Worker
from bytefloor.text.chat import ChatPrompt
from bytefloor.text.reply import CallArguments, CallBegin, CallEnd, Text
from server.live import scripted

WORDS = SimpleNamespace(end_ids=frozenset({1}), n_tokens=9, token_bytes=lambda id: b"\xff" if id == 2 else b"w\n")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
PIECES = st.one_of(
    st.builds(Text, st.sampled_from(["content", "reasoning"]), TEXTS),
    st.just((CallBegin(0, "call_1", "look"), CallArguments(0, '{"q":'), CallArguments(0, "1}"), CallEnd(0))),
)
STEPS = st.lists(st.tuples(st.integers(0, 1), st.lists(PIECES, max_size=2)), max_size=12)
FINISH = Finish("stop", "end of turn", 4, 0, 7, 0.25, 0.5, 9)
ALIKE = SimpleNamespace(getrandbits=lambda n: 7)
"""In place of what names are drawn from."""


def told(make: Callable[[], Told], n: int, steps: Sequence[Any], encode: Callable[[Told, Event], bytes]) -> list[bytes]:
    answer = make()
    given = [
        Event(
            place % n, [each for piece in pieces for each in (piece if isinstance(piece, tuple) else [piece])], SAMPLED
        )
        for place, pieces in steps
    ]
    given += [Event(place, [], SAMPLED, FINISH, 0.125) for place in range(n)]
    return [encode(answer, event) for event in given] + [events(answer.closing())]


SAMPLED = Sampled(2, -0.5, ((3, -0.25),))


@pytest.mark.parametrize("kind", ["chat", "chat usage", "chat logprobs", "text", "messages", "responses"])
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_an_event_is_the_same_bytes(kind: str, steps: list[Any]) -> None:
    n = 2 if kind.startswith(("chat", "text")) else 1
    choices = tuple(Choice(Request((5, 6, 7, 8)), ChatPrompt.plain("", []).reply("x")) for _ in range(n))
    asked = Asked(kind.split()[0], choices, True, "usage" in kind, "logprobs" in kind)
    if kind == "text":
        steps = [
            (place, [p for p in pieces if isinstance(p, Text) and p.channel == "content"]) for place, pieces in steps
        ]

    def make() -> Told:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ids, "_SOURCE", ALIKE)
            patch.setattr(time, "time", lambda: 1.0)
            if kind == "messages":
                return MessageAnswer(asked, "a model")
            if kind == "responses":
                return ResponseAnswer(asked, {}, "a model")
            return Answer(asked, 'a "model"', WORDS)

    def plain(answer: Told, event: Event) -> bytes:
        return events(answer.chunks(event))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "_SOURCE", ALIKE)
        assert told(make, n, steps, lambda answer, event: answer.encoded(event)) == told(make, n, steps, plain)


def test_what_has_come_is_given_together_and_before_the_refusal_behind_it(opened: Opened) -> None:
    asyncio.run(_fails_behind_tokens(opened))


async def _fails_behind_tokens(opened: Opened) -> None:
    engine, executor = scripted(opened)
    worker = Worker(engine.engine)
    worker.start()
    executor.say("abcdef", 4, ends=False)
    executor.pause_s = 0.005
    choice = Choice(Request((5, 6, 7, 8)), ChatPrompt.plain("", []).reply("x"))
    generation = Generation(worker, (choice,), 60)
    await generation.start()
    (handle,) = generation._places
    while handle.n_generated < 3:
        await asyncio.sleep(0.001)
    executor.failure = MemoryError("no room")
    while handle.finish is None:
        await asyncio.sleep(0.001)
    found = await generation.events(5)
    assert len(found) == handle.n_generated >= 3
    assert not generation.is_over
    with pytest.raises(Refusal, match="no room"):
        await generation.events(5)
    generation.close()
    await worker.stop()
