"""Prompts that are cut to a budget, on small random models: kernels over what they keep, and the reference executor.

Which positions are kept is decided by votes, where two that are as good may fall either way: so the references are made
to keep what the device has kept, and another test compares choices. ``make`` and ``card`` come from conftest; with a
Python twin in place of every kernel the same tests run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine import eviction
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.score import steps_of
from bytefloor.engine.scratch import BLAS_WORKSPACE_BYTES, eviction_bytes
from bytefloor.engine.synthetic import checkpoint_of
from bytefloor.errors import UnsupportedError
from bytefloor.files.stored import Checkpoint
from bytefloor.ops.eviction import OBSERVED, kept_slots
from device_prompts import MORE, MORE_A_ROW, caches_of, ids_of, run_batch, spoil
from device_rows import Executor, Make, difference, empty_cache, settle, step_of, worst_row
from device_sampling import Numbers
from gpu.test_device_executor import SHAPES
from rows_reference import as_rows

BUDGET, N_PROMPT, N_ALL = 100, 200, 210
PLAN = CachePlan(256, 128, budget=BUDGET)
MIXTURES = {"llama": "BF16"}
"""As in test_prompts.py."""
Kept = list[Tensor]
"""Of each layer without a window, head by head."""


def source_of(name: str, card: torch.device) -> Checkpoint:
    return checkpoint_of(name, SHAPES[name], MIXTURES.get(name, "Q4_K_M"), card)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Kept]:
    """Everything that is chosen from now on; called once more, from then on."""

    def start() -> Kept:
        kept: Kept = []

        def choose(q: Tensor, keys: Tensor, scale: float, n_kept: int) -> Tensor:
            kept.append(kept_slots(q, keys, scale, n_kept))
            return kept[-1]

        monkeypatch.setattr(eviction, "kept_slots", choose)
        return kept

    return start


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kept], None]:
    """What is to be chosen from now on, whatever the votes are."""

    def start(kept: Kept) -> None:
        left = iter(kept)
        monkeypatch.setattr(eviction, "kept_slots", lambda q, keys, scale, n_kept: next(left))

    return start


def cut(
    executor: Executor, ids: Sequence[int], n_prompt: int, chunk: int, cache: SequenceCache | None = None
) -> Tensor:
    """Logits of the prompt's last row and of all behind it; device: these one by one, by the graph."""
    cache = empty_cache(executor) if cache is None else cache
    cache.cut_at(n_prompt)
    rows, is_device = [], isinstance(executor, DeviceExecutor)
    behind = [range(n, n + 1) for n in range(n_prompt, len(ids))] if is_device else [range(n_prompt, len(ids))]
    for step in (*steps_of(n_prompt, chunk, n_prompt), *behind):
        batch = Batch()
        wanted = [row - step.start for row in step if row >= n_prompt - 1]
        cache.append_rows(batch, ids[step.start : step.stop], wanted)
        rows.append(executor.run(batch).float().clone())
        cache.commit(len(step))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        *((name, "bf16") for name in SHAPES),
        ("qwen3", "int8"),
        ("gemma4", "fp8"),
        ("gemma3", "int8"),
        ("gemma4-e", "fp8"),
    ],
)
def test_a_prompt_that_was_cut_goes_on_over_what_it_kept(
    make: Make, card: torch.device, record: Callable, replay: Callable, name: str, storage: str
) -> None:
    """Sliding layers and none, keys that are values, shared ones, codes; over NaN; in chunks of several sizes."""
    step, ids = step_of(source_of(name, card), replace(DEVICE_ROUNDING, cache=storage)), ids_of(N_ALL)
    if name == "gemma4" and storage == "bf16":
        assert any(kind.rotated for kind in step.kinds)
    executor = make(step, PLAN)
    for chunk in (128, 60) if card.type == "cuda" else (60,):
        kept = record()
        spoil(executor)
        found = cut(executor, ids, N_PROMPT, chunk)
        assert found.shape == (N_ALL - N_PROMPT + 1, step.logits.shape[-1])
        expected, rougher = [], []
        for list_, rows in ((step, expected), (as_rows(step, 1, card), rougher)):
            replay([each.to(card) for each in kept])
            reference = ReferenceExecutor(list_, PLAN, device=card)
            reference.poison()
            rows.append(cut(reference, ids, N_PROMPT, chunk))
        assert difference(found, expected[0]) < MORE * difference(rougher[0], expected[0])
        assert worst_row(found, expected[0]) < MORE_A_ROW * worst_row(rougher[0], expected[0])


