"""Names that are no text, in paths and in files: shown as well as they can be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bytefloor.engine.loading import EngineOptions, open_engine
from server.live import live
from tiny import build_tiny
from tiny_gguf import write_tiny_gguf

NAME = "na\udcffme"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose path, name and template hold a byte that is no text."""
    root = tmp_path_factory.mktemp("odd")
    template = "{% for m in messages %}<XY>{{ m.content }}{% endfor %}"
    path = write_tiny_gguf(build_tiny("qwen3", root), root / "m.gguf", extra={"tokenizer.chat_template": template})
    raw = path.read_bytes()
    at = raw.index(b"general.name") + len(b"general.name") + 4 + 8
    raw = (raw[: at + 2] + b"\xff" + raw[at + 3 :]).replace(b"<XY>", b"<\xff\xff>")
    (root / f"{NAME}.gguf").write_bytes(raw)
    return root / f"{NAME}.gguf"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
@pytest.mark.parametrize("verb", [
    ("inspect",), ("bench", "-p", "2", "-n", "2", "-r", "1"), ("perplexity", "-c", "16", "--chunks", "1"),
    ("run", "-p", "x", "-n", "2"),
])  # fmt: skip
def test_a_terminal_is_shown_what_it_can_show(verb: tuple[str, ...], encoding: str, odd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bytefloor.cli", *verb, "-m", odd],
        input=b"once upon a time " * 9,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if verb[0] != "run":
        # What typer prints has its own way on a terminal of ASCII.
        assert re.search(rb"qw(\\udcff|\?)n3", done.stdout)


def test_a_server_says_its_name_all_the_same(odd: Path) -> None:
    with live(open_engine(odd, EngineOptions(context=64))) as running:
        assert running.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        props = running.http.get("/props").json()
        assert props["title"] == "qw\ufffdn3"
        assert "<\ufffd\ufffd>" in props["chat_template"]
        assert "<\ufffd\ufffd>x" in running.post("/apply-template", messages=[{"role": "user", "content": "x"}]).text
        assert running.chat(max_tokens=2).status_code == 200
        assert json.loads(running.chat(max_tokens=2, stream=True).text.splitlines()[0][6:])["choices"]
