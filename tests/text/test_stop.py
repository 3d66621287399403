"""Stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.errors import RequestError
from bytefloor.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """All text let through, and whether it was stopped."""
    matcher = StopMatcher(stops)
    text, is_stopped = "", False
    for piece in pieces:
        more, is_stopped = matcher.push(piece)
        text += more
        if is_stopped:
            break
    return text + matcher.finish(), is_stopped


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read letter by letter: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


def test_a_stop_string_over_several_pieces_ends_the_text_before_it() -> None:
    """V01."""
    alphabet = [letter + " " for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    assert run(alphabet, ["O P Q"]) == ("A B C D E F G H I J K L M N ", True)


def test_a_stop_string_inside_one_piece_loses_the_rest_of_the_piece() -> None:
    """V01."""
    assert run(["one STOP two"], ["STOP"]) == ("one ", True)


def test_a_stop_string_at_the_very_end_counts() -> None:
    """V01."""
    assert run(["one ", "ST", "OP"], ["STOP"]) == ("one ", True)


def test_the_stop_string_that_ended_it_is_told() -> None:
    matcher = StopMatcher(["zz", "OP", "STOP", "TOPS"])
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.found is None
    assert matcher.push("OPS") == ("", True)
    assert matcher.found == "STOP"


def test_the_beginning_of_a_stop_string_waits_and_comes_out_once() -> None:
    """V01, C05: no head leaks, no tail is lost, nothing is doubled."""
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.push("O") == ("", False)
    assert matcher.push("R") == ("STOR", False)
    assert matcher.push("E ST") == ("E ", False)
    assert matcher.finish() == "ST"
    assert matcher.finish() == ""


def test_nothing_comes_out_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.finish() == ""


def test_text_passes_at_once_where_no_stop_string_could_begin() -> None:
    assert StopMatcher(["STOP"]).push("hello") == ("hello", False)
    assert StopMatcher([]).push("hello") == ("hello", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])


@settings(max_examples=500)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_the_cut_into_pieces_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    """V01: a stream equals the whole text."""
    assert run(pieces, stops) == run(["".join(pieces)], stops) == expected("".join(pieces), stops)
