"""``bench serve``: what a server gives its clients, and what of the engine's speed HTTP costs.

The load runs twice: first straight on an engine in this process, then over HTTP against a server in a process of its
own, from a client in another. docs/bench.md says what each field means.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch

from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import EngineOptions, Opened, check_kv, choose_device
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import RequestError
from bytefloor.tools.bench import main_format
from bytefloor.tools.bench_rows import Measured, free_memory, origin, say
from bytefloor.tools.engine_load import drive
from bytefloor.tools.load_client import Load, Outcome, Plan
from bytefloor.tools.server_process import Server, started
from bytefloor.tools.session import open_with_progress

PATH = "/v1/completions"
WARM_UP = 16
"""Tokens of the answers before the clock starts."""


@dataclass(frozen=True)
class LoadOptions:
    """What to send. streams: how many at a time, a row each; rates: instead, so many a second, a row each.

    n_gen: tokens of an answer; with n_least, a number of its own for each, from that to n_gen.
    n_requests: for each stream, of the most where rates are given. is_cold: every request on a connection of its own.
    kv: what the cache keeps, see ``EngineOptions``.
    """

    streams: tuple[int, ...]
    n_prompt: tuple[int, ...]
    n_gen: int
    n_requests: int = 4
    rates: tuple[float, ...] = ()
    is_cold: bool = False
    temperature: float = 0.0
    seed: int = 0
    device: str = "auto"
    capacity: int | None = None
    kv: str | None = None
    n_least: int | None = None

    @property
    def n_parallel(self) -> int:
        return max(self.streams)


@dataclass(frozen=True)
class LoadRow(Measured):
    """One load. Times are percentiles over the requests that were answered; None: not measured.

    streams: at a time, None where they came by rate_s, requests a second. n_gen: tokens of an answer, or the most where
    each has a number of its own, from n_gen_least. errors: how many ended so, by kind.
    ttft: from sending, of a cold one from connecting, to the first token that can be seen. tpot: the time of a token
    after the first, a mean of each answer. latency: to the answer's end. tok_s, prompt_tok_s: of all together, over
    wall_s. engine_*: the same load without HTTP; http_cost: 1 - tok_s / engine_tok_s. same_answers: the share of
    answers that are the engine's, letter by letter. client_cpu, server_cpu: of a core, while the load ran.
    """

    COLUMNS: ClassVar = (
        "model", "streams", "rate_s", "n_prompt", "n_gen_least", "n_gen", "requests", "errors", "ttft_ms_p50",
        "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "latency_ms_p50", "tok_s", "prompt_tok_s", "cached_tokens",
        "engine_tok_s", "http_cost", "engine_ttft_ms_p50", "same_answers", "client_cpu", "server_cpu",
    )  # fmt: skip
    verb: str
    model: str
    format: str | None
    streams: int | None
    rate_s: float | None
    is_cold: bool
    n_parallel: int
    n_prompt: int
    n_gen_least: int
    n_gen: int
    temperature: float
    kv: str
    requests: int
    errors: dict[str, int]
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    latency_ms_p50: float | None
    latency_ms_p90: float | None
    latency_ms_p99: float | None
    tok_s: float
    prompt_tok_s: float
    cached_tokens: int
    wall_s: float
    engine_tok_s: float | None
    engine_prompt_tok_s: float | None
    engine_ttft_ms_p50: float | None
    engine_tpot_ms_p50: float | None
    http_cost: float | None
    same_answers: float | None
    client_cpu: float
    server_cpu: float | None
    executor: str | None
    notes: tuple[str, ...]
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str


@dataclass(frozen=True)
class _Work:
    """One row's requests: prompts as token ids, how long answers are, and when they are due."""

    n_prompt: int
    n_streams: int | None
    rate_s: float | None
    prompts: list[list[int]]
    n_gens: list[int]
    due_s: list[float] | None

    @property
    def at_a_time(self) -> int:
        return self.n_streams or len(self.prompts)


@dataclass(frozen=True)
class _Alone:
    """What the engine made of the works without HTTP, in order, and whose it was."""

    loads: list[Load]
    fields: dict[str, Any]


def bench_serve(name: str | None, url: str | None, options: LoadOptions) -> Iterator[LoadRow]:
    """Rows as they are measured. name: a model to serve, or url: a server that runs, whose engine nobody knows."""
    check_kv(options.kv)
    if url is not None:
        if name is not None or options.capacity is not None or options.kv is not None:
            raise RequestError("--url: the server has its model, -c and --kv already; leave out -m, -c and --kv")
        server = Server.at(url)
        alone = None
    else:
        capacity = options.capacity or max(options.n_prompt) + options.n_gen + 1
        options = replace(options, capacity=capacity)
        alone = _measure_alone(name, options)
    words = [] if url is not None else _words(name, options)
    with nullcontext(server) if url is not None else started(words) as server:
        works = _works(options, server.facts["n_tokens"], server.facts["context"])
        for place, work in enumerate(works):
            row = _measure(server, work, options, alone, place)
            if row.errors:
                say([f"{sum(row.errors.values())} of {row.requests} requests failed: {row.errors}"])
            yield row


