"""``bench``: tokens a second, and what share of the floor they stand for.

Share = (bytes of the weights that a token needs, in the file's own encoding, + live cache bytes) / (time x stream limit
of the same run). Decoding is greedy with the sampling inside: each token goes from the device to the device. At a depth
the cache holds random values, which cost the same to read as any.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE, DeviceExecutor
from bytefloor.engine.loading import choose_device, make_executor
from bytefloor.engine.memory import Advice
from bytefloor.engine.progress import Silent
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.stream_limit import measure_stream_gb_s
from bytefloor.engine.synthetic import is_synthetic, make_checkpoint
from bytefloor.errors import NumericalError, RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import CacheKind, Step
from bytefloor.tools.models import find_model

WARM_UP = 8
PROMPT_CHUNK = 512
FIRST_TOKEN = 5
MOST_LOGIT_ERROR = 0.2
"""Relative error of logits that TF32, 16-bit codes and bf16 ties may add up to in a deep random model, with room."""
CHECKED = 8
"""Tokens of each measurement that are compared with launching kernel by kernel."""
COLUMNS = ("model", "format", "n_prompt", "n_gen", "depth", "tok_s", "tok_s_spread", "share", "host_us", "checksum")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure: prompts, tokens, depths, how often."""

    n_prompt: tuple[int, ...]
    n_gen: int
    depths: tuple[int, ...]
    repeats: int
    device: str = "auto"
    capacity: int | None = None


@dataclass(frozen=True)
class Row:
    """One measurement. Rates are medians; spread is (largest - smallest) / median.

    file_bytes: a token's weights and live cache as the file encodes them; moved_bytes: what the device's own layout
    makes of them. host_us: the host's time to start one token.
    """

    verb: str
    model: str
    format: str
    n_prompt: int
    n_gen: int
    depth: int
    batch: int
    tok_s: float
    tok_s_spread: float
    share: float
    file_bytes: int
    moved_bytes: int
    stream_gb_s: float
    host_us: float
    capacity: int
    device_memory_gb: float
    checksum: str
    card: str
    clock_mhz: int
    commit: str
    date: str


def bench(name: str | None, options: BenchOptions) -> Iterable[Row]:
    """Rows as they are measured.

    NumericalError when kernels disagree with torch operations over the same weights, or a replayed graph with its
    kernels launched one by one.
    """
    device = choose_device(options.device)
    model = open_model(name, device)
    margin = max(options.n_gen + WARM_UP + CHECKED + 2, MOST_ROWS_ONE_BY_ONE + 8)
    most = min(options.capacity or model.config.context_length, model.config.context_length)
    depths = _those_that_fit(options.depths, most - margin)
    prompts = _those_that_fit(options.n_prompt, most - margin)
    if not depths and not prompts:
        raise RequestError(f"nothing to measure: {margin} positions beside prompt or depth, {most} in all")
    capacity = options.capacity or max((*depths, *prompts)) + margin
    words = "a shorter context (-c) needs less" if options.capacity else "smaller -d or -p need less"
    notes, advice = _Notes(), Advice(words, words)
    executor, notices = make_executor(model, CachePlan(capacity, PROMPT_CHUNK), device, progress=notes, advice=advice)
    assert isinstance(executor, DeviceExecutor | ReferenceExecutor)
    for notice in notices:
        notes.note(notice)
    runner = _Runner(executor, model, options, measure_stream_gb_s(device))
    runner.check_kernels()
    for depth in depths:
        yield runner.decode(depth)
    for n_prompt in prompts:
        yield runner.prompt(n_prompt)


class _Notes(Silent):
    """Lines on standard error; a measurement needs no bar."""

    def note(self, line: str) -> None:
        """One line."""
        print(f"note: {line}", file=sys.stderr)


