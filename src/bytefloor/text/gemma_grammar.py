"""JSON schemas as grammar rules for Gemma 4's own way to write values.

What a schema demands is enforced, or refused by the name of the path and the keyword: nothing is let pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from bytefloor.errors import RequestError
from bytefloor.text.tools import Tool

Schema = Mapping[str, Any]

#: Keywords that demand nothing of a value.
_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated", "readOnly"}
    | {"$defs", "definitions", "writeOnly"}
)
_NUMBER_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _NUMBER_LIMITS,
    "number": _NUMBER_LIMITS,
    "boolean": frozenset(),
    "null": frozenset(),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
}
_MAX_ITEMS = 1000
_MAX_DEPTH = 100
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_KEY = re.compile(r'[^:{}\[\],"<>\s|]([^:{}\[\],"<>\r\n\t|]*[^:{}\[\],"<>\s|])?')


class GemmaRules:
    """The rules for one tool's arguments. `add` takes a rule's name and body; `spelled` writes a text as tokens."""

    def __init__(self, add: Callable[[str, str], None], spelled: Callable[[str], str], prefix: str, tool: Tool) -> None:
        self._add = add
        self._spelled = spelled
        self._prefix = prefix
        self._tool = tool
        self._references: dict[str, str] = {}
        self._n_rules = 0

    def arguments(self) -> str:
        """What stands for the arguments in the call's rule."""
        if not self._tool.parameters:
            return '"{}"'
        return self._value({"type": "object", **self._tool.parameters}, "")

    @staticmethod
    def add_shared(add: Callable[[str, str], None], spelled: Callable[[str], str]) -> None:
        """The rules for values of which the schema says nothing, and for texts."""
        quote = spelled('<|"|>')
        add("any", 'text | number | "true" | "false" | "null" | any_object | any_array')
        add("text", f"{quote} TEXT {quote}")
        add("number", '%json {"type": "number"}')
        add("any_object", '"{" (any_member ("," any_member)*)? "}"')
        add("any_member", 'KEY ":" any')
        add("any_array", '"[" (any ("," any)*)? "]"')
        # The quotation token is no text, so texts may hold anything but what would spell it.
        add("TEXT", '/(?s:.*)/ & ~/(?s:.*)<\\|"\\|>(?s:.*)/')
        add("KEY", "/[A-Za-z_][A-Za-z0-9_.-]*/")

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{self._n_rules}"
        self._n_rules += 1
        self._add(name, body)
        return name

    def _refuse(self, path: str, keyword: str, reason: str) -> RequestError:
        where = f"#{path}/{keyword}".rstrip("/")
        return RequestError(
            f"the parameters of {self._tool.name!r}, for calls as Gemma 4 writes them: {where} {reason}"
        )

    def _value(self, schema: Any, path: str) -> str:
        """A part of a rule that is this schema's values."""
        if path.count("/") > _MAX_DEPTH:
            raise RequestError(f"the parameters of {self._tool.name!r} are nested more than {_MAX_DEPTH} deep")
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self._refuse(path, "", f"is {schema!r}, which cannot be enforced")
        demands = {key: value for key, value in schema.items() if key not in _NOTES}
        if not demands:
            return "any"
        for keyword, make in (("$ref", self._reference), ("anyOf", self._any_of), ("enum", self._one_of)):
            if keyword in demands:
                others = demands.keys() - {keyword} - ({"type"} if keyword == "enum" else set())
                if others:
                    raise self._refuse(path, min(others), f"beside {keyword!r} cannot be enforced")
                return make(demands[keyword], f"{path}/{keyword}")
        if "const" in demands:
            return self._one_of([demands["const"]], f"{path}/const")
        kind = demands.pop("type", None)
        if isinstance(kind, list) and all(isinstance(one, str) for one in kind):
            # Each type minds its own keywords.
            known = [k for k in kind if k in _KEYWORDS]
            parts = [{"type": k, **{key: demands[key] for key in demands.keys() & _KEYWORDS[k]}} for k in known]
            unknown = demands.keys() - {key for part in parts for key in part}
            if unknown or len(known) < len(kind):
                raise self._refuse(path, min(unknown, default="type"), "cannot be enforced")
            return self._any_of(parts, path)
        return self._typed(kind, demands, path)

    def _typed(self, kind: Any, demands: Schema, path: str) -> str:
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise self._refuse(path, "type", f"is {kind!r}, expected one of {', '.join(_KEYWORDS)}")
        unknown = demands.keys() - _KEYWORDS[kind]
        if unknown:
            raise self._refuse(path, min(unknown), "cannot be enforced")
        self._check(demands, path)
        if kind == "string":
            return self._text(demands, path)
        if kind in ("integer", "number"):
            return self._rule("%json " + json.dumps({"type": kind, **demands}))
        if kind == "object":
            return self._object(demands, path)
        if kind == "array":
            return self._array(demands, path)
        return '"null"' if kind == "null" else '("true" | "false")'

    def _check(self, demands: Schema, path: str) -> None:
        """Keywords have values of their kind."""
        for keyword in _COUNTS:
            count = demands.get(keyword, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise self._refuse(path, keyword, f"is {count!r}, expected a whole number from 0 on")
        if not isinstance(demands.get("properties", {}), Mapping):
            raise self._refuse(path, "properties", f"is {demands['properties']!r}, expected an object")
        names = demands.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refuse(path, "required", f"is {names!r}, expected a list of names")

    def _text(self, demands: Schema, path: str) -> str:
        if not demands:
            return "text"
        least, most = demands.get("minLength", 0), demands.get("maxLength", "")
        quote = self._spelled('<|"|>')
        terminal = self._rule_of_letters(least, most)
        return f"{quote} {terminal} {quote}"

    def _rule_of_letters(self, least: int, most: int | str) -> str:
        name = f"{self._prefix}_{self._n_rules}".upper()
        self._n_rules += 1
        self._add(name, f"/(?s:.{{{least},{most}}})/ & TEXT")
        return name

    def _reference(self, target: Any, path: str) -> str:
        if isinstance(target, str) and target in self._references:
            return self._references[target]
        found: Any = self._tool.parameters
        if not isinstance(target, str) or not target.startswith("#"):
            raise self._refuse(path, "", f"is {target!r}, expected a reference within the schema")
        for part in target[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise self._refuse(path, "", f"is {target!r}, which the schema does not have")
            found = found[key]
        name = f"{self._prefix}_ref_{len(self._references)}"
        self._references[target] = name  # before its body, which may refer to it
        self._add(name, self._value(found, target[1:]))
        return name

    def _any_of(self, schemas: Any, path: str) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise self._refuse(path, "", f"is {schemas!r}, expected a list of schemas")
        return "(" + " | ".join(self._value(schema, f"{path}/{i}") for i, schema in enumerate(schemas)) + ")"

    def _one_of(self, values: Any, path: str) -> str:
        if not isinstance(values, list) or not values:
            raise self._refuse(path, "", f"is {values!r}, expected a list of values")
        return "(" + " | ".join(self._spelled(self._written(value, path)) for value in values) + ")"

    def _written(self, value: Any, path: str) -> str:
        """A value as the template writes it."""
        if isinstance(value, str):
            if '<|"|>' in value:
                raise self._refuse(path, "", "has a text with the quotation token in it, which cannot be written")
            return f'<|"|>{value}<|"|>'
        if value is None or isinstance(value, (bool, int, float)):
            return json.dumps(value)
        raise self._refuse(path, "", f"has {value!r}, and only texts, numbers, true, false and null can be listed")

    def _object(self, demands: Schema, path: str) -> str:
        properties, required = demands.get("properties", {}), demands.get("required", [])
        # Members that are not among the properties are allowed by many schemas and demanded by none: they never come.
        extra = demands.get("additionalProperties", True)
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise self._refuse(path, "required", f"has {unknown[0]!r}, which is not in properties")
        if properties:
            return self._members(properties, set(required), path)
        if extra is False:
            return '"{}"'
        member = self._rule(f'KEY ":" {self._value(extra, f"{path}/additionalProperties")}')
        return self._rule(f'"{{" ({member} ("," {member})*)? "}}"')

    def _members(self, properties: Schema, required: set[str], path: str) -> str:
        """Members in the template's order, which is that of jinja's dictsort; commas only between those that come."""
        names = sorted(properties, key=str.lower)
        members: list[str] = []
        for name in names:
            if not _KEY.fullmatch(name):
                raise self._refuse(path, f"properties/{name}", "is no name that can be written")
            value = self._value(properties[name], f"{path}/properties/{name}")
            members.append(self._rule(f"{self._spelled(f'{name}:')} {value}"))
        # From the last to the first: what may follow after a member, and what may come where none has come yet.
        after, first = '"}"', '"}"'
        for name, member in zip(reversed(names), reversed(members), strict=True):
            with_it, as_first = f'"," {member} {after}', f"{member} {after}"
            is_needed = name in required
            after = self._rule(with_it if is_needed else f"{with_it} | {after}")
            first = self._rule(as_first if is_needed else f"{as_first} | {first}")
        return self._rule(f'"{{" {first}')

    def _array(self, demands: Schema, path: str) -> str:
        least, most = demands.get("minItems", 0), demands.get("maxItems")
        if max(least, most or 0) > _MAX_ITEMS:
            raise self._refuse(path, "maxItems", f"is more than {_MAX_ITEMS}")
        item = self._value(demands.get("items", {}), f"{path}/items")
        if most == 0:
            return '"[]"'
        n_more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {item}){n_more}'
        return self._rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')
