"""bench serve: a client that tells what it saw, the same load without HTTP, and rows of both."""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bytefloor.cli import app
from bytefloor.cli_bench import _lengths
from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import Shape, checkpoint_of, with_tokenizer
from bytefloor.errors import RequestError
from bytefloor.tools import packages
from bytefloor.tools.bench_serve import LoadOptions, Rates, _requests, _works, bench_serve, percentile
from bytefloor.tools.engine_load import drive
from bytefloor.tools.load_client import Client, Load, Plan, digest
from bytefloor.tools.server_process import started
from server.live import SHORT, Live, live, scripted
from tiny import build_tiny

N = 3


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def usage(n_tokens: int) -> bytes:
    counts = {"prompt_tokens": 7, "completion_tokens": n_tokens, "prompt_tokens_details": {"cached_tokens": 2}}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


WHOLE = [chunk("a"), b": still here\n\n", chunk("b"), chunk("c"), usage(N), b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def framed(parts: list[bytes]) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def whole(writer: asyncio.StreamWriter) -> None:
    writer.write(framed(WHOLE))


def load_of(answer: Answer, n: int = 1, **plan: Any) -> tuple[Load, list[list[str]]]:
    """A plan against a server that answers so; and of each connection the bodies it brought."""
    connections: list[list[str]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies: list[str] = []
        connections.append(bodies)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append((await reader.readexactly(length)).decode())
                await answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> Load:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            settings = {"n_tokens": [N] * n, "timeout_s": 5.0, **plan}
            return await Client(Plan("127.0.0.1", port, "/x", [f'"{i}"' for i in range(n)], **settings)).run()

    return asyncio.run(run()), connections


def test_an_answer_is_read_however_it_is_cut() -> None:
    data = framed(WHOLE)

    async def in_pieces(writer: asyncio.StreamWriter) -> None:
        source = random.Random(1)
        at = 0
        while at < len(data):
            end = at + source.randrange(1, 40)
            writer.write(data[at:end])
            await writer.drain()
            await asyncio.sleep(0)
            at = end

    load, _ = load_of(in_pieces, 5)
    for outcome in load.outcomes:
        assert (outcome.error, outcome.n_tokens, outcome.n_prompt, outcome.n_cached) == (None, N, 7, 2)
        assert outcome.digest == digest("abc")


def test_times_are_those_of_tokens() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        parts = framed(WHOLE).split(b"\r\n\r\n", 1)
        writer.write(parts[0] + b"\r\n\r\n")
        for part in (WHOLE[1], WHOLE[0], WHOLE[2] + WHOLE[3], WHOLE[4] + WHOLE[5]):
            await asyncio.sleep(0.1)
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    (outcome,) = load_of(slowly)[0].outcomes
    assert outcome.first is not None
    assert outcome.last is not None
    assert outcome.end is not None
    # The comment came first and is no token; usage came last and is none either.
    assert 0.19 < outcome.first - outcome.due < 0.29
    assert 0.09 < outcome.last - outcome.first < 0.19
    assert 0.09 < outcome.end - outcome.last < 0.19
    rates = Rates.of(Load([outcome], 2.0))
    assert rates.tok_s == 1.5
    assert rates.prompt_tok_s == 3.5
    assert rates.tpot_ms == [pytest.approx(1e3 * (outcome.last - outcome.first) / 2)]


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")


async def go(writer: asyncio.StreamWriter) -> None:
    writer.write(framed(WHOLE)[:200])
    await writer.drain()
    writer.transport.abort()


async def wait(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1)


async def babble(writer: asyncio.StreamWriter) -> None:
    writer.write(b"no HTTP at all\r\n\r\n")


def parts(*found: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(framed(list(found)))

    return answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refuse, "HTTP 429"),
        (go, "disconnected"),
        (wait, "timeout"),
        (babble, "no HTTP"),
        (parts(chunk("a"), b'data: {"error":{"message":"oops"}}\n\n'), "failed midway"),
        (parts(*WHOLE[:-1]), "no whole answer"),
        (parts(chunk("a"), usage(2), b"data: [DONE]\n\n"), "another length"),
        (parts(b"data: [DONE]\n\n"), "no whole answer"),
    ],
)
def test_errors_are_told_apart_and_count_for_nothing(answer: Answer, error: str) -> None:
    load, _ = load_of(answer, 2, timeout_s=0.3)
    assert [outcome.error for outcome in load.outcomes] == [error] * 2
    assert Rates.of(load) == Rates(0.0, 0.0, [], [], [])


def test_nobody_there_is_an_error_too() -> None:
    load = asyncio.run(Client(Plan("127.0.0.1", 1, "/x", ["{}"], [1])).run())
    assert [outcome.error for outcome in load.outcomes] == ["ConnectionRefusedError"]


def test_streams_are_connections_that_ask_again() -> None:
    load, connections = load_of(whole, 9, n_streams=3)
    assert len(load.outcomes) == 9
    assert sorted(body for bodies in connections for body in bodies) == [f'"{i}"' for i in range(9)]
    assert len(connections) == 3
    _, cold = load_of(whole, 9, n_streams=3, is_cold=True)
    assert len(cold) == 9


