"""What a stream tells beside the answer: how far the prompt is, how fast it goes, what share of the floor that is."""

from __future__ import annotations

from typing import Any

import pytest

from bytefloor.engine.loading import Opened
from bytefloor.engine.sampler import Sampled
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.files.stored import count_formats
from bytefloor.server.answers import Event
from bytefloor.server.floor import Floor
from bytefloor.server.progress import EVERY_S, Progress
from bytefloor.tools.serve import device_limit
from server.live import Live, Scripted, live, scripted
from server.test_answers import events

Stage = tuple[Live, Scripted]
LIMIT = StreamLimit(0.5)


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def streamed(running: Live, **body: Any) -> list[Any]:
    return events(running.chat(stream=True, **body).text)


def token() -> Event:
    return Event(0, (), Sampled(5, 0.0, ()))


def test_the_share_is_the_time_of_the_bytes_in_the_time_it_took(opened: Opened) -> None:
    step = opened.engine.executor.step
    floor = Floor(step, gb_s=2.0)
    n_bytes = sum(step.token_bytes(20 + 5))
    assert n_bytes > sum(step.token_bytes(0))
    ideal_s = n_bytes / 2e9
    assert floor.share(20, 11, 10 * ideal_s) == pytest.approx(1)
    assert floor.share(20, 11, 40 * ideal_s) == pytest.approx(0.25)
    assert floor.share(20, 1, 1.0) is None
    assert floor.share(20, 2, 0.0) is None
    # Of a prompt that was cut only what was kept is read, but for layers with a window.
    cut, window = Floor(step, gb_s=2.0, budget=12), [kind.window for kind in step.kinds]
    assert window.count(None) == 1
    assert len(window) == 2
    kept = sum(call.cache_bytes({"T": 1, "B": 1, "S": 18}) for call in step.calls if call.op.reads_cache)
    whole = sum(call.cache_bytes({"T": 1, "B": 1, "S": 26}) for call in step.calls if call.op.reads_cache)
    assert kept < whole
    assert cut.share(20, 11, 10 * ideal_s) == pytest.approx((n_bytes - whole + kept) / n_bytes)
    assert cut.share(12, 11, 1.0) == floor.share(12, 11, 1.0)


def test_figures_come_now_and_then() -> None:
    clock = Clock()
    progress = Progress(7, None, clock)
    assert not progress.has_begun
    assert progress.speed(token()) == {}
    assert progress.has_begun
    clock.now += EVERY_S / 2
    assert progress.speed(token()) == {}
    clock.now += EVERY_S / 2 + 0.01
    told = {"predicted_n": 3, "predicted_ms": 210.0, "predicted_per_second": 9.52}
    assert progress.speed(token()) == {"timings": told}
    assert progress.speed(token()) == {}
    clock.now += 1
    assert progress.speed(Event(0, (), None)) == {}
    assert progress.speed(token())["timings"]["predicted_n"] == 5


def test_a_stream_that_asks_is_told(opened: Opened) -> None:
    engine, executor = scripted(opened)
    with live(engine, limit=LIMIT) as running:
        n_prompt = running.n_prompt()
        executor.say("abcdefgh", n_prompt)
        executor.pause_s = 0.08
        chunks = streamed(running, return_progress=True, stream_options={"include_usage": True})
        executor.pause_s = 0.0
        assert chunks[1]["prompt_progress"]["total"] == n_prompt
        assert chunks[1]["choices"] == []
        figures = [chunk["timings"] for chunk in chunks if "timings" in chunk]
        assert len(figures) >= 3
        assert [each["predicted_n"] for each in figures] == sorted({each["predicted_n"] for each in figures})
        last = figures[-1]
        assert last["predicted_n"] == 9
        expected = running.service.floor.share(n_prompt, 9, last["predicted_ms"] / 1e3)
        assert 0 < expected < 1
        assert last["floor_share"] == pytest.approx(expected, abs=2e-4)
        assert all(0 < each["floor_share"] < 1 for each in figures)

        quiet = streamed(running)
        assert [name for chunk in quiet for name in chunk if name in ("prompt_progress", "timings")] == ["timings"]
        both = streamed(running, n=2, max_tokens=4)[-1]["timings"]
        assert both["predicted_n"] == 8
        assert "floor_share" not in both


def test_without_a_limit_there_is_no_share(stage: Stage) -> None:
    running, executor = stage
    executor.say("abcdefgh", running.n_prompt())
    assert "floor_share" not in running.chat().json()["timings"]
    assert running.http.get("/props").json()["stream_gb_s"] is None
    assert device_limit("cpu") is None


def test_progress_is_of_a_stream(stage: Stage) -> None:
    refused = stage[0].chat(return_progress=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_progress"
    assert stage[0].chat(return_progress=False, max_tokens=1).status_code == 200


def test_props_tell_what_the_file_holds(stage: Stage, opened: Opened) -> None:
    props = stage[0].http.get("/props").json()
    counts = count_formats(opened.model.checkpoint)
    assert props["formats"] == {count.name: count.n_bytes for count in counts}
    assert props["n_bytes"] == sum(tensor.n_bytes for tensor in opened.model.checkpoint.tensors.values())
    assert props["bits_per_weight"] == pytest.approx(8 * props["n_bytes"] / props["n_weights"])
    assert props["container"] == "safetensors"
    assert props["card"] is None
    step = opened.engine.executor.step
    assert props["token_bytes"] == {"empty": sum(step.token_bytes(0)), "full": sum(step.token_bytes(511))}
