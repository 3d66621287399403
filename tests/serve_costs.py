"""What a streamed token costs the host: `PYTHONPATH=src:tests python tests/serve_costs.py VOCABULARY.gguf [N ...]`.

A whole server, on a device that costs nothing and takes a given time for each step, and the client of `bench serve` in
a process of its own. CPU time of the engine's thread and of the event loop, in microseconds a token, while all streams
run and none begins or ends: the least of several windows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import EngineOptions, Opened, open_engine, open_tokenizer
from bytefloor.engine.row_sampler import Draw
from bytefloor.engine.sampler import Sampled, Sampler
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.step import CacheKind
from bytefloor.server.service import ServerOptions
from bytefloor.text.chat import ChatTemplate
from bytefloor.tools.load_client import Plan
from server.live import Live, chatty, live
from tools.test_conversation import TEMPLATE

KINDS = (CacheKind("s", 8, 256, 1024, "bf16"), CacheKind("g", 1, 512, None, "bf16"))
N_PROMPT, N_TOKENS, N_WINDOWS = 100, 500, 7
TOKENS = np.random.default_rng(7).integers(2000, 200000, 1 << 16).tolist()
"""What is sampled, one after another by position: ordinary tokens of a large vocabulary."""


class Paced:
    """A batch loop whose steps end step_s after one another."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ends = 0.0
        self.n_tokens = 0

    def can_serve(self, sampler: Sampler) -> bool:
        return True

    def launch(self, batch: Batch, draws: Sequence[Draw], sources: Sequence[int]) -> tuple[float, list[int]]:
        self._ends = max(self._ends, time.perf_counter()) + self._step_s
        return self._ends, list(batch.positions)

    def read(self, step: tuple[float, list[int]]) -> list[Sampled]:
        time.sleep(max(0.0, step[0] - time.perf_counter()))
        self.n_tokens += len(step[1])
        return [Sampled(TOKENS[97 * place % len(TOKENS)], -1.0, ()) for place in step[1]]

    def sample(self, logits: torch.Tensor, draws: Any, positions: Any) -> dict[int, Sampled]:
        return {row: Sampled(5000, -1.0, ()) for row in draws}


class Free:
    """An executor that computes nothing."""

    most_draft_rows = 1

    def __init__(self, plan: CachePlan, n_vocabulary: int, loop: Paced) -> None:
        self.plan, self._loop = plan, loop
        self.step = SimpleNamespace(kinds=KINDS, token_bytes=lambda _: (0, 0))
        self.device = torch.device("cpu")
        self._logits = torch.zeros(plan.n_sequences, n_vocabulary)
        self._logits[:, 5000] = 50.0

    def make_loop(self) -> None:
        return None

    def make_batch_loop(self) -> Paced:
        return self._loop

    def run(self, batch: Batch) -> torch.Tensor:
        return self._logits[: len(batch.wanted)]


def opened_with(vocabulary: Path, directory: Path, n: int, step_s: float) -> tuple[Opened, Paced]:
    tokenizer = open_tokenizer(open_checkpoint(vocabulary))
    loop = Paced(step_s)
    opened = open_engine(chatty(directory, "gemma4-unified", TEMPLATE), EngineOptions(context=128))
    engine = Engine(Free(CachePlan(4096, 2048, n), tokenizer.n_tokens, loop), tokenizer, tokenizer.n_tokens)
    template = ChatTemplate.for_tokenizer(tokenizer, "gemma4")
    return replace(opened, tokenizer=tokenizer, template=template, engine=engine), loop


@dataclass
class Clocks:
    """Seconds, of CPU time but for the wall's, and tokens until then."""

    tokens: int
    wall: float
    engine: float
    loop: float

    def since(self, start: Clocks) -> tuple[float, float, float]:
        """Microseconds a token: of the engine's thread, of the loop's, of both."""
        n = (self.tokens - start.tokens) / 1e6
        engine, loop = (self.engine - start.engine) / n, (self.loop - start.loop) / n
        return engine, loop, engine + loop

    @classmethod
    def now(cls, loop: Paced, threads: Sequence[threading.Thread]) -> Clocks:
        spent = [time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads]
        return cls(loop.n_tokens, time.perf_counter(), *spent)


def measure(running: Live, loop: Paced, n: int, is_chat: bool) -> list[Clocks]:
    """At the beginning and the end of each window."""
    asked = {"max_tokens": N_TOKENS, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    if is_chat:
        path, bodies = "/v1/chat/completions", [
            {"messages": [{"role": "user", "content": f"{i} " + "a word " * 40}], **asked} for i in range(n)
        ]  # fmt: skip
    else:
        path, bodies = "/v1/completions", [
            {"prompt": TOKENS[i : i + N_PROMPT], "ignore_eos": True, **asked} for i in range(n)
        ]  # fmt: skip
    at = running.http.base_url
    plan = Plan(at.host, at.port or 80, path, [json.dumps(body) for body in bodies], [N_TOKENS] * len(bodies), n)
    engine = next(thread for thread in threading.enumerate() if thread.name == "engine")
    others = [thread for thread in threading.enumerate() if "run_until_complete" in thread.name]
    command = (sys.executable, "-m", "bytefloor.tools.load_client")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(asdict(plan)))
        client.stdin.close()
        found, before = [], loop.n_tokens
        while client.poll() is None and len(found) <= N_WINDOWS:
            time.sleep(0.01)
            if loop.n_tokens - before >= n * (100 + len(found) * (N_TOKENS - 150) // N_WINDOWS):
                found.append(Clocks.now(loop, [engine, *others]))
        outcomes = json.loads(client.stdout.read())["outcomes"]
    errors = {outcome["error"] for outcome in outcomes} - {None}
    assert not errors, errors
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("n", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--step-ms", type=float, default=10.0, help="long enough that each step is read alone")
    given = parser.parse_args()
    print("streams, path, tokens a second, engine us, loop us, together us")
    for n in given.n:
        with tempfile.TemporaryDirectory() as directory:
            step_s = given.step_ms / 1e3
            opened, loop = opened_with(given.vocabulary, Path(directory), n, step_s)
            with live(opened, ServerOptions()) as running:
                for is_chat in (False, True):
                    found = measure(running, loop, n, is_chat)
                    rate = (found[-1].tokens - found[0].tokens) / (found[-1].wall - found[0].wall)
                    costs = [end.since(start) for start, end in pairwise(found)]
                    # Whatever else the machine does only adds.
                    engine, events, both = (min(column) for column in zip(*costs, strict=True))
                    name = "chat" if is_chat else "text"
                    print(f"{n}, {name}, {rate:.0f}, {engine:.1f}, {events:.1f}, {both:.1f}", flush=True)


if __name__ == "__main__":
    main()