def test_requests_that_arrive_wait_for_nobody_and_are_timed_from_when_they_were_due() -> None:
    async def in_a_while(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        await whole(writer)

    load, connections = load_of(in_a_while, 4, due_s=[0.0, 0.05, 0.1, 0.5])
    assert [round(each.due - load.outcomes[0].due, 3) for each in load.outcomes] == [0.0, 0.05, 0.1, 0.5]
    assert all(each.end is not None and 0.29 < each.end - each.due < 0.45 for each in load.outcomes)
    assert len(connections) == 3  # the last one found one that was free
    assert 0.79 < load.wall_s < 1.2
    assert load.cpu_s < load.wall_s / 2


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert [percentile([3.0, 1.0], percent) for percent in (50, 90, 99)] == [1.0, 3.0, 3.0]
    assert percentile([], 50) is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("load")).directory


@pytest.fixture(scope="module")
def opened(directory: Path) -> Opened:
    return open_engine(directory, EngineOptions(context=128, n_sequences=4))


def asked(n: int, n_tokens: int = 5) -> list[Request]:
    greedy = SamplingParams(temperature=0.0)
    return [Request(tuple(range(5 + i, 15 + i)), n_tokens, greedy, ignores_end=True) for i in range(n)]


def test_the_engine_alone_has_so_many_at_a_time(opened: Opened) -> None:
    engine, executor = scripted(opened, n_sequences=4)
    load = drive(engine.engine, asked(10), 3)
    assert max(len(set(batch.sequence)) for batch in executor.batches) == 3
    assert [(each.n_tokens, each.n_prompt, each.error) for each in load.outcomes] == [(5, 10, None)] * 10
    for each in load.outcomes:
        assert each.first is not None
        assert each.last is not None
        assert each.due < each.first < each.last == each.end


def test_the_engine_alone_takes_them_as_they_are_due(opened: Opened) -> None:
    engine, _ = scripted(opened, n_sequences=4)
    load = drive(engine.engine, asked(3), 1, [0.0, 0.1, 0.3])
    assert [round(each.due - load.outcomes[0].due, 3) for each in load.outcomes] == [0.0, 0.1, 0.3]
    assert all(each.first is not None and each.first > each.due for each in load.outcomes)
    assert load.wall_s > 0.3


@pytest.fixture
def running(directory: Path) -> Iterator[Live]:
    with live(open_engine(directory, EngineOptions(context=64, n_sequences=3))) as running:
        yield running


def test_a_server_that_runs_is_asked_what_the_options_say(running: Live) -> None:
    options = LoadOptions((1, 3), (20, 30), 6, n_requests=2)
    rows = list(bench_serve(None, running.url, options))
    assert [(row.streams, row.n_prompt, row.requests) for row in rows] == [
        (1, 20, 2),
        (3, 20, 6),
        (1, 30, 2),
        (3, 30, 6),
    ]
    for row in rows:
        assert (row.errors, row.cached_tokens, row.model, row.n_parallel) == ({}, 0, "tiny", 3)
        assert row.tok_s == pytest.approx(row.requests * 6 / row.wall_s, rel=0.05)
        assert row.prompt_tok_s == pytest.approx(row.requests * row.n_prompt / row.wall_s, rel=0.05)
        assert row.ttft_ms_p50 is not None
        assert row.latency_ms_p50 is not None
        assert 0 < row.ttft_ms_p50 < row.latency_ms_p50
        # Whose engine it is nobody here knows.
        assert (row.engine_tok_s, row.http_cost, row.same_answers, row.server_cpu, row.commit) == (None,) * 5
    # Everything that was sent: with the round before the clock of as many requests as run at a time.
    metrics = running.http.get("/metrics").text
    n_tokens = 2 * (2 + 1 + 6 + 3) * 6
    assert f"bytefloor_generated_tokens_total {float(n_tokens)}" in metrics


def test_answers_may_have_lengths_of_their_own(running: Live, opened: Opened) -> None:
    options = LoadOptions((3,), (10,), 9, 4, n_least=2, seed=1)
    (row,) = bench_serve(None, running.url, options)
    # An answer that has another length than was asked for is an error.
    assert (row.errors, row.requests, row.n_gen_least, row.n_gen) == ({}, 12, 2, 9)
    (work,) = _works(options, opened.tokenizer.n_tokens, 64)
    assert set(work.n_gens) <= set(range(2, 10))
    assert len(set(work.n_gens)) > 4
    assert row.tok_s == pytest.approx(sum(work.n_gens) / row.wall_s, rel=0.05)
    engine, _ = scripted(opened, n_sequences=4)
    load = drive(engine.engine, _requests(work, options), 3)
    assert [each.n_tokens for each in load.outcomes] == work.n_gens


