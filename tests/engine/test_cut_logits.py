"""What a model says after its prompt was cut: the cache against all rows at once under a mask for each head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_rows, steps_of
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model import decoder
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import Step
from bytefloor.ops.eviction import OBSERVED
from cut_prompts import Emulation
from tiny import build_tiny, prompt_ids

EXACT = Precision(torch.float64, torch.float64)
BUDGET, N_PROMPT, N_ALL = 45, 75, 84
IDS = prompt_ids(N_ALL, seed=3)
CASES = [("gemma4-unified", "float32"), ("gemma4-e", "float32"), ("qwen3", "float32"), ("smollm2", "float32"),
         ("gemma4-unified", "int8"), ("qwen3", "fp8"), ("gemma4-e", "bf16")]  # fmt: skip
"""Sliding layers and K=V; shared keys and values; neither of these; three heads a group; codes of both kinds."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Step, Emulation, Tensor]:
    """A step, what it keeps of IDS, and the logits of all rows. Tiny K=V heads have few lanes that turn."""
    name, storage = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "PAIRS_TOGETHER", 1)
        tiny = build_tiny(name, tmp_path_factory.mktemp("tiny"))
        step = make_step(load_model(open_checkpoint(tiny.directory)), storage)
    assert any(kind.rotated for kind in step.kinds) == (name == "gemma4-unified" and storage == "float32")
    emulation = Emulation(step, IDS, N_PROMPT, BUDGET)
    return step, emulation, emulation.logits()


def make_step(model: Model, storage: str = "float32") -> Step:
    return build_step(model.config, model.weights, Rounding(cache=storage))


def make_executor(step: Step, chunk: int = 128, **more: int) -> ReferenceExecutor:
    plan = CachePlan(128, chunk, page_size=4, **{"budget": BUDGET, **more})
    executor = ReferenceExecutor(step, plan, precision=EXACT)
    executor.poison()
    return executor


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 40, 75, 128])
def test_logits_are_those_of_a_mask_for_each_head(made: tuple[Step, Emulation, Tensor], chunk: int) -> None:
    """The prompt's last row has seen all of it; those behind see what is kept, and each other. In any chunks."""
    step, _, expected = made
    steps = steps_of(N_ALL, chunk, N_PROMPT)
    wanted = range(N_PROMPT - 1, N_ALL)
    executor = make_executor(step, max(chunk, OBSERVED))
    found = torch.cat([logits for _, logits in score_rows(executor, IDS, steps, wanted, n_prompt=N_PROMPT)])
    assert (found - expected[N_PROMPT - 1 :]).abs().max() < 1e-8


def test_cutting_changes_what_comes_behind_the_prompt_and_nothing_else(made: tuple[Step, Emulation, Tensor]) -> None:
    step, emulation, expected = made
    whole = Emulation(step, IDS, N_PROMPT, None).logits()
    assert torch.equal(expected[:N_PROMPT], whole[:N_PROMPT])
    assert (expected[N_PROMPT:] - whole[N_PROMPT:]).abs().amax(-1).min() > 1e-3
    kept = [frozenset(each) for heads in emulation.kept.values() for each in heads]
    assert {len(each) for each in kept} == {BUDGET}
    assert len(set(kept)) == len(kept)  # each head of each layer has its own


def test_float32_gives_the_same_to_1e_4(made: tuple[Step, Emulation, Tensor]) -> None:
    """With codes the last bits of a float decide which of two a value becomes."""
    step, _, expected = made
    executor = ReferenceExecutor(step, CachePlan(128, 40, page_size=4, budget=BUDGET))
    executor.poison()
    steps = steps_of(N_ALL, 40, N_PROMPT)
    found = torch.cat([logits for _, logits in score_rows(executor, IDS, steps, range(N_ALL), n_prompt=N_PROMPT)])
    assert (found - expected).abs().max() < (1e-4 if step.kinds[0].storage == "float32" else 0.05)


def test_several_sequences_are_cut_beside_each_other(made: tuple[Step, Emulation, Tensor]) -> None:
    """Two in one step, one beside others that decode, one that is short enough to keep all; then all decode."""
    step, _, _ = made
    texts = [prompt_ids(n + 6, seed=n) for n in (50, 46, 60, BUDGET)]
    prompts = [len(ids) - 6 for ids in texts]
    expected = [
        Emulation(step, ids, n, BUDGET if n > BUDGET else None).logits() for ids, n in zip(texts, prompts, strict=True)
    ]
    executor = make_executor(step, n_sequences=4)
    pools = make_pools(executor.plan, step.kinds)
    caches = [SequenceCache(executor.plan, step.kinds, pools) for _ in texts]
    for cache, n in zip(caches, prompts, strict=True):
        cache.cut_at(n)
    # Rows of each sequence in each step.
    schedule = [(18, 46, 28, 13), (32, 1, 0, 32), (1, 2, 32, 1), (1, 1, 1, 1), (1, 0, 3, 0), (3, 2, 2, 4)]
    for counts in schedule:
        batch, checks = Batch(), []
        for cache, ids, logits, n in zip(caches, texts, expected, counts, strict=True):
            if n:
                start = cache.length
                cache.append_rows(batch, ids[start : start + n], range(n))
                checks.append(logits[start : start + n])
        found = executor.run(batch)
        assert (found - torch.cat(checks)).abs().max() < 1e-8
        for cache, n in zip(caches, counts, strict=True):
            if n:
                cache.commit(n)
    assert [cache.dropped for cache in caches] == [max(0, n - BUDGET) for n in prompts]
    assert [cache.length for cache in caches] == [len(ids) for ids in texts]


def test_what_is_shared_is_left_as_it_is(made: tuple[Step, Emulation, Tensor]) -> None:
    """A prompt that continues from another's pages is cut in its own."""
    step, _, expected = made
    executor = make_executor(step, n_sequences=2)
    pools = make_pools(executor.plan, step.kinds)
    first = SequenceCache(executor.plan, step.kinds, pools)
    batch = Batch()
    first.append_rows(batch, IDS[:42], [])
    executor.run(batch)
    first.commit(42)
    second = first.fork()
    second.cut_at(N_PROMPT)
    for cache, end in ((second, N_PROMPT), (second, N_ALL), (first, N_PROMPT)):
        batch, start = Batch(), cache.length
        cache.append_rows(batch, IDS[start:end], range(end - start))
        assert (executor.run(batch) - expected[start:end]).abs().max() < 1e-8
        cache.commit(end - start)
    assert (first.dropped, second.dropped) == (0, N_PROMPT - BUDGET)


@pytest.mark.parametrize("chunk", [32, 40, 256])
def test_the_models_that_were_trained_are_cut_alike(shared_dir: Path, chunk: int) -> None:
    """The tiny Gemma 4, whose global layers keep V and the lanes that turn, on its own tokens."""
    model = load_model(open_checkpoint(shared_dir / "models" / "gemma4-tiny"))
    step = make_step(model)
    assert any(kind.rotated for kind in step.kinds)
    ids = [2, *(7 * i % 200 + 20 for i in range(69))]
    expected = Emulation(step, ids, 64, 40).logits()
    executor = make_executor(step, chunk, budget=40)
    steps = steps_of(len(ids), chunk, 64)
    found = torch.cat([logits for _, logits in score_rows(executor, ids, steps, range(len(ids)), n_prompt=64)])
    assert (found - expected).abs().max() < 1e-7
