"""What a cache of fewer bits costs: mean KL to a float32 cache, teacher-forced over the recorded texts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import CacheKind
from bytefloor.ops.cache_write import page_ids
from bytefloor.ops.cache_write import reference as cache_write
from bytefloor.ops.pages import codes_and_scales, page_shape, page_size_of, values_of
from bytefloor.ops.round_to import round_to

MOST_KL = {
    "smollm2-135m-instruct-q4_1": {"bf16": 2e-4, "int8": 2e-3, "fp8": 1e-2},
    "gemma-3-270m-q4_k_m": {"bf16": 2e-4, "int8": 5e-3, "fp8": 5e-3},
    "gemma4-tiny": {"bf16": 1e-5, "int8": 1e-4, "fp8": 1e-3},
    "gemma4-tiny-e": {"bf16": 1e-5, "int8": 1e-4, "fp8": 2e-3},
}
N_TEXTS = 3
"""Of seven: the others would take minutes. docs/log.md has what all of them give."""
CHUNK = 64


def test_a_row_has_one_scale_and_codes_of_eight_bits() -> None:
    sizes = 10.0 ** torch.arange(-3, 5).repeat(8)[:, None]
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * sizes
    largest = x.abs().amax(-1, keepdim=True)
    whole = round_to(x, "int8")
    # Half a code, and half of what eight bits of scale leave over at the largest value.
    assert bool(((whole - x).abs() <= largest * (0.5 / 127 + 2**-8)).all())
    scale = (largest / 127).bfloat16().float()
    assert torch.equal((whole / scale).round().abs().clamp(max=127), (whole / scale).round().abs())
    floats = round_to(x, "fp8")
    assert bool(((floats - x).abs() <= x.abs() * 2**-4 + largest * (2**-9 / 448 + 2**-8)).all())


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_zeros_stay_zero_and_nan_is_seen(storage: str) -> None:
    x = torch.zeros(3, 16)
    x[1, 5] = float("nan")
    found = round_to(x, storage)
    assert torch.equal(found[0], torch.zeros(16))
    assert bool(found[1].isnan().all())


def test_a_scale_is_counted_for_each_head_and_position() -> None:
    kinds = {storage: CacheKind("kind", 4, 128, None, storage) for storage in ("float32", "bf16", "int8", "fp8")}
    found = {storage: kind.position_bytes for storage, kind in kinds.items()}
    assert found == {"float32": 4096, "bf16": 2048, "int8": 2 * 4 * 130, "fp8": 2 * 4 * 130}


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_pages_of_codes_hold_what_rounding_leaves(storage: str) -> None:
    """Where rows were written, through a table; the scales behind the codes; nothing else is touched."""
    page, e, j, table = 8, 16, 3, torch.tensor([[4, 1, 2]])
    shape, dtype = page_shape(storage, j, page, e)
    kind = CacheKind("kind", j, e, None, storage)
    assert math.prod(shape) * dtype.itemsize == page * kind.position_bytes
    cache = torch.full((6, *shape), 0xFF, dtype=dtype)
    assert page_size_of(cache, e) == page
    k, v = torch.randn(2, 21, j, e, generator=torch.Generator().manual_seed(1))
    k[5, 1] = 0
    slots, sequence = torch.arange(21), torch.zeros(21, dtype=torch.int64)
    cache_write(k, v, slots, sequence, table, cache, storage)
    found = values_of(cache, e, storage)
    pages = page_ids(slots, table[sequence], page)
    for half, x in enumerate((k, v)):
        assert torch.equal(found[pages, half, :, slots % page], round_to(x, storage))
    assert bool((cache[[0, 3, 5]] == 0xFF).all())
    codes, scales = codes_and_scales(cache[4], e)
    assert not codes[0, 1, 5].any()
    assert scales[0, 1, 5] == 0
    assert cache[4, 0, 0, page * e : page * e + 2].view(torch.bfloat16) == scales[0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_what_is_not_finite_is_a_scale_of_nan(storage: str, bad: float) -> None:
    """Codes cannot say it, and zero shares times codes outside the band must stay zero."""
    shape, dtype = page_shape(storage, 1, 8, 16)
    cache, k = torch.zeros(2, *shape, dtype=dtype), torch.randn(1, 1, 16)
    k[0, 0, 3] = bad
    first = torch.zeros(1, dtype=torch.int64)
    cache_write(k, torch.zeros_like(k), first, first, torch.tensor([[1]]), cache, storage)
    assert bool(values_of(cache, 16, storage)[1, 0, 0, 0].isnan().all())
    assert not codes_and_scales(cache, 16)[0][1, 0, 0, 0].any()
    assert bool(round_to(k, storage).isnan().all())


@pytest.fixture(scope="module", params=list(MOST_KL))
def opened(request: pytest.FixtureRequest, shared_dir: Path) -> tuple[str, Model, list[list[int]]]:
    name = request.param
    fixture = {"smollm2-135m-instruct-q4_1": "smollm2_path", "gemma-3-270m-q4_k_m": "gemma3_270m_path"}.get(name)
    path = request.getfixturevalue(fixture) if fixture else shared_dir / "models" / name
    prompts = json.loads((shared_dir / "golden" / f"{name}.json").read_text())["prompts"]
    texts = [[*prompt["ids"], *prompt["greedy"]] for prompt in prompts]
    return name, load_model(open_checkpoint(path)), sorted(texts, key=len)[:N_TEXTS]


def mean_kl(model: Model, storages: list[str], texts: list[list[int]]) -> tuple[int, dict[str, float]]:
    """(positions, nats by storage), chunk by chunk: whole texts of a large vocabulary do not fit in memory."""
    executors = [
        ReferenceExecutor(build_step(model.config, model.weights, Rounding(cache=storage)), CachePlan(2304, CHUNK))
        for storage in ("float32", *storages)
    ]
    n, totals = 0, dict.fromkeys(storages, 0.0)
    for ids in texts:
        for exact, *others in zip(*(score_chunks(executor, ids, CHUNK) for executor in executors), strict=True):
            n += len(exact)
            expected = exact.double().log_softmax(-1)
            for storage, logits in zip(storages, others, strict=True):
                found = logits.double().log_softmax(-1)
                totals[storage] += float((expected.exp() * (expected - found)).sum())
    return n, {storage: total / n for storage, total in totals.items()}


def test_what_a_cache_of_fewer_bits_costs(
    opened: tuple[str, Model, list[list[int]]], capsys: pytest.CaptureFixture
) -> None:
    """S13: within a limit for each storage, and each costs something: it is not float32 under another name."""
    name, model, texts = opened
    n, found = mean_kl(model, list(MOST_KL[name]), texts)
    with capsys.disabled():
        print(f"\n{name}, {n} positions: " + ", ".join(f"{s} {kl:.2e}" for s, kl in found.items()))
    assert 0 < found["bf16"] < min(found["int8"], found["fp8"])
    assert all(found[storage] < limit for storage, limit in MOST_KL[name].items())


@pytest.mark.parametrize(("name", "most"), [("gemma4-tiny", 5e-3), ("gemma4-tiny-e", 5e-3)])
def test_what_coded_pages_cost_a_long_text(
    name: str, most: float, shared_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    """The first 640 tokens of the one text that is longer than what stays as it was written."""
    prompts = json.loads((shared_dir / "golden" / f"{name}.json").read_text())["prompts"]
    text = max((prompt["ids"] for prompt in prompts), key=len)[:640]
    n, found = mean_kl(load_model(open_checkpoint(shared_dir / "models" / name)), ["bf16", "k4v2"], [text])
    with capsys.disabled():
        print(f"\n{name}, {n} positions: " + ", ".join(f"{s} {kl:.2e}" for s, kl in found.items()))
    assert 20 * found["bf16"] < found["k4v2"] < most


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_codes_of_queries_cost_a_hundredth_of_codes_of_keys_and_values(
    head_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside int8 keys the kernel gives a query 16 bits under one scale a head: see docs/numerics.md."""
    generator = torch.Generator().manual_seed(head_size)
    q, k, v = (torch.randn(n, head_size, generator=generator, dtype=torch.float64) for n in (8, 300, 300))

    def mixed(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (queries @ keys.T * 3 * head_size**-0.5).softmax(-1) @ values

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return ((found - expected).norm() / expected.norm()).item()

    keys, values, exact = round_to(k, "int8"), round_to(v, "int8"), mixed(q, k, v)
    scale = q.abs().amax(-1, keepdim=True) / 32512
    of_queries = error(mixed((q / scale).round() * scale, keys, values), mixed(q, keys, values))
    of_cache = error(mixed(q, keys, values), exact)
    with capsys.disabled():
        print(f"\nhead size {head_size}: queries {of_queries:.1e}, int8 cache {of_cache:.1e}")
    assert 0 < of_queries < of_cache / 100
