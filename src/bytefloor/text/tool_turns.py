"""Tool calls and their results in a conversation: checked, and put as the model's template wants them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from bytefloor.errors import RequestError
from bytefloor.text.message import Message, ToolCall

_Turn = dict[str, Any]


def checked_calls(messages: Sequence[Message], tools: Collection[str] | None) -> list[Message]:
    """The messages with their calls' arguments as objects and the results' tool names filled in.

    Refused, by the field's name: a result that answers no call of the turn before it, a call whose arguments are no
    JSON object, a call of a tool not in `tools` (None: the request brings no tools, and old calls stand as they are).
    """
    settled: list[Message] = []
    unanswered: list[ToolCall] = []
    for at, message in enumerate(messages):
        path = f"messages[{at}]"
        if message.tool_calls and message.role != "assistant":
            raise RequestError(f"{path}.tool_calls: a message of the role {message.role!r} has calls, expected none")
        if message.role == "tool":
            call = _answered(message, unanswered, path)
            unanswered.remove(call)
            settled.append(replace(message, name=call.name))
            continue
        calls = [_settled(call, tools, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
        ids = [call.id for call in calls if call.id is not None]
        if len(ids) != len(set(ids)):
            raise RequestError(f"{path}.tool_calls: two calls have the same id, among {', '.join(ids)}")
        settled.append(replace(message, tool_calls=tuple(calls)))
        unanswered = calls
    return settled


def _settled(call: ToolCall, tools: Collection[str] | None, path: str) -> ToolCall:
    if tools is not None and call.name not in tools:
        known = ", ".join(sorted(tools))
        raise RequestError(f"{path}.function.name is {call.name!r}, which is not among the tools: {known}")
    return replace(call, arguments=_object(call.arguments, f"{path}.function.arguments"))


def _object(arguments: Mapping[str, Any] | str, path: str) -> Mapping[str, Any]:
    """Clients send JSON text; most templates want the object, and would quote text a second time."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():  # how some clients send a call without arguments
        return {}
    try:
        parsed = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"{path} is not JSON: {problem}; found {arguments[:80]!r}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{path} is {arguments[:80]!r}, expected a JSON object")
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _answered(message: Message, unanswered: Sequence[ToolCall], path: str) -> ToolCall:
    """The call that a result answers: by id, else by name, else the first that has no result yet."""
    wanted, name = message.tool_call_id, message.name
    calls = [call for call in unanswered if wanted is None or call.id == wanted]
    if not calls:
        field, found = ("tool_call_id", repr(wanted)) if wanted is not None else ("role", "'tool'")
        waiting = ", ".join(call.id or call.name for call in unanswered) or "none"
        raise RequestError(
            f"{path}.{field} is {found}, but no call waits for this result: "
            f"calls of the assistant's turn before it without a result: {waiting}"
        )
    for call in calls:
        if name is None or call.name == name:
            return call
    raise RequestError(f"{path}.name is {name!r}, but the call it answers is of {calls[0].name!r}")


def with_results_inside(turns: Sequence[_Turn]) -> list[_Turn]:
    """Results as members of the turn that called (Gemma 4), where the answer that follows them goes too."""
    folded: list[_Turn] = []
    for turn in turns:
        last = folded[-1] if folded else {}
        if turn["role"] == "tool":
            last.setdefault("tool_responses", []).append({"name": turn["name"], "response": _response(turn["content"])})
        elif turn["role"] == "assistant" and not turn.get("tool_calls") and _waits_for_answer(last):
            last["content"] = turn["content"]
        else:
            folded.append(dict(turn))
    return folded


def _waits_for_answer(turn: _Turn) -> bool:
    return "tool_responses" in turn and not turn["content"]


def _response(content: str) -> Any:
    """Objects are shown in the model's own syntax, everything else as the text it is."""
    try:
        parsed = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return content
    return parsed if isinstance(parsed, dict) else content


def with_calls_apart(turns: Sequence[_Turn], n_a_turn: int) -> list[_Turn]:
    """Turns with at most `n_a_turn` calls, each followed by its results, for templates that show no more (Llama 3)."""
    apart: list[_Turn] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls", [])
        if len(calls) <= n_a_turn:
            apart.append(turn)
            continue
        results: list[_Turn] = []
        while at < len(turns) and turns[at]["role"] == "tool":
            results.append(turns[at])
            at += 1
        for first in range(0, len(calls), n_a_turn):
            some = calls[first : first + n_a_turn]
            apart.append({**turn, "content": turn["content"] if first == 0 else "", "tool_calls": some})
            for call in some:
                apart += _taken_result(results, call)
    return apart


def _taken_result(results: list[_Turn], call: Mapping[str, Any]) -> list[_Turn]:
    """The call's result, no longer among `results`; matched as `_answered` does."""
    for result in results:
        wanted = result.get("tool_call_id")
        if (result["name"] == call["function"]["name"]) if wanted is None else (wanted == call.get("id")):
            results.remove(result)
            return [result]
    return []
