"""Two profiles side by side: what differs, and what is not comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytefloor.errors import RequestError
from bytefloor.tools.profile_compare import compare
from bytefloor.tools.profile_data import Profile
from made_profiles import Truth, made_profile

NAME = "synthetic:smollm2-135m/"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return made_profile(NAME + "Q8_0", (0, 100), (64,))


def without_last_matrix(profile: Profile) -> Profile:
    steps = tuple(
        replace(step, spans=tuple(replace(span, weights=()) for span in step.spans)) for step in profile.steps
    )
    return replace(profile, matrices=profile.matrices[:-1], steps=steps)


def test_a_profile_differs_nowhere_from_itself(profile: Profile) -> None:
    found = compare(profile, profile)
    assert [step.steps[0].title for step in found] == [step.title for step in profile.steps]
    assert all(row.more_us == 0 and row.share is None for step in found for row in step.differences)


def test_shares_add_up_to_all_of_the_difference(profile: Profile) -> None:
    boundaries = {**Truth().boundaries, "down": 4.7, "attention": 5.5}
    slower = made_profile(NAME + "Q8_0", (0,), (), Truth(boundaries=boundaries))
    [token] = compare(profile, slower)
    by_name = {row.name: row for row in token.differences}
    assert by_name["down"].more_us == pytest.approx(30 * 2.0, abs=0.1)
    assert by_name["attention"].more_us == pytest.approx(30 * -1.0, abs=0.1)
    assert by_name["down"].share == pytest.approx(2.0, abs=0.01)
    assert sum(row.share for row in token.differences) == pytest.approx(1.0)
    assert sum(row.us[1] for row in token.differences) == pytest.approx(token.steps[1].profiled_us)
    assert by_name["down"].n_launches == (30, 30)


def test_another_format_is_predicted_by_the_first_ones_model() -> None:
    a, b = (made_profile(f"synthetic:llama31-8b/{mixture}", (0,), (64,)) for mixture in ("Q4_K_M", "Q8_0"))
    token, chunk = compare(a, b)
    assert abs(token.miss) < 0.01
    assert token.predicted.needed_bytes == b.tokens[0].needed_bytes
    assert chunk.predicted is None
    assert chunk.miss is None
    assert compare(a, a)[0].predicted is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, executor="reference"), "one profile is of kernels, the other of reference"),
        (lambda p: made_profile("synthetic:gemma3-270m/Q8_0", (0,), ()), "different models: embedding is 49152 x 576"),
        (lambda p: without_last_matrix(p), "here, absent there"),
        (lambda p: replace(p, steps=(replace(p.steps[0], depth=7),)), "no step is in both profiles: token at depth 0"),
    ],
)
def test_different_kinds_of_thing_are_refused(profile: Profile, change: object, words: str) -> None:
    other = change(profile)
    with pytest.raises(RequestError, match=words):
        compare(profile, other)


def test_a_head_of_its_own_is_no_other_model(profile: Profile) -> None:
    """A tied head and one of its own are the same model in two files."""
    head = replace(profile.matrices[0], name="head")
    assert compare(profile, replace(profile, matrices=(*profile.matrices, head)))
