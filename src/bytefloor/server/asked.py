"""From a body to what the engine is asked: the one place where fields become requests and ways to read answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bytefloor.engine.request import Request
from bytefloor.errors import RequestError
from bytefloor.server.bodies import Body, ChatBody, CompletionBody, GenerationFields, TemplateBody
from bytefloor.server.ids import new_id
from bytefloor.server.messages import as_messages, template_kwargs
from bytefloor.server.refusal import Refusal, bad_field
from bytefloor.server.sampling import in_range, sampling_params
from bytefloor.server.served import Served
from bytefloor.server.structured import grammar_of
from bytefloor.server.thinking import wanted_thinking
from bytefloor.text.chat import ChatPrompt
from bytefloor.text.reply import ReplySplitter
from bytefloor.text.stop import StopMatcher
from bytefloor.text.tools import ToolChoice, read_choice, read_tools

MAX_N, MAX_CHOICES = 16, 64
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions, where clients rely on it."""
_COUNT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Choice:
    """One answer that is wanted. prompt: which of the body's prompts it continues.

    ends_with_call: it is over when it has called a tool once.
    """

    request: Request
    parser: ReplySplitter
    prompt: int = 0
    ends_with_call: bool = False


@dataclass(frozen=True)
class Asked:
    """A body, understood. kind: ``chat`` or ``text``."""

    kind: str
    choices: tuple[Choice, ...]
    is_streamed: bool
    includes_usage: bool
    has_logprobs: bool
    shows_progress: bool = False


def ask_chat(body: ChatBody, served: Served) -> Asked:
    """What /v1/chat/completions is asked. Refusal 400 with the field's name."""
    served.check_name(body.model)
    _refuse_for_now(body, "functions", "function_call")
    if body.modalities not in (None, ["text"]):
        raise bad_field("modalities", f"modalities = {body.modalities!r}: expected ['text'], there is nothing else")
    in_range("top_logprobs", body.top_logprobs, int, 0, 20)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs is given without logprobs: set logprobs to true")
    in_range("max_completion_tokens", body.max_completion_tokens, int, 1, _COUNT_MAX)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        found = f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens}"
        raise bad_field("max_tokens", f"{found}: they mean the same, give one of them")
    prompt = chat_prompt(body, served)
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else 0
    request = _request(body, served, prompt, body.max_completion_tokens or body.max_tokens, n_logprobs, "messages")
    has_one_call = body.parallel_tool_calls is False and prompt.call_format is not None
    choices = _choices(body, request, prompt.raw() if body.reasoning_format == "none" else prompt)
    choices = [replace(choice, ends_with_call=has_one_call) for choice in choices]
    return _asked("chat", body, choices, bool(body.logprobs))


def ask_completion(body: CompletionBody, served: Served) -> Asked:
    """What /v1/completions is asked: texts and token ids go on as they are, without a template."""
    served.check_name(body.model)
    in_range("logprobs", body.logprobs, int, 0, 20)
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise _not_supported(name)
    if body.best_of not in (None, 1, body.n):
        raise bad_field("best_of", f"best_of = {body.best_of}: expected n or nothing, all that is made is returned")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    choices: list[Choice] = []
    for place, (at, prompt) in enumerate(plain_prompts(body.prompt, served, "prompt", MAX_CHOICES)):
        request = _request(body, served, prompt, max_tokens, body.logprobs or 0, at, bool(body.ignore_eos))
        choices += _choices(body, request, prompt, place)
        if len(choices) > MAX_CHOICES:
            raise bad_field("prompt", f"prompts times n make more than {MAX_CHOICES} answers, the most there may be")
    return _asked("text", body, choices, body.logprobs is not None)


