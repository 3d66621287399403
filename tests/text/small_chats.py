"""Chat templates as the families write them, cut to what the tests need, each with a tokenizer that has its tokens."""

from __future__ import annotations

from bytefloor.text.chat import ChatTemplate, Message
from bytefloor.text.tokenizer import Tokenizer
from text.small_vocabularies import GEMMA3, GEMMA4, GEMMA4_ADDED, LLAMA3, QWEN3, QWEN3_ADDED, byte_level, sentencepiece

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

MISTRAL_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
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
SPM_TOKENIZER = Tokenizer.from_gguf(sentencepiece())
GEMMA4_TOKENIZER = Tokenizer.from_gguf(
    byte_level(GEMMA4, GEMMA4_ADDED, pre="gpt-2", architecture="gemma4", bos_token_id="<bos>", eos_token_id="<eos>")
)
LLAMA3_CHAT = ChatTemplate(LLAMA3_TEMPLATE, LLAMA3_TOKENIZER, "llama")
QWEN3_CHAT = ChatTemplate(QWEN3_TEMPLATE, QWEN3_TOKENIZER, "qwen3")
GEMMA3_CHAT = ChatTemplate(GEMMA_TEMPLATE, GEMMA3_TOKENIZER, "gemma3")
OPENING_CHAT = ChatTemplate(OPENING_TEMPLATE, QWEN3_TOKENIZER, "qwen3")
HELLO = [Message("user", "hello")]