def _words(name: str | None, options: LoadOptions) -> list[str]:
    """What ``bytefloor serve`` is told."""
    words = ["--parallel", str(options.n_parallel), "-c", str(options.capacity), "--device", options.device]
    words += ["-m", name] if name is not None else []
    words.append("--no-speculation")  # random text says nothing of drafts, and some of it repeats itself
    return words + (["--kv", options.kv] if options.kv is not None else [])


def _works(options: LoadOptions, n_tokens: int, context: int) -> list[_Work]:
    """The same for the engine and for the server. No two prompts begin alike, but by chance."""
    longest, least = max(options.n_prompt), _least(options)
    if longest + options.n_gen > context:
        raise RequestError(f"-p {longest} and -n {options.n_gen}: expected at most {context} positions together")
    random_source = random.Random(options.seed)
    works: list[_Work] = []
    for n_prompt in options.n_prompt:
        for n_streams, rate_s in zip_longest(() if options.rates else options.streams, options.rates):
            n = options.n_requests * (n_streams or options.n_parallel)
            prompts = [[random_source.randrange(n_tokens) for _ in range(n_prompt)] for _ in range(n)]
            due_s = None if rate_s is None else _arrivals(n, rate_s, random_source)
            n_gens = [random_source.randint(least, options.n_gen) for _ in range(n)]
            works.append(_Work(n_prompt, n_streams, rate_s, prompts, n_gens, due_s))
    return works


def _least(options: LoadOptions) -> int:
    return options.n_gen if options.n_least is None else options.n_least


def _arrivals(n: int, rate_s: float, random_source: random.Random) -> list[float]:
    """Of a Poisson process, seconds from the start; the first at once."""
    times = [0.0]
    while len(times) < n:
        times.append(times[-1] + random_source.expovariate(rate_s))
    return times


def _warm_up(work: _Work, options: LoadOptions, n_tokens: int) -> _Work:
    """As many at a time, of other prompts, with short answers."""
    random_source = random.Random(f"{options.seed} {work.n_prompt} {work.n_streams} {work.rate_s}")
    n = min(work.at_a_time, options.n_parallel)
    prompts = [[random_source.randrange(n_tokens) for _ in range(work.n_prompt)] for _ in range(n)]
    return _Work(work.n_prompt, n, None, prompts, [min(WARM_UP, options.n_gen)] * n, None)


def _measure_alone(name: str | None, options: LoadOptions) -> _Alone:
    """The loads on an engine of this process, whose memory is free again after."""
    device = choose_device(options.device)
    opened = open_with_progress(
        name,
        EngineOptions(
            options.capacity, options.device, n_sequences=options.n_parallel, kv=options.kv, speculates=False
        ),
    )
    loads = []
    n_tokens = opened.tokenizer.n_tokens
    for work in _works(options, n_tokens, opened.engine.capacity):
        warm = _warm_up(work, options, n_tokens)
        drive(opened.engine, _requests(warm, options), warm.at_a_time)
        loads.append(drive(opened.engine, _requests(work, options), work.at_a_time, work.due_s))
    fields = _model_fields(opened) | origin(device)
    del opened
    gc.collect()
    free_memory(device)
    return _Alone(loads, fields)


def _model_fields(opened: Opened) -> dict[str, Any]:
    kernels = isinstance(opened.engine.executor, DeviceExecutor)
    return {
        "model": opened.model.config.name,
        "format": main_format(opened.model),
        "kv": opened.kv,
        "executor": "kernels" if kernels else "reference",
        "notes": opened.notices,
    }


def _requests(work: _Work, options: LoadOptions) -> list[Request]:
    return [
        Request(
            prompt_ids=tuple(prompt),
            max_tokens=n_gen,
            sampling=SamplingParams(temperature=options.temperature, seed=options.seed + place),
            ignores_end=True,
        )
        for place, (prompt, n_gen) in enumerate(zip(work.prompts, work.n_gens, strict=True))
    ]


