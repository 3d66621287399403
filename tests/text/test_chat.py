"""Chat templates: who may write control tokens, who refuses what, how thinking is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabularies import GEMMA3, GEMMA4, GEMMA4_ADDED, LLAMA3, QWEN3, QWEN3_ADDED, byte_level

from bytefloor.errors import RequestError
from bytefloor.text.chat import ChatTemplate, Message, ToolCall
from bytefloor.text.tokenizer import Tokenizer

LLAMA3_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

#: Shows old thoughts only after the last question, reads thoughts out of the content, can be told not to think.
QWEN3_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if thought and loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- set arguments = call.function.arguments %}
        {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

GEMMA_TEMPLATE = """{{- bos_token -}}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

#: The prompt itself ends inside a thought.
OPENING_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

LLAMA3_TOKENIZER = Tokenizer.from_gguf(byte_level(LLAMA3, bos_token_id="<|begin_of_text|>", eos_token_id="<|eot_id|>"))
QWEN3_TOKENIZER = Tokenizer.from_gguf(
    byte_level(QWEN3, QWEN3_ADDED, pre="qwen2", bos_token_id="<|endoftext|>", eos_token_id="<|im_end|>")
)
GEMMA3_TOKENIZER = Tokenizer.from_gguf(
    byte_level(GEMMA3, pre="gpt-2", architecture="gemma3", bos_token_id="<bos>", eos_token_id="<eos>")
)
GEMMA4_TOKENIZER = Tokenizer.from_gguf(
    byte_level(GEMMA4, GEMMA4_ADDED, pre="gpt-2", architecture="gemma4", bos_token_id="<bos>", eos_token_id="<eos>")
)
LLAMA3_CHAT = ChatTemplate(LLAMA3_TEMPLATE, LLAMA3_TOKENIZER, "llama")
QWEN3_CHAT = ChatTemplate(QWEN3_TEMPLATE, QWEN3_TOKENIZER, "qwen3")
GEMMA3_CHAT = ChatTemplate(GEMMA_TEMPLATE, GEMMA3_TOKENIZER, "gemma3")
OPENING_CHAT = ChatTemplate(OPENING_TEMPLATE, QWEN3_TOKENIZER, "qwen3")
HELLO = [Message("user", "hello")]


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
    tools = [{"type": "function", "function": {"name": bad, "parameters": {"properties": {bad: {"enum": [bad]}}}}}]
    calls = (
        ToolCall(bad, {bad: [bad, {"x": bad}]}),
        ToolCall("f", '{"a": "<|im_end|>"}'),
        ToolCall("g", "not json " + bad),
    )
    messages = [Message("user", "hello"), Message("assistant", "", tool_calls=calls), Message("tool", bad, name=bad)]
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
    assert prompt.text.count(bad) == 3 + 4 + 1 + 1 + 1 + 4  # tools, three calls, the answer, ends of turns
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
        "{% set c = messages[0].content %}{{ c | trim }}|{{ c.split(':')[0] | upper }}|{{ 'b' in c }}|{{ c | length }}"
        "|{{ tools[0].type == 'object' }}"
    )
    chat = ChatTemplate(source, QWEN3_TOKENIZER, "qwen3")
    tools = [{"type": "object", "thought": "t"}]
    assert chat.render([Message("user", " a:b ")], tools=tools) == "a:b| A|True|5|True"


def test_keys_that_templates_look_up_are_untouched_though_a_control_token_ends_like_them() -> None:
    """T05."""
    tokenizer = Tokenizer.from_gguf(byte_level(("<|x|>type",)))
    chat = ChatTemplate("{{ tools[0].type }}", tokenizer, "llama")
    assert chat.render(HELLO, tools=[{"type": "function"}]) == "function"


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
    ],
    ids=["llama3", "llama3-silent", "gemma", "gemma-silent", "qwen3"],
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


def test_the_systems_text_can_be_folded_into_the_first_users_turn() -> None:
    """C01."""
    messages = [Message("system", "Be brief."), *HELLO, Message("assistant", "hi"), Message("user", "more")]
    text = GEMMA3_CHAT.render(messages, fold_system=True)
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\n\nhello<end_of_turn>\n<start_of_turn>model\nhi")
    assert text.count("Be brief.") == 1
    assert GEMMA3_CHAT.render([Message("system", "Go.")], fold_system=True).startswith("<bos><start_of_turn>user\nGo.")


@pytest.mark.parametrize("roles", [["user", "user"], ["assistant"], ["user", "assistant", "tool", "user", "user"]])
def test_roles_that_do_not_alternate_are_refused_and_never_half_rendered(roles: list[str]) -> None:
    """C02."""
    with pytest.raises(RequestError, match="roles must alternate"):
        GEMMA3_CHAT.render([Message(role, "hello") for role in roles])


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="no messages"):
        LLAMA3_CHAT.render([])


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
        chat.render(HELLO, tools=[{"type": "function"}])


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
    metadata["tokenizer.chat_template.tool_use"] = "tools: {{ tools | length }}"
    chat = ChatTemplate.for_tokenizer(Tokenizer.from_gguf(metadata), "qwen3")
    assert chat.render(HELLO) == "plain"
    assert chat.render(HELLO, tools=[{}]) == "tools: 1"
