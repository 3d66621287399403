"""A profile as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each step is a process of its own, all beginning at 0. Its first row is the chain, where a slice begins at the end of
what came before it and has two slices in it, wait and work. The rows below show when each kernel was really there:
the next one comes before the last one has ended, so that they lie on several.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytefloor.tools.profile_data import Link, Profile, Span, StepProfile

Event = dict[str, Any]
CHAIN = 0


def write_trace(profile: Profile, path: Path) -> None:
    """As a JSON object of trace events."""
    path.write_text(json.dumps(trace_of(profile)) + "\n")


def trace_of(profile: Profile) -> Event:
    """Microseconds, as the format has it."""
    events = [event for i, step in enumerate(profile.steps) for event in _step_events(profile, step, i + 1)]
    beside = {"model": profile.model, "card": profile.card, "commit": profile.commit, "date": profile.date}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": beside}


def _step_events(profile: Profile, step: StepProfile, process: int) -> Iterator[Event]:
    yield _named("process_name", process, CHAIN, step.title)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": CHAIN, "args": {"sort_index": process}}
    yield _named("thread_name", process, CHAIN, "chain")
    for link in step.links:
        yield from _chain_slices(profile, link, process)
    rows: list[int] = []
    for span in step.spans:
        start, end = _ns(span.start_us), _ns(span.end_us)
        row = next((i for i, free in enumerate(rows) if free <= start), len(rows))
        rows[row : row + 1] = [end]
        yield _slice(
            _title(span),
            span.kind,
            process,
            CHAIN + 1 + row,
            start,
            end,
            _facts(profile, span, span.end_us - span.start_us),
        )
    for row in range(len(rows)):
        yield _named("thread_name", process, CHAIN + 1 + row, f"there {row + 1}")


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _chain_slices(profile: Profile, link: Link, process: int) -> Iterator[Event]:
    # In whole nanoseconds, so that what is in a slice ends no later than the slice.
    begin, end = _ns(link.begin_us), _ns(link.begin_us + link.us)
    ready = min(_ns(link.begin_us + link.wait_us), end)
    span = link.span
    yield _slice(_title(span), span.kind, process, CHAIN, begin, end, _facts(profile, span, link.us))
    yield _slice("wait", span.kind, process, CHAIN, begin, ready, {})
    yield _slice("work", span.kind, process, CHAIN, ready, end, {})


def _slice(name: str, kind: str, process: int, thread: int, begin: int, end: int, facts: Event) -> Event:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times, "args": facts}


def _ns(us: float) -> int:
    return round(us * 1000)


def _title(span: Span) -> str:
    return span.kind if span.layer is None else f"{span.layer} {span.kind}"


def _facts(profile: Profile, span: Span, us: float) -> Event:
    gb_s = span.needed_bytes / us / 1e3 if us > 0 else 0.0
    return {
        "part": span.part,
        "kernel": span.name,
        "formats": ", ".join(span.formats),
        "file_bytes": span.file_bytes,
        "moved_bytes": span.moved_bytes,
        "cache_bytes": span.cache_bytes,
        "flops": span.flops,
        "gb_s": round(gb_s, 1),
        "share_of_limit": round(gb_s / profile.stream_gb_s, 4),
    }
