"""What /metrics tells, in Prometheus' format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bytefloor.engine.pages import Load
from bytefloor.engine.request import Delta, Finish
from bytefloor.server.worker import Handle

_FIRST_TOKEN_S = (0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_TOKEN_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class _LoadCollector(Collector):
    """The engine's load at the moment of the question."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gauges; pages have the kind of layer as a label."""
        load = self._load()
        yield GaugeMetricFamily("bytefloor_requests_waiting", "Requests in the queue.", load.n_waiting)
        yield GaugeMetricFamily("bytefloor_requests_running", "Requests that take part in steps.", load.n_running)
        used = GaugeMetricFamily("bytefloor_pages_used", "Cache pages in use, kept prefixes included.", labels=["kind"])
        free = GaugeMetricFamily("bytefloor_pages_free", "Cache pages that are free.", labels=["kind"])
        for kind, use in load.pages.items():
            used.add_metric([kind], use.n_used)
            free.add_metric([kind], use.n_free)
        yield used
        yield free


class Metrics:
    """Of one server. Counted on the event loop."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(load))
        self._first_token = Histogram(
            "bytefloor_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self._token = Histogram(
            "bytefloor_time_per_token_seconds",
            "Mean time of a request's tokens after the first.",
            buckets=_TOKEN_S,
            registry=self.registry,
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._cached = self._counter("cached_tokens", "Prompt tokens that were in the cache.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._drafted = self._counter("draft_tokens", "Tokens that were proposed and computed.")
        self._accepted = self._counter("draft_tokens_accepted", "Proposed tokens that are in an answer.")
        self._finished = self._counter("requests_finished", "Requests of the engine that ended, by how.", "reason")
        self._errors = self._counter("errors", "Answers with an error status, and streams that ended in one.", "status")
        self._responses = self._counter("http_responses", "HTTP responses.", "path", "status")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"bytefloor_{name}", meaning, labels, registry=self.registry)

    def take(self, deltas: Sequence[tuple[Handle, Delta]]) -> None:
        """All that a step of the engine gave."""
        self._generated.inc(sum(delta.sampled is not None for _, delta in deltas))
        begun = {handle for handle, delta in deltas if handle.first_token_at is None and delta.sampled is not None}
        for handle in begun:
            self._first_token.observe(time.perf_counter() - handle.submitted_at)
        for _, delta in deltas:
            if delta.finish is not None:
                self._ended(delta.finish)

    def _ended(self, finish: Finish) -> None:
        self._finished.labels(finish.reason).inc()
        self._prompt.inc(finish.n_prompt)
        self._cached.inc(finish.n_cached)
        self._drafted.inc(finish.n_draft)
        self._accepted.inc(finish.n_draft_accepted)
        if finish.n_generated > 1 and finish.decode_s > 0:
            self._token.observe(finish.decode_s / (finish.n_generated - 1))

    def responded(self, path: str, status: int) -> None:
        """A response began. path: one of the server's own, or whatever word stands for the others."""
        self._responses.labels(path, status).inc()

    def failed(self, status: int) -> None:
        """An error was answered, or ended a stream."""
        self._errors.labels(status).inc()

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
