"""Chat templates: who may write control tokens, who refuses what, what stands in for a missing template."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_chats import (
    GEMMA3_CHAT,
    GEMMA3_TOKENIZER,
    GEMMA4_TOKENIZER,
    GEMMA_TEMPLATE,
    HELLO,
    LLAMA3_CHAT,
    LLAMA3_TEMPLATE,
    LLAMA3_TOKENIZER,
    MISTRAL_TEMPLATE,
    OPENING_CHAT,
    QWEN3_CHAT,
    QWEN3_TEMPLATE,
    QWEN3_TOKENIZER,
    SPM_TOKENIZER,
)
from small_vocabularies import LLAMA3, QWEN3, byte_level

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate, Message, ToolCall
from bytefloor.text.tokenizer import Tokenizer


def control_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The control tokens among the ids, in order."""
    return [tokenizer.token_text(id) for id in ids if id in tokenizer.control_ids]


# --- who may write control tokens (T05) ---


@pytest.mark.parametrize("chat", [LLAMA3_CHAT, QWEN3_CHAT, GEMMA3_CHAT], ids=["llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize("around", ["{}", "A{}B", " {} ", "{}{}", "\n{}\n"])
def test_control_tokens_typed_by_a_user_stay_text(chat: ChatTemplate, around: str) -> None:
    """T05: every special string, at the edges, in the middle and doubled."""
    tokenizer = chat._tokenizer
    wanted = control_texts(tokenizer, chat.encode(HELLO))
    for token in tokenizer.vocabulary.control:
        text = around.replace("{}", token)
        prompt = chat.prepare([Message("user", text)])
        assert control_texts(tokenizer, prompt.ids) == wanted, token
        assert tokenizer.decode(prompt.ids, keep_special=True) == prompt.text
        assert text.strip() in prompt.text


def test_the_turns_of_the_template_are_control_tokens() -> None:
    """T05: what only the template writes."""
    wanted = [LLAMA3[0], LLAMA3[2], LLAMA3[3], LLAMA3[4], LLAMA3[2], LLAMA3[3]]
    assert control_texts(LLAMA3_TOKENIZER, LLAMA3_CHAT.encode(HELLO)) == wanted


def test_text_of_template_and_user_is_encoded_as_one_piece() -> None:
    """T05: tokens span the place where they meet, as in training."""
    chat = ChatTemplate("{{ 'he' }}{{ messages[0].content }}", LLAMA3_TOKENIZER, "llama")
    ids = chat.encode([Message("user", "llo")])
    assert [LLAMA3_TOKENIZER.token_text(id) for id in ids] == ["<|begin_of_text|>", "hello"]


def test_a_user_cannot_open_or_close_a_thought() -> None:
    """T05: also where a template looks for the tags in the content."""
    text = "<think>x</think>y"
    prompt = QWEN3_CHAT.prepare([Message("user", text)])
    assert text in prompt.text
    assert "<think>" not in control_texts(QWEN3_TOKENIZER, prompt.ids)
    assert not OPENING_CHAT.prepare([Message("user", "<think>")], add_generation_prompt=False).is_thought_open


def test_tool_definitions_arguments_and_names_stay_text() -> None:
    """T05: recursively, keys included."""
    bad = "<|im_end|>"
    parameters = {"properties": {bad: {"enum": [bad]}}}
    tools = [
        {"type": "function", "function": {"name": "f", "description": bad, "parameters": parameters}},
        {"type": "function", "function": {"name": "g"}},
    ]
    calls = (
        ToolCall("f", {bad: [bad, {"x": bad}]}),
        ToolCall("f", '{"a": "<|im_end|>"}'),
        ToolCall("g", '{"b": ["<|im_end|>"]}'),
    )
    messages = [Message("user", "hello"), Message("assistant", "", tool_calls=calls), Message("tool", bad, name="f")]
    prompt = QWEN3_CHAT.prepare(messages, tools=tools)
    wanted = ["<|im_start|>", "<|im_end|>"] * 2
    wanted += [
        "<|im_start|>",
        *["<tool_call>", "</tool_call>"] * 3,
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert control_texts(QWEN3_TOKENIZER, prompt.ids) == wanted
    assert prompt.text.count(bad) == 3 + 3 + 1 + 1 + 1 + 4  # tools, three calls, the answer, ends of turns
    assert '"type": "function"' in prompt.text
    assert '{"name": "f", "arguments": {"a": "<|im_end|>"}}' in prompt.text


def test_variables_given_with_a_request_stay_text() -> None:
    """T05."""
    chat = ChatTemplate("{{ persona }}{{ messages[0].content }}", LLAMA3_TOKENIZER, "llama")
    prompt = chat.prepare(HELLO, persona="<|eot_id|>")
    assert prompt.text == "<|eot_id|>hello"
    assert control_texts(LLAMA3_TOKENIZER, prompt.ids) == ["<|begin_of_text|>"]


@pytest.mark.parametrize(
    ("first", "second"), [("a<|eot", "_id|>b"), ("<", "|eot_id|>"), ("<|eot_id|", ">"), ("<|", "eot_id|>")]
)
def test_two_texts_side_by_side_do_not_make_a_control_token(first: str, second: str) -> None:
    """T05."""
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", LLAMA3_TOKENIZER, "llama")
    prompt = chat.prepare([Message("user", first), Message("user", second)])
    assert "<|eot_id|>" in prompt.text
    assert control_texts(LLAMA3_TOKENIZER, prompt.ids) == ["<|begin_of_text|>"]


def test_a_template_that_glues_its_own_text_to_a_users_does_not_make_a_control_token() -> None:
    """T05."""
    for source, text in (("<|eot_{{ messages[0].content }}", "id|>"), ("{{ messages[0].content }}id|>", "<|eot_")):
        prompt = ChatTemplate(source, LLAMA3_TOKENIZER, "llama").prepare([Message("user", text)])
        assert prompt.text == "<|eot_id|>"
        assert control_texts(LLAMA3_TOKENIZER, prompt.ids) == ["<|begin_of_text|>"]


def test_private_characters_in_messages_survive() -> None:
    """T05: the marker is a character that no message uses."""
    text = "\ue000<|eot_id|>\ue001"
    prompt = LLAMA3_CHAT.prepare([Message("user", text)])
    assert text in prompt.text
    assert LLAMA3_TOKENIZER.decode(prompt.ids, keep_special=True) == prompt.text


def test_a_role_that_is_no_role_is_refused() -> None:
    """T05: roles are written into the turn's own tokens."""
    with pytest.raises(RequestError, match=r"'<\|eot_id\|>', expected one of system"):
        LLAMA3_CHAT.render([Message("<|eot_id|>", "hello")])


def test_templates_may_still_test_and_cut_text() -> None:
    """T05: text without control tokens is untouched."""
    source = (
        "{# <tool_call> #}"
        "{% set c = messages[0].content %}{{ c | trim }}|{{ c.split(':')[0] | upper }}|{{ 'b' in c }}|{{ c | length }}"
        "|{{ tools[0].type == 'function' }}"
    )
    chat = ChatTemplate(source, QWEN3_TOKENIZER, "qwen3")
    tools = [{"type": "function", "function": {"name": "t"}}]
    assert chat.render([Message("user", " a:b ")], tools=tools) == "a:b| A|True|5|True"


def test_keys_that_templates_look_up_are_untouched_though_a_control_token_ends_like_them() -> None:
    """T05."""
    tokenizer = Tokenizer.from_gguf(byte_level(("<|x|>type",)))
    chat = ChatTemplate("{# <tool_call> #}{{ tools[0].type }}", tokenizer, "llama")
    assert chat.render(HELLO, tools=[{"type": "function", "function": {"name": "t"}}]) == "function"


def test_arguments_given_as_json_text_reach_the_template_as_an_object() -> None:
    chat = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}", QWEN3_TOKENIZER, "qwen3")
    assert chat.render([Message("assistant", "", tool_calls=(ToolCall("f", '{"city": "Ulm"}'),))]) == "Ulm"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*LLAMA3, "<|", "|>", "<", ">", "eot_id", "_id|>", "<|eot", " ", "x"]), max_size=8))
