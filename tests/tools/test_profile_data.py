"""Profiles as data: times along the chain, what they add up to, and the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bytefloor.errors import FileError
from bytefloor.tools.profile_data import Profile, Span, StepProfile, read_profile, total_us, write_profile
from made_profiles import made_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return made_profile("synthetic:smollm2-135m/Q4_K_M", depths=(0, 100), chunks=(64,))


def span(index: int, start: float, ready: float, end: float, **more: object) -> Span:
    made = Span(index, "layers.0.mlp", 0, "down", "product", (), (), 10, 12, 4, 20, start, ready, end)
    return replace(made, **more)


def step(*spans: Span, wall: float = 20.0, profiled: float = 22.0) -> StepProfile:
    return StepProfile("token", 1, 0, spans, wall, profiled, None, 3, None)


def test_times_are_counted_along_the_chain() -> None:
    """Each next kernel is there before the last has ended; what it waits for is not its work."""
    found = step(span(0, 1, 2, 5), span(1, 2, 7, 11), span(2, 3, 12, 20))
    assert [(link.begin_us, link.wait_us, link.work_us) for link in found.links] == [(1, 1, 3), (5, 2, 4), (11, 1, 8)]
    assert (found.begin_us, found.end_us) == (1, 2)
    assert total_us(found.links) + found.gaps_us == found.profiled_us
    assert found.sums_to == pytest.approx(22 / 20)
    assert found.overhead == pytest.approx(0.1)


def test_a_kernel_that_ends_within_another_takes_no_time_of_its_own() -> None:
    found = step(span(0, 0, 1, 10), span(1, 1, 2, 8), span(2, 1, 3, 12))
    assert [(link.wait_us, link.work_us) for link in found.links] == [(1, 9), (0, 0), (0, 2)]
    late = step(span(0, 0, 1, 10), span(1, 1, 15, 12))  # ready only said after its end
    assert late.links[1].wait_us == 2
    assert late.links[1].work_us == 0


def test_bytes_and_launches_add_up() -> None:
    found = step(span(0, 0, 1, 2), span(1, 1, 2, 4, kind="torch", name="torch"), span(2, 1, 5, 6))
    assert (found.needed_bytes, found.streamed_bytes, found.flops) == (42, 48, 60)
    assert found.n_launches == 2
    assert found.floor_us(21.0) == pytest.approx(42 / 21e3)
    assert list(found.links_by_kind()) == ["down", "torch"]


def test_parts_of_a_made_token_are_its_wall_time(profile: Profile) -> None:
    for token in profile.tokens:
        assert sum(link.us for link in token.links) + token.gaps_us == pytest.approx(token.profiled_us)
        assert 1 < token.sums_to < 1.02


def test_a_file_is_read_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert json.loads(path.read_text())["version"] == 1


def changed(profile: Profile, tmp_path: Path, change: object) -> str:
    """The complaint about a file in which something was changed."""
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(FileError) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.update(version=7), "a profile of version 7, expected 1"),
        (lambda fields: fields.pop("version"), "expected an object with a version"),
        (lambda fields: fields.pop("model"), "missing required field `model`"),
        (lambda fields: fields.update(steps=[]), "a profile without steps"),
        (lambda fields: fields.update(stream_gb_s=0), "a machine that reads nothing"),
        (lambda fields: fields["steps"][1].update(spans=[]), "a step without spans"),
        (lambda fields: fields["steps"][0].update(wall_us=0), "a step that takes no time"),
        (lambda fields: fields["steps"][0].update(rows="1"), "`$.steps[0].rows`"),
        (lambda fields: fields["steps"][0]["spans"][3].update(kind="q"), "Invalid enum value 'q'"),
        (lambda fields: fields["matrices"].pop(5), "which is not among the matrices"),
        (lambda fields: fields["caches"].pop(1), "layer 1 has no cache"),
        (lambda fields: fields.update(kv="q4"), "a cache of q4, of which no layer says what a position takes"),
    ],
)
def test_a_file_that_is_no_profile_says_where(profile: Profile, tmp_path: Path, change: object, words: str) -> None:
    assert words in changed(profile, tmp_path, change)


@pytest.mark.parametrize("text", ["", "[", "[1]", '"a"', "\xff\xfe", '{"version": 1}'])
def test_any_other_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match="no profile"):
        read_profile(path)
