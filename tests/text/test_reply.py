"""Answers told apart: text, thought, calls, however they are cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bytefloor.text.calls import GEMMA4, HERMES, LLAMA3, CallFormat, format_of
from bytefloor.text.reasoning import CHANNEL, THINK, ReasoningSplitter, ReasoningTags
from bytefloor.text.reply import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallFailed,
    Event,
    FinishedCall,
    Reply,
    ReplySplitter,
    Text,
    call_id,
    collected,
)

NAMES = ("weather", "now", "ns.f-1")


def events_of(
    pieces: Sequence[str], format: CallFormat | None, tags: ReasoningTags | None = None, *, is_open: bool = False
) -> list[Event]:
    """All events of an answer."""
    splitter = ReplySplitter(ReasoningSplitter(tags, is_open=is_open), format, NAMES, "a")
    events = [event for piece in pieces for event in splitter.push(piece)]
    return [*events, *splitter.finish()]


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbouring pieces of one text put together."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        is_text = isinstance(event, Text) and isinstance(last, Text) and event.channel == last.channel
        if is_text or (isinstance(event, CallArguments) and isinstance(last, CallArguments)):
            found[-1] = replace(last, text=last.text + event.text)
        else:
            found.append(event)
    return found


def read(text: str, format: CallFormat | None, tags: ReasoningTags | None = None) -> Reply:
    """The whole answer, the same cut whole, letter by letter, and in two at each place."""
    wanted = joined(events_of([text], format, tags))
    assert joined(events_of(list(text), format, tags)) == wanted
    for cut in range(len(text)):
        assert joined(events_of([text[:cut], text[cut:]], format, tags)) == wanted, cut
    check_order(wanted)
    return collected(wanted)


def check_order(events: Sequence[Event]) -> None:
    """Indexes ascend; each call is begun, told of and ended or failed in this order; ended ones have valid JSON."""
    open_call: int | None = None
    n_begun = 0
    arguments = ""
    for event in events:
        if isinstance(event, CallBegin):
            assert (open_call, event.index) == (None, n_begun)
            assert event.id == call_id("a", event.index)
            open_call, n_begun, arguments = event.index, n_begun + 1, ""
        elif isinstance(event, CallArguments):
            assert event.index == open_call
            assert event.text
            arguments += event.text
        elif isinstance(event, CallEnd):
            assert event.index == open_call
            assert isinstance(json.loads(arguments), dict)
            open_call = None
        elif isinstance(event, CallFailed):
            assert event.index == open_call
            open_call = None
        else:
            assert open_call is None
            assert event.text
    assert open_call is None


def calls(*given: tuple[str, str]) -> list[FinishedCall]:
    """Calls as an answer with the id "a" has them."""
    return [FinishedCall(call_id("a", i), name, arguments) for i, (name, arguments) in enumerate(given)]


# --- each family's own syntax ---

Q = '<|"|>'
GOLDEN = [
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", "{}")]),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🌧", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {"a": [1.5, -2e3, true, null, {"b": "\\u00e9\\n"}]}}\n</tool_call>',
        "Let me see.",
        [
            ("weather", '{"city": "Köln 🌧", "days": 3}'),
            ("now", '{"a": [1.5, -2e3, true, null, {"b": "\\u00e9\\n"}]}'),
        ],
    ),
    # What models do beside their template: no line breaks, a list, two in one tag, other order, bare line breaks.
    (HERMES, '<tool_call>{"arguments":{"x":1},"name":"now"}</tool_call> ', "", [("now", '{"x":1}')]),
    (HERMES, '<tool_call>[{"name": "now"}, {"name": "now", "arguments": {}}]</tool_call>', "", [("now", "{}")] * 2),
    (HERMES, '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', "", [("now", "{}")] * 2),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', "", [("now", '{"a": "x\\ny"}')]),
    (HERMES, '<tool_call>{"id": "7", "type": "function", "name": "now", "arguments": {}}', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>\nDone.', "Done.", [("now", "{}")]),
    (LLAMA3, '{"name": "weather", "parameters": {"city": "Rome"}}', "", [("weather", '{"city": "Rome"}')]),
    (LLAMA3, ' \n{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "now", "parameters": {"a": "}"}}', "", [("now", '{"a": "}"}')]),
    (LLAMA3, 'Well.\n<|python_tag|>{"name": "now", "parameters": {}}', "Well.", [("now", "{}")]),
    (
        LLAMA3,
        '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"days": 1}}\n'
        '{"name": "now", "parameters": {}}',
        "",
        [("now", "{}"), ("weather", '{"days": 1}'), ("now", "{}")],
    ),
    (GEMMA4, "<|tool_call>call:now{}<tool_call|>", "", [("now", "{}")]),
    (
        GEMMA4,
        f"<|tool_call>call:weather{{city:{Q}Bad \"X\"\n{{,}}{Q},days:-3,"
        f"o:{{a:[true,None,1.5e-07],b:{Q}{Q}}}}}<tool_call|>"
        f"<|tool_call>call:ns.f-1{{{Q}k k{Q}:[]}}<tool_call|>",
        "",
        [
            ("weather", '{"city":"Bad \\"X\\"\\n{,}","days":-3,"o":{"a":[true,null,1.5e-07],"b":""}}'),
            ("ns.f-1", '{"k k":[]}'),
        ],
    ),
    (GEMMA4, f"<|tool_call>call:now{{a:{Q}<|channel>thought x<channel|>{Q}}}", "",
     [("now", '{"a":"<|channel>thought x<channel|>"}')]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "wanted"), GOLDEN)
@pytest.mark.parametrize("has_thoughts", [False, True])
def test_calls_of_each_family(
    format: CallFormat, text: str, content: str, wanted: list[tuple[str, str]], has_thoughts: bool
) -> None:
    """C05, C07: the name, the arguments as JSON text, indexes that ascend; wherever the answer is cut."""
    tags = (CHANNEL if format is GEMMA4 else THINK) if has_thoughts else None
    reply = read(text, format, tags)
    assert reply == Reply(content, "", calls(*wanted), [])


def test_thought_then_text_then_calls() -> None:
    """C03."""
    text = "<think>\nI could <tool_call> it\n</think>\n\nHm.\n<tool_call>\n" + '{"name": "now"}\n</tool_call>'
    assert read(text, HERMES, THINK) == Reply("Hm.", "I could <tool_call> it", calls(("now", "{}")), [])
    text = (
        "<|channel>thought\na <|tool_call>\n<channel|><|tool_call>call:now{}<tool_call|><|channel>thought\nb<channel|>c"
    )
    assert read(text, GEMMA4, CHANNEL) == Reply("c", "a <|tool_call>b", calls(("now", "{}")), [])


# --- what is no call ---

NO_CALLS = [
    (HERMES, "Write <tool_call> around it.", "found 'a'"),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "'rm', which is not among"),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "arguments as an object"),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
    (HERMES, '<tool_call>{"name": "now", "name": "now"}</tool_call>', "two values"),
    (HERMES, '<tool_call>{"name": "now", "note": 1}</tool_call>', "unknown key 'note'"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', "expected a number"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>', "after ','"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', "found NaN"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>', "found 'x'"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "b', "ends inside a text"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 99, "64 deep"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": ' + "1" * 400, "300 letters"),
    (HERMES, "so <tool_call>", "the end of the answer"),
    (LLAMA3, '{"name": "Bob", "age": 3}', "'Bob', which is not among"),
    (LLAMA3, '{"age": 3, "name": "now"}', "unknown key 'age'"),
    (LLAMA3, '{"name": "now"}', "no arguments"),
    (LLAMA3, '<|python_tag|>print("x")', "expected '{'"),
    (GEMMA4, "<|tool_call>now{}<tool_call|>", "expected 'call:'"),
    (GEMMA4, "<|tool_call>call:weather{city:Rome}<tool_call|>", "found 'Rome'"),
    (GEMMA4, f"<|tool_call>call:weather{{city:{Q}Rome", "ends inside a text"),
    (GEMMA4, "<|tool_call>call:weather{:1}<tool_call|>", "an argument's name"),
    (GEMMA4, "<|tool_call>x<|channel>thought\nno", "expected 'call:'"),
]


@pytest.mark.parametrize(("format", "text", "reason"), NO_CALLS)
def test_what_is_no_call_comes_back_as_text_with_a_note(format: CallFormat, text: str, reason: str) -> None:
    """C05: nothing is lost."""
    reply = read(text, format)
    assert reply.content == text
    assert not reply.calls
    assert reason in reply.notes[0]


def test_a_call_after_a_broken_one_is_a_call() -> None:
    text = '<tool_call>{"name": "now", "arguments": {x}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    events = joined(events_of([text], HERMES))
    assert [event.index for event in events if isinstance(event, CallBegin | CallEnd | CallFailed)] == [0, 0, 1, 1]
    assert collected(events).content == '<tool_call>{"name": "now", "arguments": {x}}</tool_call>'
    assert collected(events).calls == [FinishedCall(call_id("a", 1), "now", "{}")]


def test_a_call_cut_off_by_the_token_limit_is_text() -> None:
    """C07: at each place, it is a call or text, never half of one."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    whole = text.index("}}") + 2
    for cut in range(1, len(text)):
        reply = read(text[:cut], HERMES)
        assert reply.content == (text[:cut] if cut < whole else "")
        assert bool(reply.calls) == (cut >= whole)