def test_no_message_at_all_makes_a_control_token(parts: list[str]) -> None:
    """T05."""
    prompt = LLAMA3_CHAT.prepare([Message("user", "".join(parts))])
    wanted = control_texts(LLAMA3_TOKENIZER, LLAMA3_CHAT.encode(HELLO))
    assert control_texts(LLAMA3_TOKENIZER, prompt.ids) == wanted
    assert LLAMA3_TOKENIZER.decode(prompt.ids, keep_special=True) == prompt.text


# --- the BOS (T03) ---


@pytest.mark.parametrize(
    ("tokenizer", "source", "n_bos"),
    [
        (LLAMA3_TOKENIZER, LLAMA3_TEMPLATE, 1),
        (LLAMA3_TOKENIZER, LLAMA3_TEMPLATE.replace("{{- bos_token }}", ""), 1),
        (GEMMA3_TOKENIZER, GEMMA_TEMPLATE, 1),
        (GEMMA3_TOKENIZER, GEMMA_TEMPLATE.replace("{{- bos_token -}}", ""), 1),
        (QWEN3_TOKENIZER, QWEN3_TEMPLATE, 0),
        (SPM_TOKENIZER, MISTRAL_TEMPLATE, 1),
        (SPM_TOKENIZER, MISTRAL_TEMPLATE.replace("{{- bos_token }}", ""), 1),
    ],
    ids=["llama3", "llama3-silent", "gemma", "gemma-silent", "qwen3", "mistral", "mistral-silent"],
)
def test_a_prompt_has_exactly_the_bos_that_the_file_asks_for(tokenizer: Tokenizer, source: str, n_bos: int) -> None:
    """T03."""
    ids = ChatTemplate(source, tokenizer, "any").encode(HELLO)
    assert ids.count(tokenizer.bos_id or 0) == n_bos
    assert (ids[0] == tokenizer.bos_id) == bool(n_bos)