def chat_prompt(body: ChatBody | TemplateBody, served: Served, add_generation_prompt: bool = True) -> ChatPrompt:
    """The messages through the model's template. Refusal 400 with the template's words where it refuses."""
    if served.template is None:
        raise bad_field("messages", served.template_advice, "no_chat_template")
    kwargs = template_kwargs(body.chat_template_kwargs)
    messages, choice, thinking = as_messages(body.messages), _tool_choice(body), wanted_thinking(body)
    try:
        return served.template.prepare(
            messages,
            tools=body.tools or None,
            tool_choice=choice,
            parallel_calls=body.parallel_tool_calls is not False,
            thinking=thinking.is_on,
            thinking_budget=thinking.n_most,
            fold_system=bool(body.fold_system),
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except RequestError as error:
        at = "tools" if str(error).startswith("tool") else "messages"
        at = thinking.at if thinking.at and "think" in str(error) else at
        raise bad_field(at, str(error)) from None
    except RecursionError:
        raise bad_field("messages", "messages or chat_template_kwargs are nested too deeply") from None


def _tool_choice(body: ChatBody | TemplateBody) -> ToolChoice:
    """Refusal 400 for tools that are none, and for a choice that no call could satisfy."""
    if not isinstance(body.tools, list | None):
        raise bad_field("tools", f"tools: expected a list, found {type(body.tools).__name__}")
    try:
        known = read_tools(body.tools or ())
    except RequestError as error:
        raise bad_field("tools", str(error)) from None
    try:
        return read_choice(body.tool_choice, known)
    except RequestError as error:
        raise bad_field("tool_choice", str(error)) from None


def _refuse_for_now(body: Body, *names: str) -> None:
    """Features that are not there yet. An empty list asks for nothing."""
    for name in names:
        if getattr(body, name) not in (None, []):
            raise _not_supported(name)


def _not_supported(name: str) -> Refusal:
    return bad_field(name, f"{name} is not supported by this server; leave it out", "unsupported_parameter")


def _request(
    body: GenerationFields,
    served: Served,
    prompt: ChatPrompt,
    max_tokens: int | None,
    n_logprobs: int,
    at: str,
    ignores_end: bool = False,
) -> Request:
    """at: the field that the prompt came from."""
    in_range("max_tokens", body.max_tokens, int, 1, _COUNT_MAX)
    grammar = grammar_of(body, prompt, served.grammars)
    if grammar is not None and ignores_end:
        raise bad_field("ignore_eos", "ignore_eos is given with a form of the answer, which says where it ends")
    request = Request(
        prompt_ids=tuple(prompt.ids),
        max_tokens=max_tokens,
        sampling=sampling_params(body, n_logprobs, served),
        stops=_stops(body.stop),
        ignores_end=ignores_end,
        detects_loops=served.detects_loops and not ignores_end and grammar is None and body.detect_loops is not False,
        shown_ids=prompt.keep_special,
        grammar=grammar,
        thinking=prompt.thinking,
    )
    try:
        served.engine.check(request)
    except RequestError as error:
        is_long = len(prompt.ids) >= served.engine.capacity
        raise bad_field(at, str(error), "context_length_exceeded" if is_long else None) from None
    return request


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise bad_field("stop", f"stop has {len(stops)} strings: expected at most {MAX_STOPS}")
    for text in stops:
        if len(text) > MAX_STOP_LENGTH:
            raise bad_field("stop", f"stop has a string of {len(text)} characters: expected at most {MAX_STOP_LENGTH}")
    try:
        StopMatcher(stops)
    except RequestError as error:
        raise bad_field("stop", str(error)) from None
    return stops


def _choices(body: GenerationFields, request: Request, prompt: ChatPrompt, place: int = 0) -> list[Choice]:
    """n of them. With a seed the i-th has the i-th seed after it, or all would be alike."""
    in_range("n", body.n, int, 1, MAX_N)

    def of(nth: int) -> Request:
        seed = request.sampling.seed
        if nth == 0 or seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + nth) % 2**64))

    return [Choice(of(nth), prompt.reply(new_id(12)), place) for nth in range(body.n or 1)]


def _asked(kind: str, body: GenerationFields, choices: Sequence[Choice], has_logprobs: bool) -> Asked:
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_field("stream_options", "stream_options is given without stream: set stream to true")
    if body.return_progress and not body.stream:
        raise bad_field("return_progress", "return_progress is given without stream: set stream to true")
    includes_usage = options is not None and bool(options.include_usage)
    shows_progress = bool(body.return_progress)
    return Asked(kind, tuple(choices), bool(body.stream), includes_usage, has_logprobs, shows_progress)


def plain_prompts(prompt: str | list[Any], served: Served, name: str, most: int) -> list[tuple[str, ChatPrompt]]:
    """(where it stands in the body, prompt) of each. name: of the field that has them, at most so many."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [(name, _plain_prompt(prompt, served, name))]
    if len(prompt) > most:
        raise bad_field(name, f"{name} has {len(prompt)} texts: expected at most {most}")
    named = [(f"{name}[{place}]", item) for place, item in enumerate(prompt)]
    return [(at, _plain_prompt(item, served, at)) for at, item in named]


def _plain_prompt(prompt: Any, served: Served, at: str) -> ChatPrompt:
    if isinstance(prompt, str):
        return ChatPrompt.plain(prompt, served.tokenizer.encode(prompt))
    if isinstance(prompt, list) and _are_ids(prompt):
        served.check_ids(prompt, at)
        return ChatPrompt.plain("", prompt)
    found = type(prompt).__name__
    raise bad_field(at, f"{at}: expected a text or a list of token ids, found {found} (texts or lists, not mixed)")


def _are_ids(items: list[Any]) -> bool:
    return {int}.issuperset(map(type, items))  # a bool is none
