"""`run` with --reasoning-budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.live import chatty
from test_cli import assert_refused, bytefloor
from tools.test_conversation import TEMPLATE

OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}[assistant]<think>"


def test_a_thought_ends_where_its_budget_does(tmp_path: Path) -> None:
    model = str(chatty(tmp_path, "qwen3", OPENING))
    asked = ("run", "-m", model, "-p", "why?", "-n", "30", "-s", "1", "--json")
    free, cut = (json.loads(bytefloor(*asked, *more).stdout) for more in ((), ("--reasoning-budget", "6")))
    assert (free["n_thought"], free["text"]) == (30, "")
    assert cut["n_thought"] == 6
    assert cut["ids"][:6] == free["ids"][:6]
    assert cut["text"] != ""
    assert free["reasoning"].startswith(cut["reasoning"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--reasoning-budget", "6"], "no thinking"),
        (["--reasoning-budget", "-1"], "--reasoning-budget"),
        (["--reasoning-budget", "6", "--raw"], "--reasoning-budget need a chat template, and --raw was given"),
    ],
)
def test_a_budget_for_what_does_not_think_is_refused(args: list[str], message: str, tmp_path: Path) -> None:
    model = str(chatty(tmp_path, "qwen3", TEMPLATE))
    assert_refused(bytefloor("run", "-m", model, "-p", "why?", *args), message)