def _those_that_fit(lengths: tuple[int, ...], most: int) -> list[int]:
    """Lengths that the context has room for; the others are named."""
    for length in lengths:
        if length > most:
            print(f"note: {length} positions do not fit in the context and are left out", file=sys.stderr)
    return [length for length in lengths if length <= most]


def open_model(name: str | None, device: torch.device) -> Model:
    """A path, a pulled name, or ``synthetic:...``."""
    if is_synthetic(name):
        assert name is not None
        return load_model(make_checkpoint(name, device))
    return load_model(open_checkpoint(find_model(name)))


def token_bytes(step: Step, depth: int) -> tuple[int, int]:
    """Weights and live cache that a token at a depth must read, in the file's encoding."""
    sizes = {"T": 1, "R": 1, "B": 1, "S": depth + 1}
    weights = sum(call.weight_bytes(sizes) for call in step.calls)
    return weights, sum(call.cache_bytes(sizes) for call in step.calls if call.op.reads_cache)


def main_format(model: Model) -> str:
    """The format that most of the bytes have."""
    totals: dict[str, int] = {}
    for tensor in model.checkpoint.tensors.values():
        totals[tensor.format_name] = totals.get(tensor.format_name, 0) + tensor.n_bytes
    return max(totals, key=lambda name: totals[name])


