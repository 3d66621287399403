"""Answers of a given form: the fields of a body that ask for one, as a grammar."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from typing import Any

from bytefloor.errors import RequestError
from bytefloor.server.bodies import GenerationFields
from bytefloor.server.refusal import bad_field
from bytefloor.text.chat import ChatPrompt
from bytefloor.text.grammar import Grammar, GrammarKind, compile_grammar
from bytefloor.text.tokenizer import Tokenizer

MOST_KEPT = 64
"""Compiled grammars: an application asks for the same few again and again."""


def grammar_of(body: GenerationFields, prompt: ChatPrompt, grammars: Grammars) -> Grammar | None:
    """What the answer has to be, from response_format, grammar or regex, or from a tool that must be called; behind a
    thought where the prompt lets one be.

    Refusal 400 with the field's name, and the path inside a schema, for what cannot be held to.
    """
    asked = [name for name in ("response_format", "grammar", "regex") if getattr(body, name) is not None]
    if len(asked) > 1:
        raise bad_field(asked[1], f"{' and '.join(asked)} are given together: an answer has one form")
    found = _wanted(asked[0], getattr(body, asked[0])) if asked else None
    if found is not None and prompt.call_format is not None:
        name = asked[0]
        message = f"{name} and tools are given together: an answer has one form, unless tool_choice is 'none'"
        raise bad_field(name, message)
    if prompt.grammar is not None:
        found = prompt.grammar.kind, prompt.grammar.source, "tools"
    if found is None:
        return None
    kind, source, at = found
    try:
        grammar = grammars.compile(kind, json.dumps(source) if kind == "json_schema" else source)
        return grammar.behind(prompt.reasoning_tags, is_open=prompt.is_thought_open)
    except RequestError as error:
        raise bad_field(at, f"{at}: {error}") from None


class Grammars:
    """Those that were compiled last, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.compile = lru_cache(maxsize=MOST_KEPT)(partial(compile_grammar, tokenizer))


def _wanted(name: str, value: Any) -> tuple[GrammarKind, Any, str] | None:
    """(kind, source, the field that has it); None for an answer that is any text."""
    if name != "response_format":
        if not isinstance(value, str) or not value.strip():
            raise bad_field(name, f"{name}: expected text that is not empty, found {type(value).__name__}")
        return ("regex" if name == "regex" else "gbnf" if "::=" in value else "lark"), value, name
    if not isinstance(value, dict):
        raise bad_field(name, f"{name}: expected an object with a type, found {type(value).__name__}")
    kind = value.get("type")
    allowed = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in allowed:
        raise bad_field(f"{name}.type", f"{name}.type = {kind!r}: expected text, json_object or json_schema")
    for key in value.keys() - allowed[kind]:
        raise bad_field(f"{name}.{key}", f"{name}.{key} is not known for type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object", None, name
    return "json_schema", _schema_of(value.get("json_schema")), f"{name}.json_schema.schema"


def _schema_of(value: Any) -> Any:
    """Name, description and strict change nothing: a schema is always held to, or refused."""
    at = "response_format.json_schema"
    if not isinstance(value, dict) or "schema" not in value:
        raise bad_field(at, f"{at}: expected an object with a schema")
    for key in value.keys() - {"name", "description", "strict", "schema"}:
        raise bad_field(f"{at}.{key}", f"{at}.{key} is not known: expected name, description, strict or schema")
    if not isinstance(value["schema"], dict | bool):
        found = type(value["schema"]).__name__
        raise bad_field(f"{at}.schema", f"{at}.schema: expected a JSON schema, found {found}")
    return value["schema"]
