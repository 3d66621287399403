"""Tokens and chunks of the reference executor: every call timed, nothing of what it computes changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.tools.bench_prompt import empty_cache
from bytefloor.tools.bench_together import randomise_cache
from bytefloor.tools.profile_data import StepProfile
from bytefloor.tools.profile_reference import clocked, measure_chunk, measure_token

SHAPE = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
    {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
)  # fmt: skip


@pytest.fixture(scope="module")
def executor() -> ReferenceExecutor:
    model = load_model(checkpoint_of("tiny", SHAPE, "Q8_0", "cpu"))
    found = ReferenceExecutor(build_step(model.config, model.weights, Rounding()), CachePlan(200, 64))
    randomise_cache(found)
    return found


def batch_of(executor: ReferenceExecutor, ids: list[int]) -> Batch:
    cache, batch = empty_cache(executor), Batch()
    cache.append_rows(batch, ids, [len(ids) - 1])
    return batch


def check(step: StepProfile, executor: ReferenceExecutor) -> None:
    assert [span.name for span in step.spans] == [call.op.name for call in executor.step.calls]
    times = [time for span in step.spans for time in (span.start_us, span.ready_us, span.end_us)]
    assert times == sorted(times)
    assert times[0] > 0
    assert step.end_us > 0
    assert sum(link.us for link in step.links) + step.gaps_us == pytest.approx(step.profiled_us, abs=0.1)
    assert all(link.work_us > 0 for link in step.links if link.span.name == "linear")
    assert step.n_repeats == 3
    assert step.spread > 0


def test_a_token(executor: ReferenceExecutor) -> None:
    step = measure_token(executor, 100, 3)
    check(step, executor)
    assert (step.kind, step.rows, step.depth) == ("token", 1, 100)
    assert step.needed_bytes == sum(executor.step.token_bytes(100))
    assert step.sampling_us > 0


def test_a_chunk(executor: ReferenceExecutor) -> None:
    step = measure_chunk(executor, 40, 0, 3)
    check(step, executor)
    assert (step.kind, step.rows, step.depth, step.sampling_us) == ("chunk", 40, 0, None)
    assert step.flops > 30 * measure_token(executor, 0, 1).flops


def test_one_repeat_has_no_spread(executor: ReferenceExecutor) -> None:
    assert measure_token(executor, 0, 1).spread is None


def test_clocks_change_nothing_that_is_computed(executor: ReferenceExecutor) -> None:
    batch, calls = batch_of(executor, [3, 1, 4, 1, 5]), executor._calls
    plain = executor.run(batch)
    with clocked(executor) as stamps:
        timed = executor.run(batch)
    assert torch.equal(plain, timed)
    assert len(stamps) == len(executor.step.calls)
    assert executor._calls is calls
    assert torch.equal(plain, executor.run(batch))


def test_clocks_go_also_after_an_error(executor: ReferenceExecutor) -> None:
    calls = executor._calls
    broken = replace(batch_of(executor, [1]), wanted=[7])
    with pytest.raises(IndexError), clocked(executor):
        executor.run(broken)
    assert executor._calls is calls


def test_a_slow_op_is_seen_where_it_is(executor: ReferenceExecutor) -> None:
    """Many times the work in one call: its span grows and no other does."""
    calls = executor._calls
    index = next(i for i, (call, _, _) in enumerate(calls) if call.part == "layers.2.mlp" and call.op.name == "glu")
    call, constants, sources = calls[index]
    heavy = torch.randn(600, 600)

    def slowed(**operands: object) -> object:
        for _ in range(20):
            heavy @ heavy
        return call.op.reference(**operands)

    before = measure_token(executor, 0, 3).links
    slow = replace(call, op=replace(call.op, reference=slowed))
    executor._calls = [*calls[:index], (slow, constants, sources), *calls[index + 1 :]]
    try:
        after = measure_token(executor, 0, 3).links
    finally:
        executor._calls = calls
    grown = [then.us - first.us for first, then in zip(before, after, strict=True)]
    assert grown.index(max(grown)) == index
    assert after[index].work_us > 20 * before[index].work_us
