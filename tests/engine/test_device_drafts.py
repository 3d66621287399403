"""Drafts on a device executor of twins: rows of one sequence that see each other, each as it is alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from device_sampling import Numbers
from drafted import Always, draft_by
from kernel_twins import TwinDevice

N_ROWS, N_TOKENS = 400, 380
SHAPES = {
    "llama": Shape("llama", 256, 512, 2, 8, 2, 64, N_ROWS, 4096, False, {"rope.freq_base": 1e4}),
    "gemma4-e": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, N_ROWS, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
    ),
}  # fmt: skip
IDS = torch.randint(0, N_TOKENS, (60,), generator=torch.Generator().manual_seed(1)).tolist()
Make = Callable[..., DeviceExecutor]


@pytest.fixture(params=list(SHAPES))
def step(request: pytest.FixtureRequest) -> Step:
    model = load_model(checkpoint_of(request.param, SHAPES[request.param], "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, DEVICE_ROUNDING)


@pytest.fixture
def make(step: Step, monkeypatch: pytest.MonkeyPatch) -> Make:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make_executor(draft_rows: int = 16, n_sequences: int = 1) -> DeviceExecutor:
        never = Numbers.suppressed_ids | frozenset(range(N_TOKENS, N_ROWS))
        plan = CachePlan(128, 64, n_sequences)
        executor = DeviceExecutor(step, plan, device="cpu", banned_ids=never, draft_rows=draft_rows)
        twins.know(executor)
        executor.poison()
        return executor

    return make_executor


def decoded(executor: DeviceExecutor, chunk: int) -> Tensor:
    """Logits of all but a prompt of 30, so many rows at a time."""
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    found = []
    for start, end in [(0, 30), *((at, min(at + chunk, len(IDS))) for at in range(30, len(IDS), chunk))]:
        batch = Batch()
        cache.append_rows(batch, IDS[start:end], range(end - start) if start else [])
        found.append(executor.run(batch))
        cache.commit(end - start)
    return torch.cat(found)


def test_rows_of_a_draft_get_what_each_gets_alone(make: Make) -> None:
    executor = make()
    assert executor.most_draft_rows == 16
    alone = decoded(executor, 1)
    for chunk in (2, 3, 7, 16):
        executor.poison()
        assert torch.equal(decoded(executor, chunk), alone), chunk


def test_fewer_rows_are_drafted_where_fewer_are_asked_for(make: Make) -> None:
    assert make(4).most_draft_rows == 4
    assert make(1).most_draft_rows == 1
    assert make(1).make_batch_loop() is None


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_k": 5, "temperature": 0.7}, {"presence_penalty": 0.3}])
def test_answers_are_those_without_drafts(make: Make, sampling: dict) -> None:
    """By the device's sampler, and by the host's where there is a penalty."""

    asked = SamplingParams(seed=3, **sampling)
    request = Request(tuple([5, 6, 7, 8] * 6), max_tokens=40, sampling=asked, ignores_end=True)
    told = []
    for drafts in (True, False):
        engine = Engine(make(16 if drafts else 1), Numbers(N_TOKENS), N_ROWS)
        if drafts:
            draft_by(engine, Always(16))
        deltas = list(engine.generate(request))
        told.append([(delta.sampled.id, round(delta.sampled.logprob, 9)) for delta in deltas if delta.sampled])
        assert (deltas[-1].finish.n_draft > 0) == drafts
    assert told[0] == told[1]
