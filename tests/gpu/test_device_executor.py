"""The whole road on small random models: the captured graph against the reference executor with the same rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from device_rows import difference, empty_cache
from rows_reference import DeviceReference

SHAPES = {
    "llama": Shape("llama", 512, 768, 3, 8, 2, 64, 512, 4096, False, {"rope.freq_base": 1e4}),
    "qwen3": Shape("qwen3", 512, 1024, 3, 8, 4, 128, 512, 4096, False, {"rope.freq_base": 1e6}),
    "gemma3": Shape(
        "gemma3", 256, 512, 3, 4, 1, 256, 304, 4096, True,
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3},
    ),
    "gemma4": Shape(
        "gemma4", 512, 768, 4, 16, 8, 64, 512, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 1, 128,
    ),
    "narrow": Shape("llama", 576, 1536, 2, 9, 3, 64, 512, 4096, True, {"rope.freq_base": 1e5}),
    "gemma4-e": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, 315, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
    ),
}  # fmt: skip


def step_of(name: str, mixture: str = "Q4_K_M", storage: str = "bf16") -> Step:
    model = load_model(checkpoint_of(name, SHAPES[name], mixture, "cuda"))
    return build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache=storage))


@pytest.fixture(scope="module", params=[(name, m) for name in SHAPES for m in ("Q4_K_M", "BF16")], ids=str)
def step(request: pytest.FixtureRequest) -> Step:
    return step_of(*request.param)


def one_by_one(executor: DeviceExecutor, ids: list[int], is_eager: bool = False) -> Tensor:
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    rows = []
    for token in ids:
        batch = Batch()
        cache.append_rows(batch, [token], [0])
        rows.append(executor.run(batch, is_eager)[0])
        cache.commit(1)
    return torch.stack(rows)


def replayed_as_launched(executor: DeviceExecutor, ids: list[int]) -> Tensor:
    """Logits by the graph, which are those of its kernels launched one by one, bit for bit, over NaN both times."""
    executor.poison()
    replayed = one_by_one(executor, ids)
    executor.poison()
    assert torch.equal(one_by_one(executor, ids, is_eager=True), replayed)
    return replayed


def test_replaying_equals_launching_and_one_run_equals_another(step: Step) -> None:
    """X02: bit for bit; every buffer and the whole cache hold NaN before each run."""
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    executor = DeviceExecutor(step, CachePlan(256, 64))
    replayed = replayed_as_launched(executor, ids)
    executor.poison()
    assert torch.equal(one_by_one(executor, ids), replayed)
    assert bool(torch.isfinite(replayed).all())


def test_capacity_changes_no_bit() -> None:
    """Several tiles long: with little capacity a run of the band is one tile, with much it is another cut of them."""
    step, ids = step_of("gemma4"), [3, 5, 8, 13] * 75
    runs = [one_by_one(DeviceExecutor(step, CachePlan(n, 64)), ids) for n in (320, 4096)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_agree_with_the_reference_that_rounds_alike(name: str) -> None:
    """Activations lose next to nothing; what is left are keys and values at the border of two bf16 values."""
    torch.backends.cuda.matmul.allow_tf32 = False
    step = step_of(name)
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    found = one_by_one(DeviceExecutor(step, CachePlan(256, 64)), ids)
    rounded, exact = (reference_logits(step, ids, rounds) for rounds in (True, False))
    cost = ((rounded - exact).norm() / exact.norm()).item()
    error = ((found - rounded).norm() / rounded.norm()).item()
    assert 0 < error < max(cost, 1e-3)
    assert error < 1e-2


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_caches_of_codes_agree_with_the_reference_that_rounds_alike(name: str, storage: str) -> None:
    """Replayed and launched, bit for bit; rows one by one, and a prompt with rows by the graph behind it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    step = step_of(name, storage=storage)
    ids = torch.randint(0, 300, (140,), generator=torch.Generator().manual_seed(1)).tolist()
    executor = DeviceExecutor(step, CachePlan(256, 128))
    found = replayed_as_launched(executor, ids)
    rounded, exact = (reference_logits(step, ids, rounds) for rounds in (True, False))
    cost = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < ((found - rounded).norm() / rounded.norm()).item() < max(cost, 1e-2)
    executor.poison()
    cache, reference = empty_cache(executor), DeviceReference(step, 256, "cuda")
    parts = [ids[:120], *([token] for token in ids[120:])]
    rows = torch.cat([run_rows(executor, cache, part) for part in parts])
    expected = torch.cat([reference.run(part) for part in parts])
    assert difference(rows, expected) < 2e-2


