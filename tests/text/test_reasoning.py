"""Thoughts and answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytefloor.text.reasoning import CHANNEL, THINK, ReasoningSplitter, ReasoningTags, split_reasoning


def split(pieces: list[str], tags: ReasoningTags | None, *, is_open: bool = False) -> tuple[str, str]:
    """(thought, answer) of a streamed reply."""
    splitter = ReasoningSplitter(tags, is_open=is_open)
    found = {"reasoning": "", "content": ""}
    for piece in pieces:
        for channel, text in splitter.push(piece):
            assert text
            found[channel] += text
    for channel, text in splitter.finish():
        found[channel] += text
    return found["reasoning"], found["content"]


REPLIES = [
    ("<think>\nfirst\n\nsecond\n</think>\n\nanswer\n", THINK, False, ("first\n\nsecond", "answer\n")),
    ("\n<think>\n\n</think>\n\nanswer", THINK, False, ("", "answer")),
    ("first\n</think>\n\nanswer", THINK, True, ("first", "answer")),
    ("<think>\nfirst</think>answer", THINK, True, ("first", "answer")),
    ("<think>\ncut off in", THINK, False, ("cut off in", "")),
    ("cut off in \n", THINK, True, ("cut off in", "")),
    ("  plain answer", THINK, False, ("", "  plain answer")),
    ("the tag <think> opens, </think> closes", THINK, False, ("", "the tag <think> opens, </think> closes")),
    ("<thin ice", THINK, False, ("", "<thin ice")),
    ("<think>a </thin b</think>c", THINK, False, ("a </thin b", "c")),
    ("<|channel>thought\nhmm\n<channel|>answer", CHANNEL, False, ("hmm", "answer")),
    ("one <|channel>thought\nhmm<channel|> two", CHANNEL, False, ("hmm", "one two")),
    ("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d", CHANNEL, False, ("ac", "bd")),
    ("one <|chan", CHANNEL, False, ("", "one <|chan")),
]


@pytest.mark.parametrize(("text", "tags", "is_open", "wanted"), REPLIES)
def test_a_reply_is_split_alike_wherever_it_is_cut(
    text: str, tags: ReasoningTags, is_open: bool, wanted: tuple[str, str]
) -> None:
    """C03, C05: whole, letter by letter, and cut in two at each place."""
    assert split([text], tags, is_open=is_open) == wanted
    assert split(list(text), tags, is_open=is_open) == wanted
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]], tags, is_open=is_open) == wanted


def test_with_thinking_off_everything_is_content() -> None:
    """C03."""
    assert split(["<think>", "a</think>b"], None) == ("", "<think>a</think>b")


def test_a_thought_cut_off_before_its_end_never_leaks_into_the_answer() -> None:
    """C03."""
    text = "<think>one two</think>three"
    for cut in range(text.index("</think>") + len("</think>")):
        thought, answer = split([text[:cut]], THINK)
        assert answer in ("", text[:cut])
        assert not (thought and answer)
    assert split([text[: text.index("</think>") + 3]], THINK) == ("one two</t", "")


def test_text_streams_on_without_waiting_for_the_end() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.push("<think>") == []
    assert splitter.push("one two") == [("reasoning", "one two")]
    assert splitter.push(" three</") == [("reasoning", " three")]
    assert splitter.push("think>\n\nanswer ") == [("content", "answer ")]
    assert splitter.push("goes on ") == [("content", "goes on ")]
    assert splitter.finish() == []


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "b"]), max_size=10)
CHANNEL_PARTS = st.lists(st.sampled_from(["<|channel>", "thought", "<channel|>", "<|ch", "<", "\n", "a"]), max_size=10)


@settings(max_examples=400)
@given(PARTS, st.booleans())
def test_any_cutting_gives_the_same_split(pieces: list[str], is_open: bool) -> None:
    """C05."""
    text = "".join(pieces)
    assert split(pieces, THINK, is_open=is_open) == split(list(text), THINK, is_open=is_open)
    assert split(pieces, THINK, is_open=is_open) == split_reasoning(text, THINK, is_open=is_open)


@settings(max_examples=400)
@given(CHANNEL_PARTS, st.booleans())
def test_any_cutting_gives_the_same_split_where_thoughts_may_follow_text(pieces: list[str], is_open: bool) -> None:
    """C05."""
    text = "".join(pieces)
    assert split(pieces, CHANNEL, is_open=is_open) == split(list(text), CHANNEL, is_open=is_open)
    assert split(pieces, CHANNEL, is_open=is_open) == split_reasoning(text, CHANNEL, is_open=is_open)
