"""Chat templates for files that bring none, chosen by the turn tokens that the vocabulary has."""

from __future__ import annotations

from collections.abc import Callable, Collection

_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('tools need the chat template of the model, and its file has none') }}{% endif %}"
)

_LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: Qwen3's way to say "do not think": a thought already closed.
_CLOSED_THINK = (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)

#: Gemma 3 has no system turn: its text precedes the first user's. Turns must alternate.
_GEMMA3 = (
    "{{ bos_token }}"
    "{% set first = '' %}{% set rest = messages %}"
    "{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for message in rest %}"
    "{% if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('roles must alternate user, assistant, user, ...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}"
    "{{ (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

#: Thinking is asked for by a token at the top of the system turn.
_GEMMA4 = (
    "{{ bos_token }}"
    "{% set thinks = enable_thinking is defined and enable_thinking %}"
    "{% set has_system = messages[0].role in ['system', 'developer'] %}"
    "{% if thinks or has_system %}"
    "{{ '<|turn>system\n' + ('<|think|>' if thinks else '') }}"
    "{{ (messages[0].content | trim if has_system else '') + '<turn|>\n' }}{% endif %}"
    "{% for message in (messages[1:] if has_system else messages) %}"
    "{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ message.content | trim + '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}"
)
_CLOSED_CHANNEL = "{% if not thinks %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"


def source_for(tokens: Collection[str], *, bare_model_turn: bool) -> tuple[str, str] | None:
    """(name, source) of the format whose turn tokens are there; None where there are none.

    `bare_model_turn`: Gemma 4's small models do without the closed thought before an answer.
    """
    formats: dict[str, tuple[str, Callable[[], str]]] = {
        "<|turn>": ("Gemma 4", lambda: _GEMMA4 + ("" if bare_model_turn else _CLOSED_CHANNEL) + "{% endif %}"),
        "<start_of_turn>": ("Gemma 3", lambda: _GEMMA3),
        "<|start_header_id|>": ("Llama 3", lambda: _LLAMA3),
        "<|im_start|>": ("ChatML", lambda: _CHATML + (_CLOSED_THINK if "<think>" in tokens else "")),
    }
    for token, (name, source) in formats.items():
        if token in tokens:
            return name, _NO_TOOLS + source()
    return None
