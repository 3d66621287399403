"""Tools as a request defines them, and which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bytefloor.errors import RequestError

Mode = Literal["auto", "none", "required", "named"]

# Templates write names into the call's own syntax, unquoted on some, so they cannot be free text.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolChoice:
    """auto: text or calls. none: text only. required: one call or more. named: calls of the tool `name` only."""

    mode: Mode = "auto"
    name: str | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools of a request in OpenAI's form, `{"type": "function", "function": {...}}`. Errors name the field."""
    found: dict[str, Tool] = {}
    for at, given in enumerate(tools):
        path = f"tools[{at}]"
        function = _member(given, "function", Mapping, f"{path}.function", "an object with a name")
        if given.get("type", "function") != "function":
            raise RequestError(f"{path}.type is {given['type']!r}, expected 'function'")
        tool = _read_function(function, f"{path}.function")
        if tool.name in found:
            raise RequestError(f"{path}.function.name is {tool.name!r}, which an earlier tool has already")
        found[tool.name] = tool
    return tuple(found.values())


def _read_function(function: Mapping[str, Any], path: str) -> Tool:
    name = _member(function, "name", str, f"{path}.name", "a name")
    if not NAME.fullmatch(name):
        raise RequestError(f"{path}.name is {name!r}, expected 1 to 128 letters, digits, '_', '.' or '-'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{path}.description is {description!r}, expected a text")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{path}.parameters is {parameters!r}, expected a JSON schema")
    schema = parameters or {}
    if schema.get("type", "object") != "object":
        raise RequestError(f"{path}.parameters.type is {schema['type']!r}, expected 'object': arguments have names")
    return Tool(name, description or "", schema)


def _member(given: Any, key: str, kind: type, path: str, wanted: str) -> Any:
    found = given.get(key) if isinstance(given, Mapping) else None
    if not isinstance(found, kind):
        raise RequestError(f"{path} is {found!r}, expected {wanted}")
    return found


def read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice` of a request: a mode, or an object with the name of a tool (flat, or inside "function").

    None is auto where there are tools and none where there are not. Refused: names not in `tools`, and calls demanded
    where there are no tools.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, Mapping):
        inner = value.get("function", value)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if value.get("type", "function") != "function" or not isinstance(name, str):
            raise RequestError(f"tool_choice is {dict(value)!r}, expected an object of type 'function' with a name")
        choice = ToolChoice("named", name)
    elif value in ("auto", "none", "required"):
        choice = ToolChoice(value)
    else:
        raise RequestError(f"tool_choice is {value!r}, expected 'auto', 'none', 'required' or a function's name")
    check_choice(choice, tools)
    return choice


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Refuses a choice that no call could satisfy."""
    if choice.mode in ("required", "named") and not tools:
        raise RequestError(f"tool_choice is {choice.name or choice.mode!r}, but the request has no tools")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools)
        raise RequestError(f"tool_choice names {choice.name!r}, which is not among the tools: {known}")
