"""``run``: one prompt, one answer."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bytefloor.engine.loading import EngineOptions, Legible, Opened
from bytefloor.engine.request import Request
from bytefloor.engine.request_check import check_request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import FileError, RequestError
from bytefloor.text.chat import ChatPrompt, Message
from bytefloor.text.grammar import Grammar, GrammarKind, compile_grammar
from bytefloor.text.reasoning import Channel
from bytefloor.tools import interrupt
from bytefloor.tools.session import Answer, as_text, count_tokens, open_with_progress, stream_answer, summary, write

Asked = tuple[GrammarKind, str]
"""A kind of grammar and its text."""


@dataclass(frozen=True)
class RunOptions:
    """What ``run`` was asked beside the prompt."""

    sampling: SamplingParams
    n_tokens: int
    stops: tuple[str, ...]
    system: str | None
    thinking: bool | None
    is_raw: bool
    is_json: bool
    grammar: Asked | None = None
    thinking_budget: int | None = None
    detects_loops: bool = True


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """From -p, from a file, or from standard input when it is not a terminal or -p is '-'."""
    if prompt is not None and file is not None:
        raise RequestError("both -p and -f were given; one of them is enough")
    if file is not None:
        text = _read(file)
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = as_text(sys.stdin.buffer.read(), "standard input")
    elif prompt is not None:
        text = as_text(os.fsencode(prompt), "-p")
    else:
        text = ""
    if not text.strip():
        raise RequestError("the prompt is empty: give one with -p or -f, or pipe it in")
    return text


def read_grammar(json_schema: str | None, grammar: Path | None, regex: str | None) -> Asked | None:
    """From --json-schema, JSON or a file of it, --grammar or --regex."""
    given = [flag for flag in (json_schema, grammar, regex) if flag is not None]
    if len(given) > 1:
        raise RequestError("more than one of --json-schema, --grammar and --regex was given; an answer follows one")
    if regex is not None:
        return "regex", regex
    if grammar is not None:
        text = _read(grammar)
        return ("gbnf" if "::=" in text and grammar.suffix != ".lark" else "lark"), text
    if json_schema is None:
        return None
    return "json_schema", json_schema if json_schema.lstrip()[:1] in ("{", "") else _read(Path(json_schema))


def _read(file: Path) -> str:
    try:
        return as_text(file.read_bytes(), str(file))
    except OSError as error:
        raise FileError(f"{file}: cannot be read: {error.strerror}") from None


def compiled(legible: Legible, prompt: ChatPrompt, asked: Asked | None) -> Grammar | None:
    """For the answer to this prompt; a thought before it is free."""
    if asked is None:
        return None
    return compile_grammar(legible.tokenizer, *asked).behind(prompt.reasoning_tags, is_open=prompt.is_thought_open)


def answer_once(model: str | None, text: str, options: EngineOptions, asked: RunOptions) -> int:
    """Prints the answer as it comes; the exit status, 1 if it ended in an error and 130 after Ctrl-C."""
    n_tokens = count_tokens(asked.n_tokens)
    made: list[tuple[ChatPrompt, Request]] = []

    def look(legible: Legible, context: int) -> None:
        prompt, request = make_request(legible, text, asked, n_tokens)
        check_request(request, context, legible.model.config.vocabulary_size, legible.tokenizer)
        made.append((prompt, request))

    opened = open_with_progress(model, options, look)
    prompt, request = made[0]
    show = (lambda channel, piece: None) if asked.is_json else Printer()
    answer = stream_answer(opened.engine, request, prompt.splitter(), show)
    if asked.is_json:
        write(json.dumps(to_json(opened, prompt, answer, asked.sampling.n_logprobs)) + "\n")
    else:
        write("\n")
        print(summary(answer.finish, opened), file=sys.stderr)
    if opened.template is None and not asked.is_raw:
        print("note: the model has no chat template: the prompt was continued as plain text", file=sys.stderr)
    return {"error": 1, "cancelled": interrupt.STATUS}.get(answer.finish.reason, 0)


def make_request(legible: Legible, text: str, asked: RunOptions, n_tokens: int | None) -> tuple[ChatPrompt, Request]:
    """The prompt, and what the engine is asked about it."""
    prompt = make_prompt(legible, text, asked)
    grammar = compiled(legible, prompt, asked.grammar)
    request = Request(
        prompt_ids=tuple(prompt.ids),
        max_tokens=n_tokens,
        sampling=asked.sampling,
        stops=asked.stops,
        # What a form demands may repeat itself.
        detects_loops=legible.detects_loops and grammar is None and asked.detects_loops,
        shown_ids=prompt.keep_special,
        grammar=grammar,
        thinking=prompt.thinking,
    )
    return prompt, request


def make_prompt(legible: Legible, text: str, asked: RunOptions) -> ChatPrompt:
    """Through the file's chat template; as it is with --raw, or where the file brings none."""
    if asked.is_raw or legible.template is None:
        if any(each is not None for each in (asked.system, asked.thinking, asked.thinking_budget)):
            why = "--raw was given" if asked.is_raw else "the model has no chat template"
            raise RequestError(f"--system, --thinking and --reasoning-budget need a chat template, and {why}")
        return ChatPrompt.plain(text, legible.tokenizer.encode(text))
    messages = [Message("user", text)]
    if asked.system is not None:
        messages.insert(0, Message("system", asked.system))
    return legible.template.prepare(messages, thinking=asked.thinking, thinking_budget=asked.thinking_budget)


class Printer:
    """Prints the answer on standard output; a thought before it, marked as one, goes to standard error."""

    def __init__(self, is_thought_shown: bool = True) -> None:
        self._channel: Channel = "content"
        self._is_thought_shown = is_thought_shown

    def __call__(self, channel: Channel, text: str) -> None:
        if channel == "reasoning" and not self._is_thought_shown:
            return
        if channel != self._channel:
            write("[thinking]\n" if channel == "reasoning" else "\n[/thinking]\n", sys.stderr)
            self._channel = channel
        write(text, sys.stderr if channel == "reasoning" else sys.stdout)


def to_json(opened: Opened, prompt: ChatPrompt, answer: Answer, n_logprobs: int) -> dict:
    """Everything about the answer as one JSON object."""
    tokenizer = opened.tokenizer

    def token_text(id: int) -> str:
        # A padded table has rows that are nobody's text; they are never sampled, but may be among the best.
        return tokenizer.token_text(id) if id < tokenizer.n_tokens else ""

    body: dict = {
        "model": opened.model.config.name,
        "prompt": prompt.text,
        "prompt_ids": list(prompt.ids),
        "text": answer.text,
        "reasoning": answer.reasoning,
        "ids": list(answer.ids),
        **asdict(answer.finish),
        "prompt_tok_s": answer.finish.prompt_tok_s,
        "decode_tok_s": answer.finish.decode_tok_s,
        "context": opened.engine.capacity,
        "kv": opened.kv,
        "device": str(opened.device),
    }
    if n_logprobs:
        body["logprobs"] = [
            {
                "id": each.id,
                "text": token_text(each.id),
                "logprob": each.logprob,
                "top": [{"id": id, "text": token_text(id), "logprob": value} for id, value in each.top],
            }
            for each in answer.sampled
        ]
    return body
