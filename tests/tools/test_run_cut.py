"""`run` and `chat` with --kv-budget."""

from __future__ import annotations

import json

import pytest

from test_cli import assert_refused, bytefloor
from tiny import build_tiny

TEXT = "The quick brown fox jumps over the lazy dog, again and again, in the rain. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory)


def test_the_answer_says_what_was_kept(model: str) -> None:
    asked = ("run", "-m", model, "-p", TEXT, "-n", "3", "--temp", "0", "--kv-budget", "40", "--device", "cpu")
    result = bytefloor(*asked)
    assert result.exit_code == 0, result.output
    assert "a prompt has 40 of them once it is read" in result.stderr
    found = json.loads(bytefloor(*asked, "--json").stdout)
    assert found["n_prompt"] - found["n_dropped"] == 40
    assert f"prompt {found['n_prompt']} tokens, cut to 40: " in result.stderr
    whole = json.loads(bytefloor(*asked[:-4], "--device", "cpu", "--json").stdout)
    assert whole["n_dropped"] == 0


@pytest.mark.parametrize("verb", ["run", "chat", "serve"])
def test_a_budget_that_leaves_nothing_to_choose_is_refused(verb: str) -> None:
    prompt = ("-p", "hi") if verb == "run" else ()
    assert_refused(bytefloor(verb, *prompt, "--kv-budget", "32"), "--kv-budget 32: expected more than 32")


def test_pages_that_are_coded_as_a_whole_keep_all_their_positions() -> None:
    assert_refused(
        bytefloor("run", "-p", "hi", "--kv", "k4v2", "--kv-budget", "64"),
        "--kv-budget 64: --kv k4v2 codes pages as a whole, and keeps all positions of them",
    )
