"""What a step of several sequences costs on a card, the engine alone: tokens a second and milliseconds a step.

PYTHONPATH=src:tests python tests/stream_costs.py synthetic:gemma4-12b/Q4_K_M 1,4,8,16,32,64

Prompts of 128 random tokens begin together; what counts are the steps in which all of them decode.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.model.decoder import build_step
from bytefloor.tools.bench import open_model
from device_sampling import Numbers

N_PROMPT, N_GEN, WARM_UP, SETTLING = 128, 128, 24, 8


def play(engine: Engine, n: int, n_gen: int, rng: np.random.Generator) -> tuple[float, float]:
    """(tokens a second of all, prompts included; seconds a step once all decode)."""
    for i in range(n):
        prompt = tuple(rng.integers(10, engine.vocabulary_size - 10, N_PROMPT).tolist())
        engine.add(Request(prompt, max_tokens=n_gen, sampling=SamplingParams(seed=i), ignores_end=True))
    start, ends = time.perf_counter(), list[tuple[float, int]]()
    while engine.has_work:
        n_tokens = len(engine.step())
        ends.append((time.perf_counter(), n_tokens))
    whole = [at for at, n_tokens in ends if n_tokens == n][SETTLING:]
    step_s = (whole[-1] - whole[0]) / (len(whole) - 1) if len(whole) > 1 else float("nan")
    return n * n_gen / (ends[-1][0] - start), step_s


def main(name: str, numbers: list[int]) -> None:
    device = torch.device("cuda")
    model = open_model(name, device)
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    plan = CachePlan(512, 2048, max(numbers))
    executor = DeviceExecutor(step, plan, device=device, banned_ids=Numbers.suppressed_ids)
    engine = Engine(executor, Numbers(model.config.vocabulary_size), model.config.vocabulary_size)
    rng = np.random.default_rng(1)
    for n in numbers:
        play(engine, n, WARM_UP, rng)
        rates, steps = zip(*(play(engine, n, N_GEN, rng) for _ in range(2)), strict=True)
        print(f"{name}, {n} sequences: {min(steps) * 1e3:.3f} ms a step, {n / min(steps):.0f} tok/s; ", end="")
        print(f"{max(rates):.0f} with prompts", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(n) for n in sys.argv[2].split(",")])
