"""Which JSON schemas are enforced to the letter. All others are refused, with the path inside the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bytefloor.errors import RequestError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Enforced. Where a value is out of bounds the compiler refuses, and `refuse_at` finds where that is.
_ENFORCED = _words(
    "$ref additionalItems additionalProperties allOf anyOf const enum exclusiveMaximum exclusiveMinimum format items "
    "maxItems maxLength maximum maxProperties minItems minLength minimum minProperties multipleOf oneOf pattern "
    "patternProperties prefixItems properties required type"
)
#: Says nothing about which values are valid. `discriminator` (OpenAPI) repeats what its oneOf says.
_NOTES = _words(
    "$anchor $comment $defs $id $schema default definitions deprecated description discriminator examples id readOnly "
    "title writeOnly"
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_DEEPEST = 100


def parse_schema(source: Mapping[str, Any] | str | bool | None) -> Any:
    """The schema as plain data, every keyword of which is known. RequestError names path and keyword."""
    schema: Any = source
    if isinstance(source, str):
        try:
            schema = json.loads(source, parse_constant=_refuse_constant)
        except RecursionError:
            raise RequestError(f"json_schema: #: nested deeper than {_DEEPEST}") from None
        except ValueError as error:
            raise RequestError(f"json_schema: #: not JSON: {error}") from None
    check_schema(schema)
    return schema


def check_schema(schema: Any) -> None:
    """RequestError for a keyword that is not enforced, with the path of the schema that has it."""
    todo = [("#", schema)]
    while todo:
        path, at = todo.pop()
        if path.count("/") > 2 * _DEEPEST:
            raise RequestError(f"json_schema: nested deeper than {_DEEPEST}: {path[:60]}...")
        if isinstance(at, bool):
            continue
        if not isinstance(at, Mapping):
            raise RequestError(f"json_schema: {path}: found {_short(at)}, expected an object, true or false")
        _check_keywords(path, at)
        todo.extend(children(path, at))


def children(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, schema) of each schema directly inside, definitions included."""
    for keyword in _MAPS:
        value = schema.get(keyword, {})
        if not isinstance(value, Mapping):
            raise RequestError(f"json_schema: {path}/{keyword}: found {_short(value)}, expected an object")
        for name, child in value.items():
            yield f"{path}/{keyword}/{_escaped(str(name))}", child
    for keyword in _LISTS:
        value = schema.get(keyword)
        if isinstance(value, list):
            for place, child in enumerate(value):
                yield f"{path}/{keyword}/{place}", child
        elif value is not None and keyword not in _SINGLE:
            raise RequestError(f"json_schema: {path}/{keyword}: found {_short(value)}, expected a list")
    for keyword in _SINGLE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield f"{path}/{keyword}", schema[keyword]


def refuse_at(schema: Any, reason: str, complaint: Callable[[Any], str | None]) -> RequestError:
    """The error for a schema that does not compile: at the innermost schema inside it that has the same fault alone,
    and at the keyword there without which it is gone, if there is just one.

    complaint: what is wrong with a schema, None for nothing.
    """
    path, at = "#", schema
    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    while isinstance(at, Mapping):
        for inner_path, inner in children(path, at):
            alone = {**definitions, **inner} if isinstance(inner, dict) else inner
            if complaint(alone) == reason:
                path, at = inner_path, inner
                break
        else:
            break
    keywords = [key for key in at if key in _ENFORCED] if isinstance(at, Mapping) else []
    blamed = [
        key for key in keywords if complaint({**definitions, **{k: v for k, v in at.items() if k != key}}) != reason
    ]
    where = f"{path}/{blamed[0]}" if len(blamed) == 1 else path
    return RequestError(f"json_schema: {where}: {reason}")


def _check_keywords(path: str, schema: Mapping[str, Any]) -> None:
    for keyword in schema:
        if keyword not in _ENFORCED and keyword not in _NOTES:
            raise RequestError(
                f"json_schema: {path}: the keyword {keyword!r} is not supported, and a schema is enforced as a whole "
                f"or not at all; enforced are {', '.join(sorted(_ENFORCED))}"
            )
    types = schema.get("type")
    is_text = types is None or types == "string" or (isinstance(types, list) and "string" in types)
    if "format" in schema and not is_text:
        raise RequestError(f"json_schema: {path}/format: supported for strings only, found type {_short(types)}")
    _check_least_properties(path, schema)


def _check_least_properties(path: str, schema: Mapping[str, Any]) -> None:
    """The grammar counts a key that an answer repeats, the reader of the answer does not."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    n_certain = max(1, len(set(map(str, required)))) if isinstance(required, (list, tuple)) else 1
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, (int, float)) and least > n_certain and not is_closed:
        raise RequestError(
            f"json_schema: {path}/minProperties: {least} is not supported: at most {n_certain}, the number of required "
            "properties, unless additionalProperties is false"
        )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