def test_text_like_a_bare_call_in_the_middle_of_an_answer_is_text() -> None:
    """Only an answer's beginning is where Llama 3 writes calls."""
    text = 'Write {"name": "now", "parameters": {}}'
    assert read(text, LLAMA3) == Reply(text)


def test_without_tools_nothing_is_a_call() -> None:
    text = 'a <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>  '
    assert read(text, None) == Reply(text)


def test_text_and_arguments_stream_on_without_waiting_for_the_end() -> None:
    splitter = ReplySplitter(ReasoningSplitter(None), HERMES, NAMES, "a")
    assert splitter.push("one two <") == [Text("content", "one two")]
    assert splitter.push("b ") == [Text("content", " <b")]
    assert splitter.push('<tool_call>{"name": "now", "arguments": {"a": "x') == [
        CallBegin(0, call_id("a", 0), "now"),
        CallArguments(0, '{"a": "x'),
    ]
    assert splitter.push("y z") == [CallArguments(0, "y z")]


def test_ids_belong_to_the_answer_and_the_index() -> None:
    """C07."""
    assert call_id("a", 0) == call_id("a", 0)
    assert len({call_id(answer, i) for answer in ("a", "b") for i in range(3)}) == 6


# --- any cutting at all ---

PARTS = {
    HERMES.name: ["<tool_call>", "</tool_call>", "\n", '{"name": "now"', ', "arguments": {', '"a": "x"', "}", "}}", "<",
                  "think", "<think>", "</think>", "é", "[", ",", '"', "\\", "<tool", " "],
    LLAMA3.name: ["<|python_tag|>", '{"name": "now"', ', "parameters": {', '"a": 1', "}", "}}", ";", " ", "\n", "<",
                  "|python", "x", "{"],
    GEMMA4.name: ["<|tool_call>", "<tool_call|>", "call:now{", "a:", Q, "}", "x", "1", "<|channel>", "thought", ",",
                  "<channel|>", "<|", "\n", " ", "tool_call>"],
}  # fmt: skip


