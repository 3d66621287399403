"""GET /openapi.json: what every path takes and gives. Bodies are the structs that parse them; a path is a line here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bytefloor import __version__
from bytefloor.engine.sampling_params import RANGES
from bytefloor.server import bodies
from bytefloor.server.anthropic_bodies import CountBody, MessagesBody
from bytefloor.server.guard import PUBLIC
from bytefloor.server.page import FILES
from bytefloor.server.responses_bodies import ResponseBody
from bytefloor.text.chat import ROLES
from bytefloor.text.tools import NAME

Schema = dict[str, Any]
_REFS = "#/components/schemas/{name}"


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    """These and no others."""
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _always(value: Any) -> Schema:
    return {"const": value}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}
ERROR = _object(
    {"error": _object({"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)})},
)
USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": COUNT}),
    }
)
_ENDING: Schema = {
    "index": COUNT,
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "finish_detail": TEXT,
}
_CALL = _object(
    {"id": TEXT, "type": _always("function"), "function": _object({"name": TEXT, "arguments": TEXT})},
)
_MESSAGE = _object(
    {"role": _always("assistant"), "content": _or_null(TEXT), "refusal": {"type": "null"}},
    {"reasoning_content": TEXT, "tool_calls": _list(_CALL)},
)
_LOGPROB: Schema = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
_CHAT_LOGPROBS = _object({"content": _list(_object({**_LOGPROB, "top_logprobs": _list(_object(_LOGPROB))}))})
_TEXT_LOGPROBS = _object(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(NUMBER),
        "top_logprobs": _list({"type": "object", "additionalProperties": NUMBER}),
        "text_offset": _list(COUNT),
    }
)


_DELTA = _object(
    {},
    {
        "role": _always("assistant"),
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": _list(
            _object(
                {"index": COUNT, "function": _object({"arguments": TEXT}, {"name": TEXT})},
                {"id": TEXT, "type": _always("function")},
            )
        ),
    },
)


def _answer(name: str, choice: Schema) -> Schema:
    head = {"id": TEXT, "object": _always(name), "created": COUNT, "model": TEXT}
    return _object({**head, "choices": _list(_object({**_ENDING, **choice})), "usage": USAGE, "timings": MAP})


def _chunk(name: str, choice: Schema) -> Schema:
    """A piece of an answer, or the error that ends it."""
    head = {"id": TEXT, "object": _always(name), "created": COUNT, "model": TEXT}
    places = {"index": COUNT, **choice, "finish_reason": _or_null(_ENDING["finish_reason"])}
    choices = _list(_object(places, {"finish_detail": TEXT}))
    return {
        "anyOf": [
            _object({**head, "choices": choices}, {"usage": _or_null(USAGE), "timings": MAP, "prompt_progress": MAP}),
            ERROR,
        ]
    }


CHAT = _answer("chat.completion", {"message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS)})
CHAT_CHUNK = _chunk("chat.completion.chunk", {"delta": _DELTA, "logprobs": _or_null(_CHAT_LOGPROBS)})
COMPLETION = _answer("text_completion", {"text": TEXT, "logprobs": _or_null(_TEXT_LOGPROBS)})
COMPLETION_CHUNK = _chunk("text_completion", {"text": TEXT, "logprobs": _or_null(_TEXT_LOGPROBS)})
_BLOCK = {"type": "object", "properties": {"type": {"enum": ["text", "thinking", "tool_use"]}}, "required": ["type"]}
MESSAGE = _object(
    {
        "id": TEXT,
        "type": _always("message"),
        "role": _always("assistant"),
        "model": TEXT,
        "content": _list(_BLOCK),
        "stop_reason": TEXT,
        "stop_sequence": _or_null(TEXT),
        "finish_detail": TEXT,
        "usage": _object(
            {
                "input_tokens": COUNT,
                "cache_creation_input_tokens": COUNT,
                "cache_read_input_tokens": COUNT,
                "output_tokens": COUNT,
                "output_tokens_details": _object({"thinking_tokens": COUNT}),
            }
        ),
    }
)
NAMED_EVENT: Schema = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
MESSAGE_ERROR = _object(
    {"type": _always("error"), "error": _object({"type": TEXT, "message": TEXT}), "request_id": TEXT}
)
RESPONSE: Schema = {
    "type": "object",
    "properties": {"id": TEXT, "object": _always("response"), "model": TEXT, "status": TEXT, "output": _list(MAP)},
    "required": ["id", "object", "model", "status", "output", "usage"],
}
EMBEDDINGS = _object(
    {
        "object": _always("list"),
        "data": _list(
            _object(
                {
                    "object": _always("embedding"),
                    "index": COUNT,
                    "embedding": {"anyOf": [_list(NUMBER), TEXT]},
                }
            )
        ),
        "model": TEXT,
        "usage": _object({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        "pooling": TEXT,
        "layer": TEXT,
        "is_normalized": FLAG,
    }
)
MODEL = _object(
    {
        "id": TEXT,
        "object": _always("model"),
        "created": COUNT,
        "owned_by": _always("bytefloor"),
        "context_length": COUNT,
    }
)
PROPS = _object(
    {
        "model": TEXT,
        "family": TEXT,
        "title": TEXT,
        "container": TEXT,
        "n_weights": COUNT,
        "n_bytes": COUNT,
        "bits_per_weight": NUMBER,
        "formats": {"type": "object", "additionalProperties": COUNT},
        "token_bytes": _object({"empty": COUNT, "full": COUNT}),
        "card": _or_null(TEXT),
        "stream_gb_s": _or_null(NUMBER),
        "embeddings": MAP,
        "context": COUNT,
        "n_sequences": COUNT,
        "chunk": COUNT,
        "kv": TEXT,
        "kv_budget": _or_null(COUNT),
        "device": TEXT,
        "vocabulary_size": COUNT,
        "n_tokens": COUNT,
        "chat_template": _or_null(TEXT),
        "supports_thinking": FLAG,
        "notices": _list(TEXT),
        "version": TEXT,
        "defaults": MAP,
        "timeout_s": NUMBER,
        "max_body_bytes": COUNT,
        "load": _object({"waiting": COUNT, "running": COUNT, "pages": MAP}),
    }
)
TOKENS = _object({"tokens": _list({"anyOf": [COUNT, _object({"id": COUNT, "piece": TEXT})]})})

_NOTHING: Schema = {"type": "null"}
_TOOL = _object(
    {
        "type": _always("function"),
        "function": _object(
            {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}},
            {"description": TEXT, "parameters": {"type": "object"}, "strict": _or_null(FLAG)},
        ),
    }
)
_OPEN: Schema = {
    "response_format": _or_null(
        _object({"type": {"enum": ["text", "json_object", "json_schema"]}}, {"json_schema": MAP})
    ),
    "grammar": _or_null(TEXT),
    "regex": _or_null(TEXT),
    "tools": _or_null(_list(_TOOL)),
    "tool_choice": _or_null({"anyOf": [{"enum": ["auto", "none", "required"]}, MAP]}),
    "modalities": {"enum": [["text"], None]},
    "functions": _or_null({"type": "array", "maxItems": 0}),
    "function_call": _NOTHING,
}
"""Fields that a struct leaves open, since the words of their refusals are not those of types."""

JSON, PLAIN, EVENTS = "application/json", "text/plain", "text/event-stream"
MEANINGS = {
    400: "A field of the body is wrong; param names it.",
    401: "No key, or a wrong one.",
    404: "No such model here.",
    413: "The body is too long.",
    415: "The body is not said to be JSON.",
    429: "As many requests are open as there may be.",
    500: "The engine failed.",
    503: "The server is stopping or broken.",
    504: "The request took too long.",
    529: "The server is stopping or broken.",
}
_BODY, _GENERATION = (400, 413, 415), (404, 429, 500, 504)


@dataclass(frozen=True)
class Operation:
    """One path and method. answer: the schema of a 200, of the content type kind; None where there is never one.

    body: what it takes, such as example.
    refuses: statuses of refusals beside those that every path, and every body, may get; error: their schema.
    events: where the answer may come as events instead, the schema of each one's data but for a last ``[DONE]``.
    """

    method: str
    path: str
    summary: str
    answer: Schema | None
    body: type[msgspec.Struct] | None = None
    example: Schema | None = None
    refuses: tuple[int, ...] = ()
    events: Schema | None = None
    kind: str = JSON
    error: Schema | None = None

    @property
    def statuses(self) -> list[int]:
        """Of all its refusals."""
        closed = 529 if self.error is MESSAGE_ERROR else 503
        return sorted({401, closed, *self.refuses, *(_BODY if self.body is not None else ())})


_HELLO: Schema = {"messages": [{"role": "user", "content": "Hello"}]}
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "Messages to a reply", CHAT, bodies.ChatBody,
              {**_HELLO, "max_tokens": 8}, _GENERATION, CHAT_CHUNK),
    Operation("POST", "/v1/completions", "Text to what follows", COMPLETION, bodies.CompletionBody,
              {"prompt": "Once", "max_tokens": 8}, _GENERATION, COMPLETION_CHUNK),
    Operation("POST", "/v1/messages", "Messages to a reply, in Anthropic's words", MESSAGE, MessagesBody,
              {**_HELLO, "max_tokens": 8}, _GENERATION, NAMED_EVENT, error=MESSAGE_ERROR),
    Operation("POST", "/v1/messages/count_tokens", "How many tokens messages are", _object({"input_tokens": COUNT}),
              CountBody, _HELLO, (404,), error=MESSAGE_ERROR),
    Operation("POST", "/v1/responses", "Input to a response, which is not stored", RESPONSE, ResponseBody,
              {"input": "Hello", "max_output_tokens": 8}, _GENERATION, NAMED_EVENT),
    *(Operation(method, "/v1/responses/{rest}", "A stored response: there is none", None, refuses=(404,))
      for method in ("GET", "POST", "DELETE")),
    Operation("POST", "/v1/embeddings", "Texts to vectors", EMBEDDINGS, bodies.EmbeddingBody, {"input": "Hello"},
              _GENERATION),
    Operation("GET", "/v1/models", "The one model", _object({"object": _always("list"), "data": _list(MODEL)})),
    Operation("GET", "/v1/models/{name}", "The one model, by name", MODEL, refuses=(404,)),
    Operation("POST", "/tokenize", "Text to ids", TOKENS, bodies.TokenizeBody, {"content": "Hello"}),
    Operation("POST", "/detokenize", "Ids to text", _object({"content": TEXT}), bodies.DetokenizeBody, {"tokens": [5]}),
    Operation("POST", "/apply-template", "Messages to the prompt as text", _object({"prompt": TEXT, "n_tokens": COUNT}),
              bodies.TemplateBody, _HELLO, (404,)),
    Operation("GET", "/health", "Whether requests are taken", _object({"status": _always("ok")}),
              error=_object({"status": _always("unavailable"), **ERROR["properties"]})),
    Operation("GET", "/metrics", "Figures for Prometheus", TEXT, kind=PLAIN),
    Operation("GET", "/props", "What is served and how", PROPS),
    *(Operation("GET", path, "The chat page", TEXT, kind=kind) for path, (_, kind) in FILES.items()),
    Operation("GET", "/openapi.json", "This document", MAP),
)  # fmt: skip


def document(name: str, has_key: bool = False, operations: Sequence[Operation] = OPERATIONS) -> Schema:
    """OpenAPI 3.2, the first that has words for streams. name: the model's. has_key: whether requests need one."""
    structs = [each.body for each in operations if each.body is not None]
    refs, components = msgspec.json.schema_components(structs, ref_template=_REFS)
    _narrow(components, name)
    bodies_of = iter(refs)
    paths: dict[str, Schema] = {}
    for each in operations:
        described = _operation(each, next(bodies_of) if each.body is not None else None)
        paths.setdefault(each.path, {})[each.method.lower()] = described
    schemas: Schema = {"Error": ERROR, **components}
    found: Schema = {
        "openapi": "3.2.0",
        "info": {"title": "bytefloor", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_key:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"bearer": []}, {"key": []}]
        for path in PUBLIC & paths.keys():
            paths[path]["get"]["security"] = []
    return found