@pytest.mark.parametrize("word", ["attn_v", "attn_k"])
def test_q_k_and_v_of_different_record_widths_agree_with_the_reference(word: str) -> None:
    """Two launches and three, each with the norm of its own; the residual is written by one of them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ours, others = (checkpoint_of("gemma3", SHAPES["gemma3"], kind, "cuda") for kind in ("Q4_K", "BF16"))
    tensors = {name: others.tensors[name] if word in name else t for name, t in ours.tensors.items()}
    model = load_model(replace(ours, tensors=tensors))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    executor = DeviceExecutor(step, CachePlan(256, 64))
    executor.poison()
    found, rounded = one_by_one(executor, ids), reference_logits(step, ids, rounds=True)
    assert ((found - rounded).norm() / rounded.norm()).item() < 1e-2


def reference_logits(step: Step, ids: list[int], rounds: bool) -> Tensor:
    precision = Precision(rounds=rounds)
    executor = ReferenceExecutor(step, CachePlan(256, len(ids)), device="cuda", precision=precision)
    return torch.cat(list(score_chunks(executor, ids, len(ids)))).float()


def test_tokens_fed_back_on_the_device_equal_those_of_the_host(step: Step) -> None:
    executor = DeviceExecutor(step, CachePlan(256, 128))
    cache = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds))
    batch = Batch()
    cache.append_rows(batch, [5], [0], n_reserved=100)
    on_device = executor.decode_greedy(batch, 90).tolist()
    token, on_host = 5, []
    again = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds))
    for _ in range(90):
        batch = Batch()
        again.append_rows(batch, [token], [0])
        token = int(executor.run(batch)[0].argmax())
        on_host.append(token)
        again.commit(1)
    assert on_device == on_host


def run_rows(executor: DeviceExecutor, cache: SequenceCache, ids: list[int]) -> Tensor:
    """The next rows of a sequence, in one batch: logits of each."""
    batch = Batch()
    cache.append_rows(batch, ids, range(len(ids)))
    logits = executor.run(batch)
    cache.commit(len(ids))
    return logits


def test_a_prompt_is_the_same_bits_twice_and_survives_a_fork(step: Step) -> None:
    """A prompt in one batch, then a fork whose shared page is copied before it is written."""
    ids = [int(i) for i in torch.randint(0, 300, (24,), generator=torch.Generator().manual_seed(2))]
    executor = DeviceExecutor(step, CachePlan(256, 64))
    executor.poison()
    cache = empty_cache(executor)
    expected = [run_rows(executor, cache, part) for part in (ids, [7], [8])]
    executor.poison()
    cache = empty_cache(executor)
    assert torch.equal(run_rows(executor, cache, ids), expected[0])
    twin = cache.fork()
    assert torch.equal(run_rows(executor, cache, [7]), expected[1])
    assert torch.equal(run_rows(executor, cache, [8]), expected[2])
    assert torch.equal(run_rows(executor, twin, [7]), expected[1])


@pytest.mark.parametrize("chunk", [25, 31, 64, 65, 100])
def test_a_prompt_agrees_with_the_reference_that_rounds_alike(step: Step, chunk: int) -> None:
    """K04, S03: products in bf16 instead of codes, and any chunk; a token after it reads the same pages.

    What the reference does not round are shares of attention, 2^-9 of each.
    """
    ids = [int(i) for i in torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(3))]
    executor = DeviceExecutor(step, CachePlan(256, 128))
    executor.poison()
    cache, reference = empty_cache(executor), DeviceReference(step, 256, "cuda")
    parts = [*(ids[start : start + chunk] for start in range(0, len(ids), chunk)), [7]]
    found = torch.cat([run_rows(executor, cache, part) for part in parts])
    expected = torch.cat([reference.run(part) for part in parts])
    assert difference(found, expected) < 2e-2
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean().item() > 0.9
