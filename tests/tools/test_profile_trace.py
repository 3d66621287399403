"""The Chrome trace of a profile: what Perfetto needs of it, and that it says what the profile says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bytefloor.tools.profile_data import Profile
from bytefloor.tools.profile_trace import CHAIN, trace_of, write_trace
from made_profiles import made_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return made_profile("synthetic:gemma4-e4b/Q4_K_M", (0, 100), (64,))


@pytest.fixture(scope="module")
def events(profile: Profile) -> list[dict[str, Any]]:
    return json.loads(json.dumps(trace_of(profile)))["traceEvents"]


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def test_every_event_is_whole(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0


def test_slices_of_a_row_lie_in_each_other_or_apart(events: list[dict[str, Any]]) -> None:
    """Anything else Perfetto drops."""
    for row in slices(events).values():
        ends: list[float] = []
        for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while ends and ends[-1] <= begin + 1e-9:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-6
            ends.append(end)


def test_each_step_is_a_process_and_each_row_has_a_name(profile: Profile, events: list[dict[str, Any]]) -> None:
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(named.values()) == [step.title for step in profile.steps]
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert threads == set(slices(events))
    # Kernels of a token are there two at a time, in two rows beside the chain.
    assert sum(pid == 1 for pid, _ in threads) == 3


def test_the_chain_is_the_profiles(profile: Profile, events: list[dict[str, Any]]) -> None:
    for process, step in enumerate(profile.steps, 1):
        chain = slices(events)[process, CHAIN]
        whole = [event for event in chain if event["name"] not in ("wait", "work")]
        assert len(whole) == len(step.spans)
        for event, link in zip(whole, step.links, strict=True):
            assert event["ts"] == pytest.approx(link.begin_us, abs=2e-3)
            assert event["dur"] == pytest.approx(link.us, abs=2e-3)
            assert event["cat"] == link.span.kind
            assert event["args"]["moved_bytes"] == link.span.moved_bytes
            assert event["args"]["part"] == link.span.part
        for name in ("wait", "work"):
            total = sum(event["dur"] for event in chain if event["name"] == name)
            assert total == pytest.approx(sum(getattr(link, f"{name}_us") for link in step.links), abs=1.0)


def test_the_file_is_one_json_object(profile: Profile, tmp_path: Path) -> None:
    write_trace(profile, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found["displayTimeUnit"] == "ns"
    assert found["otherData"]["model"] == profile.model
