"""The document says what the server does: every path is in it, and a fuzzer that reads it finds nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.server.app import Endpoints
from bytefloor.server.openapi import EVENTS, OPERATIONS, document
from server.live import SHORT, Live, Scripted, chatty, live, scripted
from text.small_chats import QWEN3_TEMPLATE
from text.tool_chats import TOOLS

SEED, N_EXAMPLES = 11, 10
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


def test_every_path_is_in_the_document_and_the_other_way_round(server: Live) -> None:
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in Endpoints(server.service).routes()
        for method in (route.methods or set()) - {"HEAD"}
    }
    found = server.http.get("/openapi.json").json()
    assert {(method.upper(), path) for path, methods in found["paths"].items() for method in methods} == routes
    assert len(OPERATIONS) == len(routes)


def test_the_document_is_one(server: Live) -> None:
    found = server.http.get("/openapi.json").json()
    assert found == document("tiny")

    def walk(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield value
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from walk(each)

    refs = {each["$ref"] for each in walk(found) if isinstance(each.get("$ref"), str)}
    assert refs == {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    for each in walk(found):
        for key in ("schema", "itemSchema"):
            if isinstance(each.get(key), dict):
                Draft202012Validator.check_schema(each[key])
    for struct in found["components"]["schemas"].values():
        Draft202012Validator.check_schema(struct)
        assert struct["additionalProperties"] is False


def test_a_key_is_in_it_where_one_is_needed(opened: Opened) -> None:
    with live(scripted(opened)[0], replace(SHORT, api_key="k")) as running:
        found = running.http.get("/openapi.json", headers={"x-api-key": "k"}).json()
    assert {scheme["type"] for scheme in found["components"]["securitySchemes"].values()} == {"http", "apiKey"}
    assert found["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document("tiny")


@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.body], ids=lambda each: each.path)
def test_examples_are_answered(server: Live, operation: Any) -> None:
    reply = server.post(operation.path, **operation.example)
    assert reply.status_code == 200, reply.text
    Draft202012Validator(operation.answer).validate(reply.json())


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Scripted]]:
    directory = chatty(tmp_path_factory.mktemp("calls"), "qwen3", QWEN3_TEMPLATE)
    engine, executor = scripted(open_engine(directory, EngineOptions(context=64)), capacity=2048)
    with live(engine) as running:
        yield running, executor


@pytest.mark.parametrize(
    ("path", "script", "more"),
    [
        ("/v1/chat/completions", "plain", {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", "<think>\nso\n</think>\n\nthere", {}),
        ("/v1/chat/completions", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', {"tools": TOOLS}),
        ("/v1/chat/completions", "plain", {"stream_options": {"include_usage": True}, "n": 2}),
        ("/v1/completions", "plain", {"logprobs": 2}),
        ("/v1/completions", "", {"stream_options": {"include_usage": True}}),
    ],
)
def test_answers_are_what_the_document_says(
    caller: tuple[Live, Scripted], path: str, script: str, more: dict[str, Any]
) -> None:
    """All that a model without tools or thoughts never says, whole and in pieces."""
    running, executor = caller
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "and?"}]}
    start = 3
    if "chat" in path:
        shown = {**asked, **({"tools": TOOLS} if "tools" in more else {})}
        start = running.post("/apply-template", **shown).json()["n_tokens"]
    else:
        asked = {"prompt": [5, 6, 7]}
    executor.say(script, start)
    content = document("tiny")["paths"][path]["post"]["responses"]["200"]["content"]
    alone = {key: value for key, value in more.items() if key != "stream_options"}
    reply = running.post(path, **asked, **alone, max_tokens=200)
    assert reply.status_code == 200, reply.text
    Draft202012Validator(content["application/json"]["schema"]).validate(reply.json())
    pieces = content[EVENTS]["itemSchema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
    text = running.post(path, **asked, **more, stream=True, max_tokens=200).text
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in events:
        Draft202012Validator(pieces).validate(json.loads(event))
    executor.failure = RuntimeError("oops")
    failed = running.post(path, **asked, stream=True).text
    Draft202012Validator(pieces).validate(json.loads(failed.strip().split("\n\n")[-1].removeprefix("data: ")))


def test_a_fuzzer_finds_no_failure_and_no_other_answer(tmp_path: Path) -> None:
    """Each field wrong in each way, each method, then bodies at random, right and wrong."""
    directory = chatty(tmp_path, "llama", TEMPLATE)
    # Little room: an answer without max_tokens goes on until it is used up.
    with live(open_engine(directory, EngineOptions(context=14, n_sequences=16))) as running:
        command = [str(SCHEMATHESIS), "run", f"{running.url}/openapi.json", "--no-color", "--warnings", "off"]
        command += ["--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS)]
        command += ["--seed", str(SEED), "--max-examples", str(N_EXAMPLES), "--generation-database", "none"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
        metrics = running.http.get("/metrics").text
        assert running.service.worker.n_open == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout
    # It got past the door: refusals alone would prove little.
    for each in OPERATIONS:
        if each.body is not None:
            answered = re.search(rf'path="{each.path}",status="200"}} (\d+)', metrics)
            assert answered is not None, each.path
            assert int(answered[1]) >= 3, each.path
