"""Grammars under which a model can only answer with calls of the request's tools, in its own family's syntax."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bytefloor.errors import RequestError
from bytefloor.text.calls import GEMMA4, HERMES, LLAMA3, CallFormat
from bytefloor.text.gemma_grammar import GemmaRules
from bytefloor.text.tools import Tool, ToolChoice, check_choice

#: Text cut at its control tokens: their ids, and what lies between them.
Cut = Callable[[str], list[int | str]]


@dataclass(frozen=True)
class GrammarSource:
    """What a grammar compiler gets. "lark" is llguidance's dialect: `%json` rules, control tokens as `<[id]>`."""

    kind: Literal["lark"]
    source: str


def call_grammar(
    format: CallFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    cut: Cut,
    *,
    is_parallel: bool = True,
) -> GrammarSource | None:
    """The grammar of an answer for `required` and `named`; None for the other choices, which bind to nothing.

    cut: the tokenizer's `finder.cut`. is_parallel: more than one call may come, where the format's turns can show them.
    Where the answer may begin with a thought, the grammar is that of what comes behind it.
    """
    check_choice(choice, tools)
    if choice.mode not in ("required", "named"):
        return None
    allowed = [tool for tool in tools if choice.mode == "required" or tool.name == choice.name]
    rules = _Rules(cut)
    rules.add("start", "calls")
    many = is_parallel and format.n_a_turn != 1
    _WRITERS[format.name](rules, allowed, many)
    return GrammarSource("lark", "\n".join(rules.lines) + "\n")


class _Rules:
    """A grammar's lines."""

    def __init__(self, cut: Cut) -> None:
        self.lines: list[str] = []
        self._cut = cut

    def add(self, name: str, body: str) -> None:
        """One more rule."""
        self.lines.append(f"{name}: {body}")

    def spelled(self, text: str) -> str:
        """The text as a sequence of control tokens and strings."""
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in self._cut(text))


def _add_hermes(rules: _Rules, tools: Sequence[Tool], many: bool) -> None:
    rules.add("calls", f"call ({rules.spelled(chr(10))} call)*" if many else "call")
    _add_json_calls(rules, tools, '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>")


def _add_llama(rules: _Rules, tools: Sequence[Tool], many: bool) -> None:
    assert not many
    rules.add("calls", "call")
    _add_json_calls(rules, tools, '{"name": %s, "parameters": ', "}")


def _add_json_calls(rules: _Rules, tools: Sequence[Tool], before: str, after: str) -> None:
    rules.add("call", " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        head = rules.spelled(before % json.dumps(tool.name))
        rules.add(f"call_{i}", f"{head} {_arguments(tool)} {rules.spelled(after)}")


def _arguments(tool: Tool) -> str:
    """The arguments' JSON schema as part of a rule."""
    schema: Mapping[str, Any] = tool.parameters
    if not schema:  # no schema is an empty list of parameters
        return '"{}"'
    if "x-guidance" in schema:  # options for the compiler, one of which is to ignore what it does not know
        raise RequestError(f"the parameters of {tool.name!r} have the key 'x-guidance', expected a JSON schema")
    return "%json " + json.dumps({"type": "object", **schema})


def _add_gemma(rules: _Rules, tools: Sequence[Tool], many: bool) -> None:
    rules.add("calls", "call+" if many else "call")
    rules.add("call", " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        values = GemmaRules(rules.add, rules.spelled, f"tool_{i}", tool)
        head, tail = rules.spelled(f"<|tool_call>call:{tool.name}"), rules.spelled("<tool_call|>")
        rules.add(f"call_{i}", f"{head} {values.arguments()} {tail}")
    GemmaRules.add_shared(rules.add, rules.spelled)


_WRITERS: dict[str, Callable[[_Rules, Sequence[Tool], bool], None]] = {
    HERMES.name: _add_hermes,
    LLAMA3.name: _add_llama,
    GEMMA4.name: _add_gemma,
}