def _send(server: Server, work: _Work, options: LoadOptions) -> Load:
    """The requests over HTTP, from a client in a process of its own."""
    asked = {
        "temperature": options.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies = [
        json.dumps({"prompt": prompt, "seed": options.seed + place, "max_tokens": n_gen, **asked})
        for place, (prompt, n_gen) in enumerate(zip(work.prompts, work.n_gens, strict=True))
    ]
    plan = Plan(
        server.host, server.port, PATH, bodies, work.n_gens, work.at_a_time, work.due_s, options.is_cold
    )  # fmt: skip
    done = subprocess.run(
        (sys.executable, "-m", "bytefloor.tools.load_client"),
        input=json.dumps(asdict(plan)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RequestError(f"the client failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    found = json.loads(done.stdout)
    return Load([Outcome(**each) for each in found["outcomes"]], found["wall_s"], found["cpu_s"])


def _measure(server: Server, work: _Work, options: LoadOptions, alone: _Alone | None, place: int) -> LoadRow:
    _send(server, _warm_up(work, options, server.facts["n_tokens"]), options)
    before = server.cpu_s()
    load = _send(server, work, options)
    after = server.cpu_s()
    server_cpu = None if before is None or after is None else round((after - before) / load.wall_s, 3)
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    rates = Rates.of(load)
    return LoadRow(
        verb="serve",
        streams=work.n_streams,
        rate_s=work.rate_s,
        is_cold=options.is_cold,
        n_parallel=server.facts["n_sequences"],
        n_prompt=work.n_prompt,
        n_gen_least=_least(options),
        n_gen=options.n_gen,
        temperature=options.temperature,
        requests=len(load.outcomes),
        errors=dict(Counter(outcome.error for outcome in load.outcomes if outcome.error is not None)),
        **_percentiles("ttft_ms", rates.ttft_ms),
        **_percentiles("tpot_ms", rates.tpot_ms),
        **_percentiles("latency_ms", rates.latency_ms),
        tok_s=rates.tok_s,
        prompt_tok_s=rates.prompt_tok_s,
        cached_tokens=sum(outcome.n_cached for outcome in good),
        wall_s=round(load.wall_s, 3),
        client_cpu=round(load.cpu_s / load.wall_s, 3),
        server_cpu=server_cpu,
        **_beside(load, None if alone is None else alone.loads[place], is_closed=work.due_s is None),
        **(_fields_of(server) if alone is None else alone.fields),
    )


def _beside(load: Load, engine: Load | None, is_closed: bool) -> dict[str, Any]:
    """The same load without HTTP. is_closed: as fast as it went; otherwise its speed is that of the arrivals."""
    if engine is None:
        names = ("tok_s", "prompt_tok_s", "ttft_ms_p50", "tpot_ms_p50")
        return dict.fromkeys([*(f"engine_{name}" for name in names), "http_cost", "same_answers"])
    own = Rates.of(engine)
    return {
        "engine_tok_s": own.tok_s,
        "engine_prompt_tok_s": own.prompt_tok_s,
        "engine_ttft_ms_p50": percentile(own.ttft_ms, 50),
        "engine_tpot_ms_p50": percentile(own.tpot_ms, 50),
        "http_cost": round(1 - Rates.of(load).tok_s / own.tok_s, 4) if is_closed and own.tok_s > 0 else None,
        "same_answers": _same_answers(load, engine),
    }


def _fields_of(server: Server) -> dict[str, Any]:
    """What somebody else's server says of itself."""
    facts = server.facts
    own = {"model": facts["model"], "format": None, "kv": facts["kv"], "executor": None, "notes": ()}
    return own | origin(torch.device("cpu")) | {"card": facts["device"], "commit": None}


def _same_answers(load: Load, engine: Load) -> float | None:
    """Requests are sent in one order by both; those without an answer are not compared."""
    pairs = zip(load.outcomes, engine.outcomes, strict=True)
    found = [a.digest == b.digest for a, b in pairs if a.error is None and b.error is None]
    return round(sum(found) / len(found), 4) if found else None


@dataclass(frozen=True)
class Rates:
    """A load in numbers: tokens a second, and times of each answer."""

    tok_s: float
    prompt_tok_s: float
    ttft_ms: Sequence[float]
    tpot_ms: Sequence[float]
    latency_ms: Sequence[float]

    @classmethod
    def of(cls, load: Load) -> Rates:
        """Of the requests that were answered."""
        good = [each for each in load.outcomes if each.error is None]
        times = [(each.due, each.first, each.last, each.end, each.n_tokens) for each in good]
        return cls(
            round(sum(each.n_tokens for each in good) / load.wall_s, 2),
            round(sum(each.n_prompt for each in good) / load.wall_s, 2),
            [1e3 * (first - due) for due, first, _, _, _ in times if first is not None],
            [1e3 * (last - first) / (n - 1) for _, first, last, _, n in times if first and last and n > 1],
            [1e3 * (end - due) for due, _, _, end, _ in times if end is not None],
        )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that so many percent of them do not exceed; None of none."""
    if not values:
        return None
    ranked = sorted(values)
    return round(ranked[max(0, -(-len(ranked) * percent // 100) - 1)], 3)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
