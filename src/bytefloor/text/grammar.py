"""Structured output: what an answer may look like, compiled, and how far an answer has come.

A mask of Gemma's 262,144 tokens takes 0.03 ms of one CPU core, seldom more than 0.1, for JSON of a schema with 120
properties, which compiles in 70 ms. Grammars that repeat single characters by rules take 3 to 10.
`tests/grammar_costs.py` measures it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from llguidance import LLMatcher, regex_to_lark

from bytefloor.errors import RequestError
from bytefloor.text.constraint import Constraint, Thought
from bytefloor.text.gbnf import to_lark
from bytefloor.text.reasoning import ReasoningTags
from bytefloor.text.schema import check_schema, parse_schema, refuse_at
from bytefloor.text.tokenizer import Tokenizer

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "gbnf"]

#: Between two tokens of JSON. Without an end a model may write white space until its tokens are used up.
_WHITE_SPACE = r"[ \t\n\r]{1,32}"
_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITE_SPACE}
_EMBEDDED = re.compile(r"%json\s*(?=[{\[])")
_REGEX_ERROR = re.compile(r"regex parse error: .*? error: (.+?)(?: \d+ \||$)")
_SETTINGS = re.compile(r"^%llguidance\s*(?={)", re.MULTILINE)
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")


@dataclass(frozen=True, eq=False)
class Grammar:
    """What answers may look like. Made by `compile_grammar`, for one tokenizer; any number of requests share it.

    definition: as llguidance reads it. thought: set where the answer may begin with thinking, which is free.
    """

    kind: GrammarKind
    definition: str
    tokenizer: Tokenizer = field(repr=False)
    matcher: LLMatcher = field(repr=False)
    thought: Thought | None = None

    def behind(self, tags: ReasoningTags | None, *, is_open: bool = False) -> Grammar:
        """The same, from where a thought ends: with a ChatPrompt's `reasoning_tags` and `is_thought_open`.

        Not open: the answer may begin with a thought or without one. Where the tags are no single control tokens
        nobody could tell where a thought ends: then there is none, and one already open is a RequestError.
        """
        if tags is None:
            return self
        control = self.tokenizer.vocabulary.control
        opening = self.tokenizer.encode(tags.open, parse_special=True, add_bos=False)
        close = control.get(tags.close)
        if close is not None and opening and opening[0] in self.tokenizer.control_ids:
            return replace(self, thought=Thought(tuple(opening), close, is_open))
        if is_open:
            raise RequestError(
                f"structured output cannot follow a thought here: {tags.close} is not one token of this model; "
                "turn thinking off"
            )
        return self

    def start(self, prompt_ids: Sequence[int], answer_ids: Sequence[int] = ()) -> Constraint:
        """For one answer, behind the tokens that it already has."""
        made = Constraint(self.matcher.deep_copy(), self.tokenizer, self.thought, prompt_ids)
        for id in answer_ids:
            made.accept(id)
        return made


def compile_grammar(
    tokenizer: Tokenizer, kind: GrammarKind, source: Mapping[str, Any] | str | bool | None = None
) -> Grammar:
    """RequestError for what cannot be enforced as it is written, with the path inside a schema; nothing is ignored.

    source: none for json_object; the schema or its JSON text for json_schema; otherwise text, of which a regex (Rust's
    syntax) must match the whole answer.
    """
    schema: Any = None
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind == "json_schema":
        schema = parse_schema(source)
        if schema is False:
            raise RequestError("json_schema: #: false allows no answer at all")
    elif kind not in get_args(GrammarKind):
        raise RequestError(f"grammar kind {kind!r}: expected one of {', '.join(get_args(GrammarKind))}")
    elif not isinstance(source, str) or not source.strip():
        raise RequestError(f"{kind}: found {type(source).__name__} {source!r:.40}, expected text that is not empty")
    if schema is not None:
        if reason := _schema_complaint(schema):
            raise refuse_at(schema, reason, _schema_complaint)
        lark = f"start: %json {json.dumps(_with_options(schema))}"
    elif kind == "regex":
        lark = f"start: /{regex_to_lark(str(source))}/"
    else:
        lark = _checked_lark(to_lark(str(source)) if kind == "gbnf" else str(source))
    definition = LLMatcher.grammar_from_lark(_unforced(lark))
    if reason := _complaint(definition, tokenizer):
        raise RequestError(f"{kind}: {_of_regex(str(source), reason) if kind == 'regex' else reason}")
    matcher = LLMatcher(tokenizer.guide.words, definition, log_level=0)
    if matcher.is_error():
        raise RequestError(f"{kind}: {_one_line(matcher.get_error())}")
    return Grammar(kind, definition, tokenizer, matcher)


def _of_regex(source: str, reason: str) -> str:
    """What is wrong with a regex, without the grammar that was made around it."""
    found = _REGEX_ERROR.search(reason)
    return reason if found is None else f"{source!r}: {found[1]}"


def _with_options(schema: Any) -> dict[str, Any]:
    return {**({} if schema is True else schema), "x-guidance": _JSON_OPTIONS}


def _schema_complaint(schema: Any) -> str | None:
    """As _complaint, in fewer words. `false` is at its place inside of a schema, where it is not what is wrong."""
    return None if schema is False else _complaint(LLMatcher.grammar_from_json_schema(_with_options(schema)))


def _unforced(lark: str) -> str:
    """Where only one text can follow, llguidance would allow only the tokens that text is usually made of. But which of
    the tokens that spell it is for the model, bans and biases to say."""
    found = _SETTINGS.search(lark)
    settings: dict[str, Any] = {}
    rest = lark
    if found is not None:
        try:
            settings, end = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError as error:
            raise RequestError(f"lark: %llguidance is not followed by JSON: {error}") from None
        rest = lark[: found.start()] + lark[end:]
    return f"%llguidance {json.dumps({**settings, 'no_forcing': True})}\n{rest}"


def _checked_lark(source: str) -> str:
    """Refuses what Lark lets through and nobody would enforce."""
    decoder, rules, at = json.JSONDecoder(), "", 0
    while embedded := _EMBEDDED.search(source, at):
        try:
            schema, end = decoder.raw_decode(source, embedded.end())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"lark: %json at character {embedded.start()}: not JSON: {error}") from None
        check_schema(schema)
        # What a schema's own texts say is no grammar.
        rules, at = rules + source[at : embedded.end()], end
    if found := _TEMPERATURE.search(rules + source[at:]):
        raise RequestError(f"lark: {found[0]}...: a rule's temperature is not supported")
    return source


def _complaint(definition: str, tokenizer: Tokenizer | None = None) -> str | None:
    """What is wrong with a grammar. A warning is about something that would not be enforced."""
    words = None if tokenizer is None else tokenizer.guide.words
    _, messages = LLMatcher.validate_grammar_with_warnings(definition, words)
    return _one_line(messages[0]) if messages else None


def _one_line(message: str) -> str:
    return " ".join(message.split())[:300]
