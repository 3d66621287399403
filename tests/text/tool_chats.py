"""Chat templates with tools, as the families write them, each with a tokenizer that has its tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer
from text.small_chats import GEMMA4_TOKENIZER, QWEN3_TEMPLATE
from text.small_vocabularies import LLAMA3, QWEN3, QWEN3_ADDED, byte_level

#: Tools in the first user's turn, one call a turn, results as JSON under a role of their own.
LLAMA3_TOOLS_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call a turn, please') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}{%- for tool in tools %}{{- (tool | tojson) + '\\n\\n' }}{%- endfor %}{%- endif %}
        {{- message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

LLAMA3_TOKENIZER = Tokenizer.from_gguf(
    byte_level((*LLAMA3, "<|python_tag|>"), bos_token_id="<|begin_of_text|>", eos_token_id="<|eot_id|>")
)
#: A Llama vocabulary, so that no tag of the format is a token of its own (Hermes).
HERMES_CHAT = ChatTemplate(QWEN3_TEMPLATE, Tokenizer.from_gguf(byte_level(QWEN3)), "llama")
QWEN3_CHAT = ChatTemplate(
    QWEN3_TEMPLATE, Tokenizer.from_gguf(byte_level(QWEN3, QWEN3_ADDED, pre="qwen2", eos_token_id="<|im_end|>")), "qwen3"
)
LLAMA3_CHAT = ChatTemplate(LLAMA3_TOOLS_TEMPLATE, LLAMA3_TOKENIZER, "llama")


@cache
def gemma4_chat(shared_dir: Path) -> ChatTemplate:
    """Gemma 4's own template, with a small vocabulary."""
    metadata = open_checkpoint(shared_dir / "vocab" / "ggml-vocab-gemma-4.gguf").metadata
    return ChatTemplate(metadata["tokenizer.chat_template"], GEMMA4_TOKENIZER, "gemma4")


def tool(name: str, **properties: object) -> dict:
    """A tool in OpenAI's form, all its parameters required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
]
