"""A `bytefloor serve` of its own process, on a free port of loopback, for as long as it is measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from bytefloor.errors import RequestError

START_S = 900.0
"""A large model is read, or drawn, and its kernels compiled."""
STOP_S = 40.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/v1")


@dataclass(frozen=True)
class Server:
    """One that answers. process: None for somebody else's."""

    host: str
    port: int
    facts: dict[str, Any]
    process: psutil.Process | None = None

    @classmethod
    def at(cls, url: str, process: psutil.Process | None = None) -> Server:
        """The server of an address. RequestError for one that is none, or does not say what is measured."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host, port = None, 0
        if parts.scheme != "http" or not host or parts.path.rstrip("/") not in ("", "/v1"):
            raise RequestError(f"--url {url}: expected http://HOST:PORT")
        shown = f"[{host}]" if ":" in host else host
        try:
            with urllib.request.urlopen(f"http://{shown}:{port}/props", timeout=30) as reply:
                facts = json.load(reply)
        except (OSError, ValueError) as error:
            raise RequestError(f"--url {url}: no server answers there: {error}") from None
        for name in ("model", "n_tokens", "n_sequences", "context", "device", "kv"):
            if not isinstance(facts, dict) or name not in facts:
                raise RequestError(f"--url {url}: /props has no {name}: it is no server of bytefloor's")
        return cls(host, port, facts, process)

    def cpu_s(self) -> float | None:
        """What its process computed until now, seconds; None for somebody else's."""
        if self.process is None:
            return None
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def started(words: Sequence[str]) -> Iterator[Server]:
    """Run ``bytefloor serve`` with more words until the block ends. RequestError with its last words if it does not."""
    command = [sys.executable, "-m", "bytefloor.cli", "serve", "--port", "0", *words]
    environment = {name: value for name, value in os.environ.items() if name != "BYTEFLOOR_API_KEY"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            yield Server.at(f"http://127.0.0.1:{_port(running, log)}", psutil.Process(running.pid))
        finally:
            running.terminate()
            try:
                running.wait(STOP_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def _port(running: subprocess.Popen[bytes], log: Any) -> int:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        said = _said(log)
        found = _ADDRESS.search(said)
        if found is not None and _listens(int(found[1])):
            return int(found[1])
        if running.poll() is not None:
            last = _said(log).strip().splitlines()[-1:] or ["without a word"]
            raise RequestError(f"the server ended with status {running.returncode}: {last[0]}")
        time.sleep(0.05)
    raise RequestError(f"the server did not start within {START_S:.0f} s")


def _said(log: Any) -> str:
    """By position, since the process writes through the same open file: a seek would move its place too."""
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


def _listens(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False