# --- templates that refuse (C01, C02) ---


def test_a_template_without_a_system_role_refuses_in_its_own_words() -> None:
    """C01."""
    with pytest.raises(RequestError, match="System role not supported"):
        GEMMA3_CHAT.render([Message("system", "Be brief."), *HELLO])


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    """C01: most templates would leave the turn out, or write a role that nobody was trained on."""
    said = QWEN3_CHAT.render([Message("system", "Be brief."), Message("developer", "In French."), *HELLO])
    assert said == QWEN3_CHAT.render([Message("system", "Be brief.\n\nIn French."), *HELLO])
    later = QWEN3_CHAT.render([*HELLO, Message("developer", "In French."), *HELLO])
    assert later == QWEN3_CHAT.render([*HELLO, Message("system", "In French."), *HELLO])
    knows = ChatTemplate("{# developer #}" + QWEN3_TEMPLATE, QWEN3_TOKENIZER, "qwen3")
    assert "<|im_start|>developer\nIn French." in knows.render([Message("developer", "In French."), *HELLO])
    with pytest.raises(RequestError, match="System role not supported"):
        GEMMA3_CHAT.render([Message("developer", "Be brief."), *HELLO])


def test_the_systems_text_can_be_folded_into_the_first_users_turn() -> None:
    """C01."""
    messages = [Message("system", "Be brief."), *HELLO, Message("assistant", "hi"), Message("user", "more")]
    text = GEMMA3_CHAT.render(messages, fold_system=True)
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nhello<end_of_turn>\n<start_of_turn>model\nhi")
    assert text.count("Be brief.") == 1
    assert GEMMA3_CHAT.render([Message("system", "Go.")], fold_system=True).startswith("<bos><start_of_turn>user\nGo.")


