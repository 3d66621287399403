"""What HTTP costs in rounds: `PYTHONPATH=src:tests python tests/http_costs.py VOCABULARY.gguf [--step-ms 3.7 ...]`.

A server on a device that computes nothing and takes a given time, for a step of N streams and for a row of a prompt;
beside it the same requests straight on an engine with such a device. All streams end in the same step, so that ends and
new requests come in a heap. The list of the model is a real one, since answers say what its tokens had to read.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.engine.synthetic import make_checkpoint
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.server.service import ServerOptions
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.tools.engine_load import drive
from bytefloor.tools.load_client import Plan
from serve_costs import KINDS, TOKENS, Free, Paced, opened_with
from server.live import live

N_STREAMS, N_ROUNDS, N_PROMPT, N_TOKENS = 32, 4, 128, 128


class Slow(Free):
    """Free, but for the time of a prompt's rows."""

    row_s = 0.0

    def run(self, batch: Batch) -> torch.Tensor:
        time.sleep(self.row_s * len(batch.tokens))
        return super().run(batch)


def engine_with(tokenizer: Tokenizer, step_s: float, row_s: float, model: str) -> Engine:
    found = load_model(make_checkpoint(model, "cpu"))
    executor = Slow(CachePlan(512, 2048, N_STREAMS), tokenizer.n_tokens, Paced(step_s))
    executor.row_s = row_s
    step = build_step(found.config, found.weights, DEVICE_ROUNDING)
    executor.step = SimpleNamespace(kinds=KINDS, token_bytes=step.token_bytes)
    return Engine(executor, tokenizer, tokenizer.n_tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--step-ms", type=float, default=3.7)
    parser.add_argument("--row-us", type=float, default=32.0)
    parser.add_argument("--model", default="synthetic:qwen3-8b/Q4_K_M")
    given = parser.parse_args()
    source = random.Random(0)
    prompts = [[source.choice(TOKENS) for _ in range(N_PROMPT)] for _ in range(N_STREAMS * N_ROUNDS)]
    asked = {"max_tokens": N_TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({"prompt": prompt, "seed": i, **asked}) for i, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as directory:
        opened, _ = opened_with(given.vocabulary, Path(directory), N_STREAMS, given.step_ms / 1e3)

        def engine() -> Engine:
            return engine_with(opened.tokenizer, given.step_ms / 1e3, given.row_us / 1e6, given.model)

        greedy = SamplingParams(temperature=0.0)
        alone = drive(engine(), [Request(tuple(p), N_TOKENS, greedy, ignores_end=True) for p in prompts], N_STREAMS)
        with live(replace(opened, engine=engine()), ServerOptions(), StreamLimit(4700.0)) as running:
            at = running.http.base_url
            lengths = [N_TOKENS] * len(bodies)
            plan = Plan(at.host, at.port or 80, "/v1/completions", bodies, lengths, N_STREAMS)
            done = subprocess.run(
                (sys.executable, "-m", "bytefloor.tools.load_client"),
                input=json.dumps(asdict(plan)), capture_output=True, text=True, check=True,
            )  # fmt: skip
    load = json.loads(done.stdout)
    errors = {outcome["error"] for outcome in load["outcomes"]} - {None}
    assert not errors, errors
    n, alone_s, wall_s = N_TOKENS * len(bodies), alone.wall_s, load["wall_s"]
    print(f"{n / alone_s:.0f} tok/s alone, {n / wall_s:.0f} over HTTP: {1 - alone_s / wall_s:.1%}")


if __name__ == "__main__":
    main()
