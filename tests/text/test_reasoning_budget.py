"""Thoughts that end after so many tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_chats import GEMMA4_TOKENIZER, HELLO, LLAMA3_CHAT, OPENING_CHAT, OPENING_TEMPLATE, QWEN3_CHAT
from small_vocabularies import QWEN3, byte_level

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer

#: The tags are no tokens of their own here.
SPELLED_CHAT = ChatTemplate(OPENING_TEMPLATE, Tokenizer.from_gguf(byte_level(QWEN3)), "llama")
GEMMA4_CHAT = ChatTemplate.for_tokenizer(GEMMA4_TOKENIZER, "gemma4")


def answered(chat: ChatTemplate, n_tokens: int, wish: str, then: str = "") -> tuple[str, str, str, int]:
    """(thought, answer, all text, tokens of thought) where the model would write `wish`, and `then` once it is cut."""
    tokenizer = chat._tokenizer
    prompt = chat.prepare(HELLO, thinking=True, thinking_budget=n_tokens)
    decoder = tokenizer.stream(prompt.ids, keep_special=prompt.keep_special)
    budget = prompt.thinking.start(decoder)
    wished = tokenizer.encode(wish, parse_special=True, add_bos=False)
    ids: list[int] = []
    forced = budget.start()
    was_forced = bool(forced)
    while forced or wished:
        if forced:
            wished = [*forced, *tokenizer.encode(then, parse_special=True, add_bos=False)]
        ids.append(wished.pop(0))
        forced = budget.push(decoder.push(ids[-1]))
        assert not (was_forced and forced), "a thought is closed once"
        was_forced = was_forced or bool(forced)
    stream, splitter = tokenizer.stream(prompt.ids, keep_special=prompt.keep_special), prompt.splitter()
    pieces = [piece for id in ids for piece in splitter.push(stream.push(id))]
    pieces += [*splitter.push(stream.finish()), *splitter.finish()]
    thought, answer = ("".join(text for at, text in pieces if at == channel) for channel in ("reasoning", "content"))
    return thought, answer, tokenizer.decode(ids, keep_special=True), budget.n_used


@pytest.mark.parametrize(
    ("chat", "n", "wish", "wanted"),
    [
        # "abc" is one token here, and each letter behind it.
        (QWEN3_CHAT, 3, "<think>abcdefg</think>no", ("abcde", "yes", "<think>abcde\n</think>yes")),
        (QWEN3_CHAT, 0, "<think>abc</think>no", ("", "yes", "<think>\n</think>yes")),
        (QWEN3_CHAT, 9, "<think>xyz</think>no", ("xyz", "no", "<think>xyz</think>no")),
        (QWEN3_CHAT, 2, "no thought at all", ("", "no thought at all", "no thought at all")),
        (OPENING_CHAT, 3, "xyzuvw</think>no", ("xyz", "yes", "xyz\n</think>yes")),
        (OPENING_CHAT, 0, "xyz</think>no", ("", "yes", "</think>yes")),
        (OPENING_CHAT, 3, "xy\nuvw</think>no", ("xy", "yes", "xy\n</think>yes")),
        (GEMMA4_CHAT, 3, "<|channel>thought\nxyzuvw", ("xy", "yes", "<|channel>thought\nxy\n<channel|>yes")),
        # Where the tag is spelled, the model may be in the midst of it.
        (SPELLED_CHAT, 5, "xyz</think>no", ("xyz", "yes", "xyz</think>yes")),
        (SPELLED_CHAT, 3, "xyzuvw</think>no", ("xyz", "yes", "xyz\n</think>yes")),
        # Four bytes of one character are four tokens.
        (OPENING_CHAT, 2, "x\N{RAINBOW}yz</think>no", ("x\N{RAINBOW}", "yes", "x\N{RAINBOW}\n</think>yes")),
    ],
)
def test_a_thought_is_closed_when_its_tokens_are_spent(
    chat: ChatTemplate, n: int, wish: str, wanted: tuple[str, str, str]
) -> None:
    """C03."""
    assert answered(chat, n, wish, "yes")[:3] == wanted


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 6), st.text("ab\nxé</think>", max_size=12), st.sampled_from([QWEN3_CHAT, OPENING_CHAT, SPELLED_CHAT])
)
def test_never_more_tokens_than_allowed_but_for_the_rest_of_a_character(n: int, text: str, chat: ChatTemplate) -> None:
    opening = "<think>" if chat is QWEN3_CHAT else ""
    thought, answer, _, n_used = answered(chat, n, opening + text + "</think>end", "end")
    assert n_used <= n + 3
    assert answer.endswith("end")
    assert "</think>" not in thought


def test_all_thoughts_of_an_answer_share_one_budget() -> None:
    prompt = GEMMA4_CHAT.prepare(HELLO, thinking=True, thinking_budget=4)
    decoder = GEMMA4_TOKENIZER.stream(prompt.ids, keep_special=prompt.keep_special)
    budget = prompt.thinking.start(decoder)
    ids = GEMMA4_TOKENIZER.encode(
        "<|channel>thoughtxyz<channel|>u<|channel>thoughtv", parse_special=True, add_bos=False
    )
    given = [budget.push(decoder.push(id)) for id in ids]
    assert given[:-1] == [[]] * (len(ids) - 1)
    assert GEMMA4_TOKENIZER.decode(given[-1], keep_special=True) == "\n<channel|>"


def test_budgets_are_refused_where_there_is_no_thought() -> None:
    with pytest.raises(RequestError, match="of this llama model has no thinking"):
        LLAMA3_CHAT.prepare(HELLO, thinking_budget=8)
    with pytest.raises(RequestError, match="but thinking is off"):
        QWEN3_CHAT.prepare(HELLO, thinking=False, thinking_budget=8)
    with pytest.raises(RequestError, match="budget is -1 tokens, expected 0 or more"):
        QWEN3_CHAT.prepare(HELLO, thinking_budget=-1)
    with pytest.raises(RequestError, match="of this llama model has no thinking"):
        LLAMA3_CHAT.prepare(HELLO, thinking=True)