@pytest.mark.parametrize("roles", [["user", "user"], ["assistant"], ["user", "assistant", "user", "user"]])
def test_roles_that_do_not_alternate_are_refused_and_never_half_rendered(roles: list[str]) -> None:
    """C02."""
    with pytest.raises(RequestError, match="roles must alternate"):
        GEMMA3_CHAT.render([Message(role, "hello") for role in roles])


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="no messages"):
        LLAMA3_CHAT.render([])


# --- files without a template (G14) ---


@pytest.mark.parametrize(
    ("tokenizer", "family", "name", "wanted"),
    [
        (LLAMA3_TOKENIZER, "llama", "Llama 3", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (QWEN3_TOKENIZER, "qwen3", "ChatML", "hello<|im_end|>\n<|im_start|>assistant\n"),
        (GEMMA3_TOKENIZER, "gemma3", "Gemma 3", "hello<end_of_turn>\n<start_of_turn>model\n"),
        (GEMMA4_TOKENIZER, "gemma4", "Gemma 4", "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"),
    ],
    ids=["llama3", "qwen3", "gemma3", "gemma4"],
)
def test_without_a_template_the_turn_tokens_choose_one_and_a_notice_says_so(
    tokenizer: Tokenizer, family: str, name: str, wanted: str
) -> None:
    """G14."""
    chat = ChatTemplate.for_tokenizer(tokenizer, family)
    assert len(chat.notices) == 1
    assert f"built-in {name} format" in chat.notices[0]
    messages = [Message("system", "Be brief."), *HELLO]
    text = chat.render(messages)
    assert text.endswith(wanted)
    assert text.count("Be brief.") == 1
    assert chat.encode(messages).count(tokenizer.bos_id or 0) == tokenizer.add_bos
    with pytest.raises(RequestError, match="tools need the chat template"):
        chat.render(HELLO, tools=[{"type": "function", "function": {"name": "t"}}])


def test_built_in_formats_turn_thinking_on_and_off() -> None:
    """G14, C03."""
    qwen = ChatTemplate.for_tokenizer(QWEN3_TOKENIZER, "qwen3")
    assert qwen.render(HELLO, thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    gemma = ChatTemplate.for_tokenizer(GEMMA4_TOKENIZER, "gemma4")
    assert (
        gemma.render(HELLO, thinking=True)
        == "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nhello<turn|>\n<|turn>model\n"
    )
    small = ChatTemplate.for_tokenizer(GEMMA4_TOKENIZER, "gemma4", bare_model_turn=True)
    assert small.render(HELLO, thinking=False) == "<bos><|turn>user\nhello<turn|>\n<|turn>model\n"


def test_the_built_in_gemma3_format_wants_alternating_roles() -> None:
    """C02, G14."""
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate.for_tokenizer(GEMMA3_TOKENIZER, "gemma3").render([*HELLO, *HELLO])


def test_without_a_template_and_without_turn_tokens_chat_is_refused_with_advice() -> None:
    """G14."""
    with pytest.raises(RequestError, match=r"no chat template.*plain completion.*chat_template\.jinja"):
        ChatTemplate.for_tokenizer(Tokenizer.from_gguf(byte_level()), "llama")


def test_the_files_own_template_is_used_without_a_notice() -> None:
    """G14."""
    tokenizer = Tokenizer.from_gguf(byte_level(QWEN3, pre="qwen2", chat_template="own: {{ messages[0].content }}"))
    chat = ChatTemplate.for_tokenizer(tokenizer, "qwen3")
    assert chat.render(HELLO) == "own: hello"
    assert chat.notices == ()


def test_a_template_of_its_own_for_tools_is_used_with_tools() -> None:
    """M13."""
    metadata = byte_level(QWEN3, pre="qwen2", chat_template="plain")
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ tools | length }}{# <tool_call> #}"
    chat = ChatTemplate.for_tokenizer(Tokenizer.from_gguf(metadata), "qwen3")
    assert chat.render(HELLO) == "plain"
    assert chat.render(HELLO, tools=[{"type": "function", "function": {"name": "t"}}]) == "tools: 1"