@pytest.mark.parametrize("name", ["llama", "gemma4", "gemma4-e"])
def test_the_choice_is_that_of_the_reference_but_for_close_votes(
    make: Make, card: torch.device, record: Callable, name: str
) -> None:
    step, ids = step_of(source_of(name, card)), ids_of(N_PROMPT + 1)
    found = record()
    cut(make(step, PLAN), ids, N_PROMPT, 128)
    expected = record()
    cut(ReferenceExecutor(step, PLAN, device=card), ids, N_PROMPT, 128)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape == (1, BUDGET)
        earlier = [set(each[0, : BUDGET - OBSERVED].tolist()) for each in (ours, theirs)]
        assert ours[0].tolist() == sorted(ours[0].tolist())
        assert torch.equal(ours[0, -OBSERVED:].cpu(), torch.arange(N_PROMPT - OBSERVED, N_PROMPT))
        assert len(earlier[0] & earlier[1]) >= 0.9 * len(earlier[0])
    # Of 168 earlier positions 68 are kept: by chance two choices would have 40 % in common.


PROMPTS = (150, 101, 80, 200)
"""The third is short enough to keep all."""


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4"])
def test_sequences_that_were_cut_get_the_bits_together_that_each_gets_alone(
    make: Make, card: torch.device, name: str
) -> None:
    """In one graph with one that was not; a row beside a prompt that is cut; launched one by one too."""
    executor = make(step_of(source_of(name, card)), replace(PLAN, n_sequences=8, chunk=256))
    texts = [ids_of(n + 5, seed=n) for n in PROMPTS]
    alone = []
    for ids, n in zip(texts, PROMPTS, strict=True):
        alone.append(cut(executor, ids, n, 256))
    executor.poison()
    caches = caches_of(executor, len(PROMPTS))
    for cache, ids, n in zip(caches, texts, PROMPTS, strict=True):
        cut(executor, ids[: n + 1], n, 256, cache)
    for at in range(1, 5):
        batch = Batch()
        for cache, ids in zip(caches, texts, strict=True):
            cache.append_rows(batch, [ids[cache.length]], [0])
        found = executor.run(batch)
        if at == 2:
            assert torch.equal(executor.run(batch, is_eager=True), found)
        for cache, rows, logits in zip(caches, alone, found, strict=True):
            assert torch.equal(logits, rows[at + 1]), at
            cache.commit(1)
    assert [cache.dropped for cache in caches] == [max(0, n - BUDGET) for n in PROMPTS]
    # Sequences of a graph come and go, and what the one before had dropped is nothing to the next.
    fresh = caches_of(executor, 2)
    for cache in caches:
        cache.free()
    for i in (0, 1):
        cut(executor, texts[i][:60], 60, 256, fresh[i])
    rows = [(cache, texts[i][60:61]) for i, cache in enumerate(fresh)]
    single = [run_batch(executor, [row])[0] for row in rows]
    assert torch.equal(torch.cat(run_batch(executor, rows)), torch.cat(single))


def test_prompts_that_are_cut_in_one_batch_do_not_notice_each_other(make: Make, card: torch.device) -> None:
    """Two of them, with a sequence between them that was cut before and decodes, which keeps its bits."""
    executor = make(step_of(source_of("gemma4", card)), replace(PLAN, n_sequences=8, chunk=512))
    lengths = (120, 150, 180)
    texts = [ids_of(n + 3, seed=n) for n in lengths]
    alone = [cut(executor, ids, n, 512) for ids, n in zip(texts, lengths, strict=True)]
    executor.poison()
    caches = caches_of(executor, 3)
    cut(executor, texts[1][:150], 150, 512, caches[1])
    for cache, n in zip(caches, lengths, strict=True):
        if not cache.length:
            cache.cut_at(n)
    for at, counts in enumerate(((120, 1, 180), (1, 1, 1), (1, 1, 1))):
        batch = Batch()
        for cache, ids, n in zip(caches, texts, counts, strict=True):
            cache.append_rows(batch, ids[cache.length : cache.length + n], [n - 1])
        assert batch.evicting == ([0, 2] if at == 0 else [])
        found = executor.run(batch).float().clone()
        for cache, n in zip(caches, counts, strict=True):
            cache.commit(n)
        assert torch.equal(found[1], alone[1][at + 1]), at
        # Sums of products are taken over other rows: the last bits of a prompt may differ, and a close vote with them.
        assert difference(found[[0, 2]], torch.stack([alone[0][at], alone[2][at]])) < 3e-2, at
    assert [cache.dropped for cache in caches] == [20, 50, 80]


def test_more_sequences_than_a_graph_holds_go_on_over_what_they_kept(make: Make, card: torch.device) -> None:
    """Twenty, by the road of many rows: near what each gets by the graph of one."""
    executor = make(step_of(source_of("gemma4", card)), replace(PLAN, n_sequences=20, chunk=256))
    texts = [ids_of(103 + i, seed=i) for i in range(20)]
    caches, rows = caches_of(executor, 20), []
    for cache, ids in zip(caches, texts, strict=True):
        cut(executor, ids[:-1], len(ids) - 2, 256, cache)
        assert cache.dropped > 0
        rows.append((cache, ids[-1:]))
    alone = torch.cat([run_batch(executor, [row])[0] for row in rows])
    assert difference(torch.cat(run_batch(executor, rows)), alone) < 2e-2


