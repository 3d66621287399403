"""The bodies of requests, parsed strictly: a field that is not listed here is an error that names it.

Fields that are accepted and change nothing are listed as such. Those of features that are not there yet are declared,
so that `asked.py` can refuse them by name.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from bytefloor.server.refusal import Refusal, bad_field

_PATH = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(unknown|missing required) field `(.*?)`", re.DOTALL)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Null means the same as leaving a field out."""


OTHERS = {
    "repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_window", "dry_penalty_last_n": "dry_window",
    "n_predict": "max_tokens", "num_predict": "max_tokens",
}  # fmt: skip
"""What other servers call them."""


class SamplingFields(Body):
    """Names of `engine/sampling_params.py`, and the two that OpenAI and others spell differently."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_window: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    logprobs_after: bool | None = None


class StreamOptions(Body):
    """``include_obfuscation`` changes nothing: nothing is ever padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """What both ways of asking for text share. The last eight change nothing."""

    model: str | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    detect_loops: bool | None = None
    # The form of the answer, see `structured.py`.
    response_format: Any = None
    grammar: Any = None
    regex: Any = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_prompt: bool | None = None


class FunctionCall(Body):
    """``arguments``: JSON text, as OpenAI has it, or the object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCallBody(Body):
    """A call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None
    index: int | None = None


class MessageBody(Body):
    """A turn. The last four are what answers carry empty and clients send back."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class TextPart(Body):
    """A piece of a message's content."""

    type: str
    text: str


class ChatBody(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    fold_system: bool | None = None
    reasoning_format: Literal["none", "auto"] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Of features that are not there.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None


class CompletionBody(GenerationFields, kw_only=True):
    """POST /v1/completions. prompt: a text, several, token ids, or several lists of those."""

    prompt: str | list[Any]
    # Tokens that end a turn are text as any other: for measuring, as other servers have it.
    ignore_eos: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings. input: as `CompletionBody.prompt`; user changes nothing."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


class TemplateBody(Body):
    """POST /apply-template."""

    messages: list[MessageBody]
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    fold_system: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize. parse_special: control tokens that are spelled in the text become tokens."""

    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


B = TypeVar("B", bound=msgspec.Struct)


def decode(data: bytes, kind: type[B]) -> B:
    """The body as a struct. Refusal 400 with the field that is wrong, what was found and what was expected."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _about_field(error, kind) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None


def convert(value: Any, kind: type[B], at: str) -> B:
    """A part of a body that was left open, parsed as strictly; at: where it stands."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _about_field(error, kind, at) from None


def _about_field(error: msgspec.ValidationError, kind: type[msgspec.Struct], at: str = "") -> Refusal:
    match = _PATH.match(str(error))
    assert match is not None
    words, path = match[1], match[2] or ""
    path = f"{at}.{path}" if at and path and not path.startswith("[") else at + path
    named = _NAMED.search(words)
    if named is None:
        return Refusal(400, f"{path or 'the body'}: {words}", path or None, "invalid_type")
    param = f"{path}.{named[2]}" if path else named[2]
    if named[1] == "unknown":
        ours = OTHERS.get(named[2])
        hint = f"; it is {ours}" if ours in kind.__struct_fields__ and not path else ""
        return bad_field(param, f"{param}: no such field here{hint}", "unknown_field")
    return bad_field(param, f"{param}: the field is missing", "missing_field")
