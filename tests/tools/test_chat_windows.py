"""Conversations as windows: which tokens are shown, and which count, whatever a template does with old turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.tools.chat_windows import cut_conversations
from bytefloor.tools.windows import Window
from text.small_chats import (
    GEMMA3_CHAT,
    GEMMA3_TOKENIZER,
    GEMMA4_TOKENIZER,
    LLAMA3_CHAT,
    LLAMA3_TOKENIZER,
    OPENING_CHAT,
    QWEN3_CHAT,
    QWEN3_TOKENIZER,
)

TALK = [("user", "hello"), ("assistant", "good day"), ("user", "and now?"), ("assistant", "goodbye")]
EMPTY_THOUGHT = """{{ bos_token }}
{%- for m in messages %}{{ '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}{% endif %}"""


def lines(*conversations: list[tuple[str, str]], **more: Any) -> str:
    return "\n".join(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **more})
        for turns in conversations
    )


def counted(windows: list[Window], tokenizer: Tokenizer) -> list[list[str]]:
    """The text of each run of tokens that count."""
    found = []
    for window in windows:
        runs: list[list[int]] = []
        for target in window.targets:
            if not runs or target != runs[-1][-1] + 1:
                runs.append([])
            runs[-1].append(target)
        found.append([tokenizer.decode([window.ids[i] for i in run], keep_special=True) for run in runs])
    return found


@pytest.mark.parametrize(
    ("template", "tokenizer", "end"),
    [
        (LLAMA3_CHAT, LLAMA3_TOKENIZER, "<|eot_id|>"),
        (GEMMA3_CHAT, GEMMA3_TOKENIZER, "<end_of_turn>"),
        (QWEN3_CHAT, QWEN3_TOKENIZER, "<|im_end|>"),
    ],
    ids=["llama3", "gemma3", "qwen3"],
)
def test_turns_and_their_ends_count_and_nothing_else(template: ChatTemplate, tokenizer: Tokenizer, end: str) -> None:
    windows = cut_conversations(lines(TALK), template, tokenizer)
    assert counted(windows, tokenizer) == [[f"good day{end}", f"goodbye{end}"]]
    (window,) = windows
    whole = template.prepare([*_messages(TALK)], add_generation_prompt=False)
    # The line break behind the last turn is not shown: nobody predicts anything from it.
    assert whole.ids[: len(window.ids)] == list(window.ids)
    assert window.ids[-1] in tokenizer.end_ids
    assert window.name == "line 1, messages[1]"


def _messages(turns: list[tuple[str, str]]) -> Any:
    from bytefloor.text.chat import Message

    return [Message(role, text) for role, text in turns]


def test_a_thought_that_the_template_drops_later_makes_a_window_of_its_own() -> None:
    """Qwen3 shows thoughts after the last question only."""
    turns = [("user", "hello"), ("assistant", "<think>\nhm\n</think>\n\ngood day"), *TALK[2:]]
    windows = cut_conversations(lines(turns), QWEN3_CHAT, QWEN3_TOKENIZER)
    assert counted(windows, QWEN3_TOKENIZER) == [
        ["<think>\nhm\n</think>\n\ngood day<|im_end|>"],
        ["goodbye<|im_end|>"],
    ]
    assert "hm" not in QWEN3_TOKENIZER.decode(windows[1].ids, keep_special=True)
    assert [window.name for window in windows] == ["line 1, messages[1]", "line 1, messages[3]"]


def test_what_the_template_asks_with_is_shown_and_does_not_count() -> None:
    """Gemma 4 asks with an empty thought that old turns do not have."""
    template = ChatTemplate(EMPTY_THOUGHT.replace("model", "assistant"), GEMMA4_TOKENIZER, "gemma4")
    windows = cut_conversations(lines(TALK), template, GEMMA4_TOKENIZER)
    assert counted(windows, GEMMA4_TOKENIZER) == [["good day<turn|>"], ["goodbye<turn|>"]]
    shown = GEMMA4_TOKENIZER.decode(windows[1].ids, keep_special=True)
    assert shown.endswith("<|turn>assistant\n<|channel>thought\n<channel|>goodbye<turn|>")
    assert shown.count("<|channel>") == 1


def test_a_thought_that_the_template_opens_is_not_opened_for_an_answer_without_one() -> None:
    windows = cut_conversations(lines(TALK[:2]), OPENING_CHAT, QWEN3_TOKENIZER)
    assert counted(windows, QWEN3_TOKENIZER) == [["good day<|im_end|>"]]
    assert "<think>" not in QWEN3_TOKENIZER.decode(windows[0].ids, keep_special=True)


def test_each_line_is_a_conversation_and_empty_ones_are_none() -> None:
    text = lines(TALK[:2]) + "\n\n" + lines([("system", "be brief"), *TALK[:2]], TALK[:2]) + "\n"
    windows = cut_conversations(text, LLAMA3_CHAT, LLAMA3_TOKENIZER)
    assert [window.name.split(",")[0] for window in windows] == ["line 1", "line 3", "line 4"]
    assert windows[0].ids == windows[2].ids != windows[1].ids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no conversations"),
        ("{", "line 1: the body is not JSON"),
        ("\n[]", r"line 2: the body: Expected `object`, got `array`"),
        ('{"messages": 3}', "line 1: messages: Expected `array`"),
        ('{"text": "x"}', "line 1: text: no such field here"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"line 1: messages\[0\].content: Expected"),
        ('{"messages": [{"role": "user", "content": null}]}', r"line 1: messages\[0\].content: null, expected a text"),
        (lines([("user", "hi")]), "line 1: no turn of the assistant"),
        (lines(TALK, TALK[1:]), r"line 2: messages\[0\] is the assistant's"),
        (lines([("wizard", "hi"), ("assistant", "ho")]), "line 1: a message has the role 'wizard'"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        cut_conversations(text, LLAMA3_CHAT, LLAMA3_TOKENIZER)


def test_a_template_that_shows_old_turns_otherwise_is_refused() -> None:
    counts = ChatTemplate(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", LLAMA3_TOKENIZER, "llama"
    )
    with pytest.raises(RequestError, match=r"line 1: messages\[1\]: with this turn the template shows those before it"):
        cut_conversations(lines(TALK), counts, LLAMA3_TOKENIZER)
    silent = ChatTemplate("{{ messages[0].content }}", LLAMA3_TOKENIZER, "llama")
    with pytest.raises(RequestError, match=r"line 1: messages\[1\]: the template shows nothing of this turn"):
        cut_conversations(lines(TALK), silent, LLAMA3_TOKENIZER)