class _Runner:
    def __init__(
        self, executor: DeviceExecutor | ReferenceExecutor, model: Model, options: BenchOptions, stream_gb_s: float
    ) -> None:
        self.executor, self.model, self.options, self.stream_gb_s = executor, model, options, stream_gb_s
        self._fill_cache()

    def _fill_cache(self) -> None:
        generator = torch.Generator(self.executor.device).manual_seed(1)
        for pool in self.executor.pools.values():
            pool.normal_(generator=generator)

    def _cache_at(self, depth: int) -> SequenceCache:
        kinds: tuple[CacheKind, ...] = self.executor.step.kinds
        cache = SequenceCache(self.executor.plan, kinds, make_pools(self.executor.plan, kinds))
        while cache.length < depth:
            n = min(64, depth - cache.length)
            cache.reserve(n)
            cache.commit(n)
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

    def _check(self, depth: int) -> str:
        """The same tokens twice, from one cache: replayed and, on a device, launched kernel by kernel."""
        replayed = self._decode(self._cache_at(depth), CHECKED, FIRST_TOKEN)
        again = self._one_by_one(depth)
        if min(replayed) < 0 or replayed != again:
            raise NumericalError(f"depth {depth}: tokens {replayed} replayed, {again} one by one: a kernel is wrong")
        return hashlib.sha256(repr(replayed).encode()).hexdigest()[:12]

    def _one_by_one(self, depth: int) -> list[int]:
        cache, token, found = self._cache_at(depth), FIRST_TOKEN, []
        for _ in range(CHECKED):
            batch = Batch()
            cache.append_rows(batch, [token], [0])
            eager = {"is_eager": True} if isinstance(self.executor, DeviceExecutor) else {}
            token = int(self.executor.run(batch, **eager)[0].argmax())  # type: ignore[arg-type]
            found.append(token)
            cache.commit(1)
        return found

    def check_kernels(self) -> None:
        """The last logits of a short prompt through the decode kernels and through the plain list of torch operations.

        NumericalError when they differ by more than roundings can explain: a speed is worth nothing without it.
        """
        if not isinstance(self.executor, DeviceExecutor):
            return
        ids = [(FIRST_TOKEN + 7 * i) % 200 for i in range(MOST_ROWS_ONE_BY_ONE + 8)]
        plain, kernels = (self._last_logits(ids, chunk) for chunk in (len(ids), 1))
        error = float((kernels - plain).norm() / plain.norm())
        # NaN fails too: it compares false with everything.
        if not error < MOST_LOGIT_ERROR:
            raise NumericalError(
                f"logits of the decode kernels differ from the plain list by {error:.3g}, "
                f"expected below {MOST_LOGIT_ERROR}: a kernel is wrong"
            )

    def _last_logits(self, ids: list[int], chunk: int) -> torch.Tensor:
        cache = self._cache_at(0)
        logits = torch.empty(0)
        for start in range(0, len(ids), chunk):
            rows, batch = ids[start : start + chunk], Batch()
            cache.append_rows(batch, rows, [len(rows) - 1])
            logits = self.executor.run(batch)[0].clone()
            cache.commit(len(rows))
        return logits

    def decode(self, depth: int) -> Row:
        """Tokens a second at a depth."""
        checksum, n_gen = self._check(depth), self.options.n_gen
        self._decode(self._cache_at(depth), WARM_UP, FIRST_TOKEN)
        rates = []
        for _ in range(self.options.repeats):
            cache = self._cache_at(depth)
            start = self._now()
            self._decode(cache, n_gen, FIRST_TOKEN)
            rates.append(n_gen / (self._now() - start))
        return self._row("decode", 0, n_gen, depth, rates, checksum)

    def prompt(self, n_prompt: int) -> Row:
        """Prompt tokens a second from an empty cache."""
        rates = []
        for _ in range(min(self.options.repeats, 2)):
            cache = self._cache_at(0)
            start = self._now()
            for first in range(0, n_prompt, self.executor.plan.chunk):
                n = min(self.executor.plan.chunk, n_prompt - first)
                batch = Batch()
                cache.append_rows(batch, [FIRST_TOKEN] * n, [n - 1])
                self.executor.run(batch)
                cache.commit(n)
            rates.append(n_prompt / (self._now() - start))
        return self._row("prompt", n_prompt, 0, 0, rates, "")

    def _now(self) -> float:
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)
        return time.perf_counter()

    def _host_us(self) -> float:
        return self.executor.host_us() if isinstance(self.executor, DeviceExecutor) else 0.0

    def _row(self, verb: str, n_prompt: int, n_gen: int, depth: int, rates: list[float], checksum: str) -> Row:
        rate = sorted(rates)[len(rates) // 2]
        weights, cache = token_bytes(self.executor.step, depth + n_gen // 2)
        moved = self.executor.moved_bytes()
        share = (weights + cache) * rate / (self.stream_gb_s * 1e9) if verb == "decode" else 0.0
        return Row(
            verb=verb,
            model=self.model.config.name,
            format=main_format(self.model),
            n_prompt=n_prompt,
            n_gen=n_gen,
            depth=depth,
            batch=1,
            tok_s=round(rate, 2),
            tok_s_spread=round((max(rates) - min(rates)) / rate, 4),
            share=round(share, 4),
            file_bytes=weights + cache,
            moved_bytes=moved + cache,
            stream_gb_s=round(self.stream_gb_s, 1),
            host_us=round(self._host_us(), 1),
            capacity=self.executor.plan.capacity,
            device_memory_gb=round(_memory_gb(self.executor.device), 3),
            checksum=checksum,
            card=_card(self.executor.device),
            clock_mhz=_clock_mhz(self.executor.device),
            commit=_commit(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )


def _memory_gb(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _clock_mhz(device: torch.device) -> int:
    """Of the multiprocessors, now; 0 where it cannot be read."""
    try:
        return int(torch.cuda.clock_rate(device)) if device.type == "cuda" else 0
    except (RuntimeError, ModuleNotFoundError):
        return 0


def _commit() -> str:
    """Of the checkout that runs; empty outside one."""
    command = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def print_rows(rows: Sequence[Row], output: str) -> None:
    """md, json or csv on standard output."""
    if output == "json":
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table: list[list[Any]] = [[getattr(row, column) for column in COLUMNS] for row in rows]
    if output == "csv":
        print(",".join(COLUMNS))
        for line in table:
            print(",".join(str(cell) for cell in line))
        return
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for line in table:
        print("| " + " | ".join(str(cell) for cell in line) + " |")