@pytest.mark.parametrize("text", ["0", "x", "", "..", "3..", "5..4", "0..4", "1..2..3", "-1"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match=r"-n .*: expected a number of tokens, at least 1, or two like 64..192"):
        _lengths(text)


def test_arrivals_are_a_row_for_each_rate(running: Live) -> None:
    (row,) = bench_serve(None, running.url, LoadOptions((2,), (10,), 3, 3, rates=(40.0,), seed=4))
    assert (row.streams, row.rate_s, row.requests, row.errors) == (None, 40.0, 6, {})


def test_requests_that_fail_are_counted_and_said(opened: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    engine, executor = scripted(opened, n_sequences=3)
    executor.pause_s = 0.01
    with live(engine, replace(SHORT, max_open=1)) as running:
        (row,) = bench_serve(None, running.url, LoadOptions((3,), (10,), 4, 1))
    assert row.errors == {"HTTP 429": 2}
    assert "2 of 3 requests failed: {'HTTP 429': 2}" in capsys.readouterr().err
    assert row.tok_s == pytest.approx(4 / row.wall_s, rel=0.05)


def test_a_server_that_stops_is_none(running: Live) -> None:
    running.call(running.service.drain())
    with pytest.raises(RequestError, match="no server answers there"):
        list(bench_serve(None, running.url, LoadOptions((2,), (10,), 3, 1)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://127.0.0.1:1", "expected http://HOST:PORT"),
        ("http://127.0.0.1:99999", "expected http://HOST:PORT"),
        ("http://127.0.0.1:1/v2", "expected http://HOST:PORT"),
        ("127.0.0.1:1", "no server answers there"),
    ],
)
def test_an_address_that_is_none(url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        list(bench_serve(None, url, LoadOptions((1,), (10,), 3)))


def test_what_does_not_fit_is_refused_before_anything_is_sent(running: Live) -> None:
    with pytest.raises(RequestError, match="-p 60 and -n 6: expected at most 64 positions together"):
        list(bench_serve(None, running.url, LoadOptions((1,), (60,), 6)))
    with pytest.raises(RequestError, match="leave out -m"):
        list(bench_serve("model", running.url, LoadOptions((1,), (60,), 6)))


def test_a_model_is_measured_with_http_and_without(directory: Path, tmp_path: Path) -> None:
    """The whole command: an engine here, a server and a client in processes of their own."""
    words = ["bench", "serve", "-m", str(directory), "-s", "2", "-p", "12", "-n", "8", "-r", "3", "--device", "cpu"]
    saved = tmp_path / "rows.json"
    result = CliRunner().invoke(app, [*words, "--temp", "0.7", "-o", "csv", "--save", str(saved)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(saved.read_text())
    assert (row["verb"], row["streams"], row["requests"], row["errors"]) == ("serve", 2, 6, {})
    assert row["same_answers"] == 1.0
    assert row["http_cost"] == pytest.approx(1 - row["tok_s"] / row["engine_tok_s"], abs=1e-3)
    assert 0 < row["client_cpu"] < row["server_cpu"]
    assert (row["executor"], row["card"], row["cached_tokens"]) == ("reference", "cpu", 0)
    assert row["date"] > "2026"
    (line,) = csv.DictReader(result.stdout.splitlines())
    assert line["tok_s"] == str(row["tok_s"])


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with pytest.raises(RequestError, match=r"status 2: bytefloor: error: .*no such file"), started(["-m", "no.gguf"]):
        pass


def test_what_is_not_installed_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.find_spec
    gone = {"starlette", "prometheus_client"}
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in gone else found(name))
    for words in (["bench", "serve"], ["serve"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        told = f"{' '.join(words)} needs packages that are not installed: prometheus-client, starlette"
        assert told in result.output
    # A client alone needs neither.
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "127.0.0.1:1"])
    assert "no server answers there" in result.output


def test_answers_go_on_past_the_end_of_a_turn_where_that_is_asked(opened: Opened) -> None:
    engine, executor = scripted(opened)
    with live(engine) as running:
        executor.say("hi", 3)
        short = running.post("/v1/completions", prompt=[5, 6, 7], max_tokens=9, temperature=0).json()
        long = running.post("/v1/completions", prompt=[5, 6, 7], max_tokens=9, temperature=0, ignore_eos=True).json()
        assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (3, "stop")
        assert (long["usage"]["completion_tokens"], long["choices"][0]["finish_reason"]) == (9, "length")
        refused = running.post("/v1/completions", prompt="x", regex="a+", ignore_eos=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "ignore_eos"


def test_a_model_of_random_weights_can_be_served() -> None:
    shape = Shape("llama", 64, 128, 2, 4, 2, 16, 500, 256, True, {"rope.freq_base": 1e4})
    engine = open_engine(with_tokenizer(checkpoint_of("synthetic:small", shape, "Q8_0", "cpu")), EngineOptions()).engine
    tokenizer = engine.tokenizer
    assert tokenizer.n_tokens == 500
    assert tokenizer.end_ids == {499}
    texts = [tokenizer.decode([token], keep_special=True) for token in range(500)]
    assert len(set(texts) - {"\ufffd"}) > 370
    assert tokenizer.decode(tokenizer.encode("Ab \u00e9")) == "Ab \u00e9"
    start = time.perf_counter()
    ids = [delta.sampled.id for delta in engine.generate(asked(1)[0]) if delta.sampled]
    assert len(ids) == 5
    assert time.perf_counter() - start < 5
