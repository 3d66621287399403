"""What a model cannot do is said before its weights are read."""

from __future__ import annotations

import shutil

import pytest

from bytefloor.engine import loading
from test_cli import assert_refused, bytefloor
from tiny import build_tiny
from tools.test_conversation import TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory without a chat template."""
    return str(build_tiny("gemma4-e", tmp_path_factory.mktemp("tiny")).directory)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("tiny")
    shutil.copytree(build_tiny("llama", root).directory, root / "chatty")
    (root / "chatty" / "chat_template.jinja").write_text(TEMPLATE)
    return str(root / "chatty")


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "make_executor", lambda *arguments: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-c", "1"], "context 1 is out of range: the model was made for 2 to 512 positions"),
        (["-c", "32k"], "context 32768 is out of range"),
        (["-c", "2"], "the context holds 2"),
        (["-p", "x " * 600], "the context holds 512"),
        (["--stop", ""], "a stop string is empty"),
        (["--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
        (["--raw", "--system", "x"], "--raw was given"),
        (["--system", "x"], "the model has no chat template"),
        (["--json-schema", '{"not": {}}'], "the keyword 'not' is not supported"),
        (["--regex", "("], "unclosed group"),
    ],
)
def test_what_the_model_cannot_do(model: str, args: list[str], message: str) -> None:
    assert_refused(bytefloor("run", "-m", model, "-p", "hello", *args), message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--thinking"], "--thinking: the model's chat template has no thinking to turn on"),
        (["--stop", ""], "a stop string is empty"),
    ],
)
def test_what_a_chat_cannot_do(chatty: str, args: list[str], message: str) -> None:
    assert_refused(bytefloor("chat", "-m", chatty, *args), message)


def test_a_model_that_cannot_chat_says_so_at_once(model: str) -> None:
    assert_refused(bytefloor("chat", "-m", model), "no chat template and no turn tokens")