@st.composite
def cut_answers(draw: st.DrawFn, format: CallFormat) -> list[str]:
    text = "".join(draw(st.lists(st.sampled_from(PARTS[format.name]), max_size=14)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_any_cutting(pieces: list[str], format: CallFormat, tags: ReasoningTags | None, is_open: bool) -> None:
    whole = "".join(pieces)
    wanted = joined(events_of([whole], format, tags, is_open=is_open))
    assert joined(events_of(pieces, format, tags, is_open=is_open)) == wanted
    assert joined(events_of(list(whole), format, tags, is_open=is_open)) == wanted
    check_order(wanted)
    if tags is None and not any(isinstance(event, CallEnd) for event in wanted):
        assert collected(wanted).content == whole


@settings(max_examples=500, deadline=None)
@given(cut_answers(HERMES), st.sampled_from([None, THINK]), st.booleans())
def test_any_cutting_of_hermes(pieces: list[str], tags: ReasoningTags | None, is_open: bool) -> None:
    """C05."""
    check_any_cutting(pieces, HERMES, tags, is_open and tags is not None)


@settings(max_examples=400, deadline=None)
@given(cut_answers(LLAMA3))
def test_any_cutting_of_llama(pieces: list[str]) -> None:
    """C05."""
    check_any_cutting(pieces, LLAMA3, None, False)


@settings(max_examples=500, deadline=None)
@given(cut_answers(GEMMA4), st.sampled_from([None, CHANNEL]), st.booleans())
@example(["<|tool_call>x<|channel>thought"], CHANNEL, False)
def test_any_cutting_of_gemma(pieces: list[str], tags: ReasoningTags | None, is_open: bool) -> None:
    """C05."""
    check_any_cutting(pieces, GEMMA4, tags, is_open and tags is not None)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.sampled_from([HERMES, LLAMA3, GEMMA4]))
def test_text_without_calls_passes_unchanged(text: str, format: CallFormat) -> None:
    assert read(text, format).content == text


# --- which format ---


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("... within <tool_call></tool_call> ...", HERMES),
        ("<|tool_call>call:", GEMMA4),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', LLAMA3),
        ("<|start_header_id|> '\"parameters\": '", LLAMA3),
        ("<tool_call>\n<function=name>", None),
        ("<tool_call>name\n<arg_key>", None),
        ("nothing", None),
    ],
)
def test_the_template_says_which_format(source: str, wanted: CallFormat | None) -> None:
    assert format_of(source) is wanted
