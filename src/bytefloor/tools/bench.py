"""``bench``: tokens a second, and what share of the floor they stand for. docs/bench.md says what each row means.

Share = (bytes of the weights that a token needs, in the file's own encoding, + live cache bytes) / (time x stream limit
of the same run). Decoding is measured twice: greedy, each token going from the device to the device, and sampled as a
user's request is. At a depth the cache holds random values, which cost the same to read as any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import Room, SequenceCache
from bytefloor.engine.decode_loop import N_AHEAD, DecodeLoop
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE, DeviceExecutor
from bytefloor.engine.kernels import cache_folder
from bytefloor.engine.loading import check_kv, choose_device, make_executor
from bytefloor.engine.memory import Advice
from bytefloor.engine.progress import Silent
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import is_synthetic, make_checkpoint
from bytefloor.errors import NumericalError, RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.tools.bench_check import check_kernels
from bytefloor.tools.bench_prompt import PromptSpeed, empty_cache, measure_prompt
from bytefloor.tools.bench_rows import (
    Row,
    free_memory,
    measure_limit,
    measure_peak,
    origin,
    peak_memory_gb,
    say,
    spread,
)
from bytefloor.tools.bench_together import (
    CHECKED,
    FIRST_TOKEN,
    Together,
    fill_to,
    launched,
    now,
    randomise_cache,
    those_that_fit_together,
)
from bytefloor.tools.models import find_model

WARM_UP = 8


@dataclass(frozen=True)
class BenchOptions:
    """What to measure: prompts, tokens, depths, how often. kv: what the cache keeps, see ``EngineOptions``.

    is_sampled: whether a sequence that decodes alone is measured with default sampling too, beside best tokens.
    """

    n_prompt: tuple[int, ...]
    n_gen: int
    depths: tuple[int, ...]
    repeats: int
    device: str = "auto"
    capacity: int | None = None
    kv: str | None = None
    batches: tuple[int, ...] = (1,)
    is_sampled: bool = True


def bench(name: str | None, options: BenchOptions, limit: StreamLimit | None = None) -> Iterator[Row]:
    """Rows as they are measured. limit: of this run, where it was measured already.

    NumericalError when kernels disagree with torch operations over the same weights, or a replayed graph with its
    kernels launched one by one.
    """
    check_kv(options.kv)
    device = choose_device(options.device)
    depths, prompts, capacity = _choose_lengths(open_model(name, device), options)
    limit = limit or measure_limit(device)
    words = "a shorter context (-c) needs less" if options.capacity else "smaller -d or -p need less"
    peak_tflops = measure_peak(device) if prompts else None
    room = Room(capacity, n_sequences=max(options.batches, default=1))
    opened = _open(name, room, device, Advice(words, words), options.kv)
    say(opened.notices)
    batches = those_that_fit_together(opened.executor, options.batches, options.n_gen)
    runner = _Runner(opened, options, limit, peak_tflops)
    check_kernels(opened.executor)
    for depth in depths:
        for n in batches:
            if n > 1:
                yield runner.decode_together(depth, n)
                continue
            yield runner.decode(depth)
            if options.is_sampled:
                yield runner.decode_sampled(depth)
    for n_prompt in prompts:
        yield runner.prompt(n_prompt)


def _choose_lengths(model: Model, options: BenchOptions) -> tuple[list[int], list[int], int]:
    """Depths and prompts that the context has room for, and the capacity they need."""
    margin = max(options.n_gen + WARM_UP + CHECKED + 2, MOST_ROWS_ONE_BY_ONE + 8)
    most = min(options.capacity or model.config.context_length, model.config.context_length)
    depths = _those_that_fit(options.depths, most - margin)
    prompts = _those_that_fit(options.n_prompt, most if most >= margin else 0)
    if not (options.depths and options.batches) and not options.n_prompt:
        raise RequestError("nothing to measure: -d and -p are both empty")
    if not (depths and options.batches) and not prompts:
        raise RequestError(f"nothing to measure: {margin} positions beside a depth, {most} in all")
    return depths, prompts, options.capacity or max((margin, *(depth + margin for depth in depths), *prompts))


class _Notes(Silent):
    """Lines on standard error; a measurement needs no bar."""

    def note(self, line: str) -> None:
        """One line."""
        say([line])


def _those_that_fit(lengths: tuple[int, ...], most: int) -> list[int]:
    """Lengths that the context has room for; the others are named."""
    say([f"{n} positions do not fit in the context and are left out" for n in lengths if n > most])
    return [length for length in lengths if length <= most]


def open_model(name: str | None, device: torch.device) -> Model:
    """A path, a pulled name, or ``synthetic:...``."""
    if is_synthetic(name):
        assert name is not None
        return load_model(make_checkpoint(name, device))
    return load_model(open_checkpoint(find_model(name)))


@dataclass(frozen=True)
class _Opened:
    model: Model
    executor: DeviceExecutor | ReferenceExecutor
    notices: tuple[str, ...]
    load_s: float
    first_start_s: float | None = None


def _open(name: str | None, room: Room, device: torch.device, advice: Advice, kv: str | None) -> _Opened:
    """Open and time it; once more where the first time had kernels to compile, to time it without."""
    n_compiled = _count_compiled()
    opened = _open_once(name, room, device, advice, kv)
    if _count_compiled() == n_compiled:
        return opened
    first_start_s = opened.load_s
    del opened
    free_memory(device)
    again = _open_once(name, room, device, advice, kv)
    return _Opened(again.model, again.executor, again.notices, again.load_s, first_start_s)


def _open_once(name: str | None, room: Room, device: torch.device, advice: Advice, kv: str | None) -> _Opened:
    start = now(device)
    model = open_model(name, device)
    executor, notices = make_executor(model, room, device, progress=_Notes(), advice=advice, kv=kv)
    assert isinstance(executor, DeviceExecutor | ReferenceExecutor)
    return _Opened(model, executor, notices, round(now(device) - start, 3))


def _count_compiled() -> int:
    """Kernels in the cache on disk."""
    return sum(1 for _ in cache_folder().glob("*.cubin"))


def main_format(model: Model) -> str:
    """The format that most of the bytes have."""
    totals: dict[str, int] = {}
    for tensor in model.checkpoint.tensors.values():
        totals[tensor.format_name] = totals.get(tensor.format_name, 0) + tensor.n_bytes
    return max(totals, key=lambda name: totals[name])


class _Runner:
    def __init__(self, opened: _Opened, options: BenchOptions, limit: StreamLimit, peak_tflops: float | None) -> None:
        self.opened, self.options, self.limit, self.peak_tflops = opened, options, limit, peak_tflops
        self.executor = opened.executor
        self._loop = self.executor.make_loop()
        randomise_cache(self.executor)

    def _cache_at(self, depth: int) -> SequenceCache:
        cache = empty_cache(self.executor)
        fill_to(cache, depth)
        return cache

    def _decode(self, cache: SequenceCache, n_tokens: int, token: int) -> list[int]:
        """n_tokens best tokens in a row after a token at the cache's end."""
        found: list[int] = []
        if isinstance(self.executor, DeviceExecutor):
            while len(found) < n_tokens:
                n = min(n_tokens - len(found), self.executor.plan.chunk)
                batch = Batch()
                cache.append_rows(batch, [token], [0], n_reserved=n)
                found += self.executor.decode_greedy(batch, n).tolist()
                cache.commit(n)
                token = found[-1]
            return found
        for _ in range(n_tokens):
            batch = Batch()
            cache.append_rows(batch, [token], [0])
            token = int(self.executor.run(batch)[0].argmax())
            found.append(token)
            cache.commit(1)
        return found

    def _sample(self, cache: SequenceCache, n_tokens: int, token: int) -> list[int]:
        """n_tokens as a request with default parameters gets them from the engine, but for their text.

        The way a user's token takes stands here and in ``Engine.step``, and nowhere else.
        """
        sampler = Sampler(SamplingParams(seed=1), [token])
        if self._loop is not None:
            return self._sample_ahead(self._loop, cache, sampler, n_tokens, token)
        found: list[int] = []
        for _ in range(n_tokens):
            batch = Batch()
            cache.append_rows(batch, [token], [0])
            logits = self.executor.run(batch).float().cpu().numpy()
            token = sampler.sample(logits[0], cache.length).id
            found.append(token)
            cache.commit(1)
        return found

    @staticmethod
    def _sample_ahead(loop: DecodeLoop, cache: SequenceCache, sampler: Sampler, n_tokens: int, token: int) -> list[int]:
        """The same from device to device, read one step behind."""
        ids, found = [token] * (cache.length + 1), list[int]()
        loop.start(sampler, ids, len(ids))
        first = Batch()
        cache.show(first, 1)
        loop.launch(first)
        while len(found) < n_tokens:
            while loop.n_under_way < min(N_AHEAD, n_tokens - len(found)):
                n_rows, shown = loop.n_under_way + 1, None
                if not cache.is_writable(n_rows):
                    shown = Batch()
                    cache.show(shown, n_rows)
                loop.launch(shown)
            sampled = loop.next()
            if sampled is None:
                raise NumericalError(f"position {cache.length}: no token could be chosen")
            found.append(sampled.id)
            cache.commit(1)
        loop.stop()
        return found

    def _check(self, depth: int) -> None:
        """On a device: the same tokens from one cache, replayed and launched kernel by kernel."""
        if not isinstance(self.executor, DeviceExecutor):
            return
        replayed = self._decode(self._cache_at(depth), CHECKED, FIRST_TOKEN)
        again = launched(self.executor, self._cache_at(depth), FIRST_TOKEN)
        if min(replayed) < 0 or replayed != again:
            raise NumericalError(f"depth {depth}: tokens {replayed} replayed, {again} one by one: a kernel is wrong")

    def decode(self, depth: int) -> Row:
        """Best tokens a second at a depth."""
        self._check(depth)
        rates, tokens = self._time_tokens(self._decode, depth)
        return self._row("decode", "greedy", 0, depth, rates, _hash(tokens))

    def decode_sampled(self, depth: int) -> Row:
        """Sampled tokens a second at a depth."""
        rates, tokens = self._time_tokens(self._sample, depth)
        return self._row("decode", "sampled", 0, depth, rates, _hash(tokens))

    def decode_together(self, depth: int, n: int) -> Row:
        """Best tokens a second of n sequences at a depth, a step of all at a time."""
        together = Together(self.executor, depth, n)
        together.check()
        rates, tokens = zip(*together.measure(self.options.n_gen, self.options.repeats), strict=True)
        return self._row("decode", "greedy", 0, depth, list(rates), _hash(tokens[-1]), n)

    def _time_tokens(
        self, make: Callable[[SequenceCache, int, int], list[int]], depth: int
    ) -> tuple[list[float], list[int]]:
        """Rates, and the tokens, of which every repeat makes the same."""
        n_gen, tokens = self.options.n_gen, []
        make(self._cache_at(depth), WARM_UP, FIRST_TOKEN)
        rates = []
        for _ in range(self.options.repeats):
            cache = self._cache_at(depth)
            start = now(self.executor.device)
            tokens = make(cache, n_gen, FIRST_TOKEN)
            rates.append(n_gen / (now(self.executor.device) - start))
        return rates, tokens

    def prompt(self, n_prompt: int) -> Row:
        """Prompt tokens a second from an empty cache."""
        speed = measure_prompt(self.executor, n_prompt, self.options.repeats, self.peak_tflops)
        return self._row("prompt", None, n_prompt, 0, speed.rates, None, speed=speed)

    def _row(
        self,
        verb: str,
        sampling: str | None,
        n_prompt: int,
        depth: int,
        rates: list[float],
        checksum: str | None,
        batch: int = 1,
        speed: PromptSpeed | None = None,
    ) -> Row:
        rate, device, model = median(rates), self.executor.device, self.opened.model
        kernels = self.executor if isinstance(self.executor, DeviceExecutor) else None
        n_gen = 0 if n_prompt else self.options.n_gen
        weights, cache = self.executor.step.token_bytes(depth + n_gen // 2)
        cache *= batch
        speed = speed or PromptSpeed(rates)
        share = (weights + cache) * (rate / batch) / (self.limit.gb_s * 1e9)
        return Row(
            verb=verb,
            model=model.config.name,
            format=main_format(model),
            sampling=sampling,
            n_prompt=n_prompt,
            n_gen=n_gen,
            depth=depth,
            batch=batch,
            kv=self.executor.step.storage,
            tok_s=round(rate, 2),
            tok_s_spread=spread(rates),
            share=round(share, 4) if verb == "decode" else None,
            tflops=speed.tflops,
            peak_tflops=speed.peak_tflops,
            share_of_peak=speed.share_of_peak,
            attention_share=speed.attention_share,
            file_bytes=weights + cache,
            moved_bytes=self.executor.moved_bytes() + cache,
            stream_gb_s=round(self.limit.gb_s, 1),
            host_us=round(kernels.host_us(), 1) if kernels and sampling == "greedy" and batch == 1 else None,
            load_s=self.opened.load_s,
            first_start_s=self.opened.first_start_s,
            capacity=self.executor.plan.capacity,
            device_memory_gb=peak_memory_gb(device),
            host_memory_gb=round(kernels.memory_plan.on_host / 1e9, 3) if kernels else None,
            checksum=checksum,
            executor="kernels" if kernels else "reference",
            notes=tuple(note for note in (*self.opened.notices, self.limit.notice) if note),
            **origin(device),
        )


def _hash(tokens: list[int]) -> str:
    return hashlib.sha256(repr(tokens[:CHECKED]).encode()).hexdigest()[:12]
