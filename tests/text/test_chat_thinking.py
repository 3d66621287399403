"""Chat templates: how thinking is asked for, where it is shown, when it is dropped."""

from __future__ import annotations

import pytest
from small_chats import (
    GEMMA4_TOKENIZER,
    HELLO,
    LLAMA3_CHAT,
    OPENING_CHAT,
    OPENING_TEMPLATE,
    QWEN3_CHAT,
    QWEN3_TOKENIZER,
)

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate, Message

# --- thinking (C03, C06) ---


def reply_of(chat: ChatTemplate, thinking: bool | None, reply: str) -> tuple[str, str]:
    """(thought, answer) of a reply, decoded and split token by token as an engine does."""
    tokenizer = chat._tokenizer
    prompt = chat.prepare(HELLO, thinking=thinking)
    stream = tokenizer.stream(prompt.ids, keep_special=prompt.keep_special)
    splitter = prompt.splitter()
    pieces = []
    for id in tokenizer.encode(reply, parse_special=True, add_bos=False):
        pieces += splitter.push(stream.push(id))
    pieces += [*splitter.push(stream.finish()), *splitter.finish()]
    thought = "".join(text for channel, text in pieces if channel == "reasoning")
    return thought, "".join(text for channel, text in pieces if channel == "content")


@pytest.mark.parametrize(
    ("chat", "thinking", "reply", "wanted"),
    [
        (QWEN3_CHAT, None, "<think>\nhmm\n</think>\n\nhello", ("hmm", "hello")),
        (QWEN3_CHAT, True, "<think>\nhmm\n</think>\n\nhello", ("hmm", "hello")),
        (QWEN3_CHAT, True, "<think>\nhm", ("hm", "")),
        (QWEN3_CHAT, False, "hello", ("", "hello")),
        (QWEN3_CHAT, False, "<think>hmm</think>hello", ("", "hmmhello")),
        (OPENING_CHAT, None, "hmm\n</think>\n\nhello", ("hmm", "hello")),
        (OPENING_CHAT, True, "hmm", ("hmm", "")),
        (LLAMA3_CHAT, None, "<think>hello", ("", "<think>hello")),
    ],
)
def test_a_reply_is_routed_by_what_the_prompt_opened(
    chat: ChatTemplate, thinking: bool | None, reply: str, wanted: tuple[str, str]
) -> None:
    """C03."""
    assert reply_of(chat, thinking, reply) == wanted


def test_gemma4_thinks_in_a_channel() -> None:
    """C03."""
    chat = ChatTemplate.for_tokenizer(GEMMA4_TOKENIZER, "gemma4")
    reply = "<|channel>thought\nhmm\n<channel|>hello"
    assert reply_of(chat, True, reply) == ("hmm", "hello")
    assert reply_of(chat, False, "hello") == ("", "hello")


def test_thinking_is_passed_on_as_the_templates_own_switch() -> None:
    """C03."""
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert QWEN3_CHAT.render(HELLO, thinking=False).endswith(closed)
    assert QWEN3_CHAT.render(HELLO, enable_thinking=False).endswith(closed)
    assert QWEN3_CHAT.prepare(HELLO, enable_thinking=False).reasoning_tags is None
    assert QWEN3_CHAT.render(HELLO, thinking=True, enable_thinking=False).endswith("assistant\n")
    assert QWEN3_CHAT.render(HELLO).endswith("assistant\n")


def test_a_prompt_knows_whether_it_ends_inside_a_thought() -> None:
    """C03."""
    assert OPENING_CHAT.prepare(HELLO).is_thought_open
    assert not QWEN3_CHAT.prepare(HELLO).is_thought_open
    assert not QWEN3_CHAT.prepare(HELLO, thinking=False).is_thought_open


def test_thinking_that_cannot_be_turned_on_or_off_is_refused() -> None:
    assert not LLAMA3_CHAT.supports_thinking
    assert QWEN3_CHAT.supports_thinking
    with pytest.raises(RequestError, match="no thinking to turn on"):
        LLAMA3_CHAT.render(HELLO, thinking=True)
    with pytest.raises(RequestError, match="cannot be turned off"):
        OPENING_CHAT.render(HELLO, thinking=False)
    assert LLAMA3_CHAT.render(HELLO, thinking=False)


@pytest.mark.parametrize(
    "reply",
    [
        Message("assistant", "<think>\nold thought\n</think>\n\nhi"),
        Message("assistant", "hi", reasoning="old thought"),
    ],
)
def test_old_thoughts_are_dropped_where_the_template_drops_them(reply: Message) -> None:
    """C06: in whichever form the client sends them back."""
    text = QWEN3_CHAT.render([*HELLO, reply, Message("user", "more")])
    assert "old thought" not in text
    assert "<|im_start|>assistant\nhi<|im_end|>" in text
    assert "<think>\nold thought\n</think>\n\nhi" in QWEN3_CHAT.render([*HELLO, reply])


def test_an_old_reply_whose_thought_the_prompt_had_opened_loses_it_too() -> None:
    """C06."""
    messages = [*HELLO, Message("assistant", "old thought</think>\n\nhi"), Message("user", "more")]
    assert "old thought" not in OPENING_CHAT.render(messages)


def test_an_old_reply_that_speaks_of_the_tag_keeps_its_text() -> None:
    """C06: nothing is lost from an answer that only mentions `</think>`."""
    chat = ChatTemplate(OPENING_TEMPLATE.replace("<think>", ""), QWEN3_TOKENIZER, "qwen3")
    assert "close it with </think> then" in chat.render([*HELLO, Message("assistant", "close it with </think> then")])