def _event(data: Schema) -> Schema:
    piece = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [_always("[DONE]"), piece]}}}


def _narrow(components: dict[str, Schema], name: str) -> None:
    """Say what the types of the structs do not: open fields, ranges of sampling, roles, the one model's name."""
    for struct in components.values():
        properties = struct["properties"]
        properties |= {field: schema for field, schema in _OPEN.items() if properties.get(field) == {"default": None}}
        for field in properties.keys() & RANGES.keys():
            kind, low, high = RANGES[field]
            bounds = {"type": "integer" if kind is int else "number", "minimum": low, "maximum": high}
            properties[field] = {"anyOf": [bounds, {"type": "null"}], "default": None}
        if "model" in properties:
            properties["model"] = {"enum": [name, None], "default": None}
        if struct["title"] == "MessageBody":
            properties["role"] = {"enum": list(ROLES)}
        if "messages" in properties:
            properties["messages"]["minItems"] = 1


def _operation(asked: Operation, body: Schema | None) -> Schema:
    content: Schema = {asked.kind: {"schema": asked.answer}}
    if asked.events is not None:
        content[EVENTS] = {"itemSchema": _event(asked.events)}
    error = asked.error or {"$ref": _REFS.format(name="Error")}
    responses: Schema = {} if asked.answer is None else {"200": {"description": "The answer.", "content": content}}
    for status in asked.statuses:
        responses[str(status)] = {"description": MEANINGS[status], "content": {JSON: {"schema": error}}}
    found: Schema = {"summary": asked.summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": body, "example": asked.example}}}
    names = re.findall(r"{(\w+)}", asked.path)
    if names:
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    return found
