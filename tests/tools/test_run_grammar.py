"""`run` with --json-schema, --grammar and --regex."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from test_cli import assert_refused, bytefloor
from tiny import build_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory)


def answer(model: str, *args: str) -> str:
    result = bytefloor("run", "-m", model, "-p", "once", "-n", "200", "-s", "1", *args)
    assert result.exit_code == 0, result.output
    assert "[the grammar is complete]" in result.stderr
    return result.stdout


def test_a_schema_on_the_command_line_or_in_a_file(model: str, tmp_path: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2})
    (tmp_path / "schema.json").write_text(schema)
    said = [answer(model, "--json-schema", given) for given in (schema, str(tmp_path / "schema.json"))]
    assert said[0] == said[1]
    jsonschema.validate(json.loads(said[0]), json.loads(schema))


def test_regex(model: str) -> None:
    assert re.fullmatch("[0-9]{3}-[0-9]{2}\n", answer(model, "--regex", "[0-9]{3}-[0-9]{2}"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.gbnf", 'root ::= "<" [xyz]{4} ">"'),
        ("a.txt", 'root ::= "<" [xyz]{4} ">"'),
        ("a.lark", 'start: "<" /[xyz]{4}/ ">"'),
    ],
)
def test_grammar_files(model: str, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert re.fullmatch("<[xyz]{4}>\n", answer(model, "--grammar", str(tmp_path / name)))


def test_what_is_wrong_is_one_line(model: str, tmp_path: Path) -> None:
    def refused(*args: str) -> object:
        return bytefloor("run", "-m", model, "-p", "once", *args)

    assert_refused(refused("--json-schema", '{"properties": {"a": {"not": {}}}}'), "#/properties/a: the keyword 'not'")
    assert_refused(refused("--json-schema", str(tmp_path / "no.json")), "no.json: cannot be read")
    assert_refused(refused("--grammar", str(tmp_path)), "Is a directory")
    assert_refused(refused("--regex", "("), "unclosed group")
    assert_refused(refused("--regex", "a", "--json-schema", "{}"), "an answer follows one")


def test_the_demo_model_answers_in_json(smollm2_path: Path) -> None:
    args = ["-m", str(smollm2_path), "-n", "60", "--temp", "0", "-c", "512", "--json-schema", json.dumps(SCHEMA)]
    result = bytefloor(
        "run", "-p", "What is the capital of France, and how many people live there? Reply in JSON.", *args
    )
    assert result.exit_code == 0, result.output
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
    assert json.loads(result.stdout)["city"] == "Paris"