def test_drafts_behind_the_cut_get_what_each_row_gets_alone(card: torch.device, make: Make) -> None:
    executor = make(step_of(source_of("gemma3", card)), PLAN, draft_rows=16)
    ids = ids_of(N_PROMPT + 32)
    found = []
    for chunk in (1, 4, 7, 16):
        executor.poison()
        cache = empty_cache(executor)
        cut(executor, ids[:N_PROMPT], N_PROMPT, 128, cache)
        rows = []
        for start in range(N_PROMPT, len(ids), chunk):
            batch, n = Batch(), min(chunk, len(ids) - start)
            cache.append_rows(batch, ids[start : start + n], range(n))
            rows.append(executor.run(batch).clone())
            cache.commit(n)
        found.append(torch.cat(rows))
    assert bool(found[0].isfinite().all())
    for other in found[1:]:
        assert torch.equal(other, found[0])


HOT = SamplingParams(temperature=9.0, top_k=8, top_p=1.0, min_p=0.0, seed=3)
"""Hardly two tokens are the same, so that one that is wrong shows; and both loops have a sampler for it."""


@pytest.mark.parametrize("n_requests", [1, 3])
def test_tokens_that_go_from_device_to_device_are_those_of_plain_steps(
    make: Make, card: torch.device, n_requests: int
) -> None:
    """Both loops find their places behind the cut, and random numbers go by positions. The last prompt is not cut."""
    step = step_of(source_of("gemma4", card))
    n_vocabulary = step.logits.shape[-1]
    answers = []
    for is_plain in (True, False):
        executor = make(step, replace(PLAN, n_sequences=4), banned_ids=Numbers.suppressed_ids)
        if is_plain:
            executor.make_loop = executor.make_batch_loop = lambda: None  # type: ignore[assignment]
        engine = Engine(executor, Numbers(n_vocabulary), n_vocabulary)
        requests = [
            Request(tuple(ids_of(n, seed=n)), max_tokens=12, sampling=HOT, ignores_end=True)
            for n in (120, 137, 60)[:n_requests]
        ]
        order = [engine.add(request) for request in requests]
        found: dict[int, list[int]] = {request_id: [] for request_id in order}
        dropped = []
        while engine.has_work:
            for delta in engine.step():
                found[delta.request_id].append(delta.sampled.id)
                dropped += [delta.finish.n_dropped] if delta.finish is not None else []
        assert sorted(dropped) == sorted((20, 37, 0)[:n_requests])
        assert all(len(set(ids)) > 6 for ids in found.values())
        answers.append([found[request_id] for request_id in order])
    assert answers[0] == answers[1]


def test_rows_one_by_one_choose_nothing_and_say_so(make: Make, card: torch.device) -> None:
    executor = make(step_of(source_of("qwen3", card)), PLAN)
    cache, batch = empty_cache(executor), Batch()
    cache.cut_at(120)
    cache.append_rows(batch, ids_of(120), [])
    with pytest.raises(UnsupportedError, match="rows one by one choose nothing"):
        executor.run(batch, is_eager=True)


def test_a_plan_counts_what_choosing_takes(make: Make, card: torch.device) -> None:
    """And no more than that is taken, beside what the stream's matrix products hold."""
    step = step_of(source_of("qwen3", card))
    plan = CachePlan(4096, 512)
    plain, cutting = (make(step, each).memory_plan for each in (plan, replace(plan, budget=2048)))
    assert "a prompt has 2048 of them once it is read" in str(cutting)
    # The most of several things, of which choosing is not always one: planes of the head take more on a large card.
    choosing = BLAS_WORKSPACE_BYTES + eviction_bytes(step.kinds[0], 8, plan)
    assert cutting.scratch >= max(plain.scratch, choosing)
    assert cutting.cache == plain.cache
    if card.type == "cuda":
        check_taken(make(step, replace(plan, budget=2048)), card)


def check_taken(executor: DeviceExecutor, card: torch.device) -> None:
    """By the last chunk of a prompt."""
    cache, ids = empty_cache(executor), ids_of(4000)
    cache.cut_at(4000)
    for rows in steps_of(4000, 512, 4000)[:-1]:
        batch = Batch()
        cache.append_rows(batch, ids[rows.start : rows.stop], [])
        executor.run(batch)
        cache.commit(len(rows))
    settle(card)
    torch.cuda.reset_peak_memory_stats(card)
    before = torch.cuda.memory_allocated(card)
    batch = Batch()
    cache.append_rows(batch, ids[cache.length :], [])
    executor.run(batch)
    settle(card)
    most = eviction_bytes(executor.step.kinds[0], 8, executor.plan) + BLAS_WORKSPACE_BYTES + (8 << 20)
    assert torch.cuda.max_memory_allocated(card) - before <= most
