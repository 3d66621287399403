"""Cases from public threads (the letters and numbers in docstrings) on whole models: the kernels against the reference.

``make`` and ``card`` come from conftest. With a Python twin in place of every kernel the same tests run on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bytefloor.engine import device as device_module
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.packed import PackedWeights
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.row_products import FEW_ROWS
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import BytefloorError, UnsupportedError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import STORAGE_BYTES, OpCall, Step
from device_rows import (
    Make,
    assert_same_choice,
    cache_at,
    difference,
    reference_rows,
    rows_at,
    rows_of,
    settle,
    step_of,
    stored_as,
    times,
    with_frequencies,
    worst_row,
)
from gpu.test_device_executor import SHAPES
from rows_reference import DeviceReference, as_rows, expected_rows

HALF_MAX = 65504.0
TIES = 1e-2
"""Keys and values at the border of two bf16 values take either."""
ROWS = 2e-2
"""Of prompts, against the reference that rounds as they do: activations at the border of two bf16 values take either,
and shares of attention, which the reference does not round, lose 2^-9 each."""
PLAN = CachePlan(256, 128)
MIXTURES = {"llama": "BF16"}
"""Others have Q4_K_M. Random blocks of it leave this one so sharp a softmax that ten bits change single rows a lot."""


def ids_of(n: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def synthetic(name: str, card: torch.device, mixture: str | None = None) -> Step:
    return step_of(checkpoint_of(name, SHAPES[name], mixture or MIXTURES.get(name, "Q4_K_M"), card))


def greedy_of(executor: DeviceExecutor, prompt: list[int], n: int) -> list[int]:
    """Tokens fed back on the device."""
    cache = cache_at(executor, 0)
    if prompt[:-1]:
        rows_of(executor, prompt[:-1], executor.plan.chunk, cache)
    batch = Batch()
    cache.append_rows(batch, prompt[-1:], [0], n_reserved=n)
    return executor.decode_greedy(batch, n).tolist()


# --- activations and residuals that float16 does not hold


def largest_result(step: Step, card: torch.device, op: str, ids: list[int]) -> float:
    """Of an op, anywhere in the model."""
    executor, largest, batch = ReferenceExecutor(step, PLAN, device=card), [0.0], Batch()
    cache_at(executor, 0).append_rows(batch, ids, [])

    def observe(call: OpCall, result: Tensor) -> None:
        if call.op.name == op:
            largest.append(result.abs().max().item())

    executor.run(batch, observe)
    return max(largest)


def test_inputs_of_down_of_a_hundred_thousand_stay_right(make: Make, card: torch.device) -> None:
    """K02: row by row, and in batches on either side of 64."""
    checkpoint = checkpoint_of("llama", SHAPES["llama"], "BF16", card)
    step = step_of(times(checkpoint, {"blk.1.ffn_up.weight": 5e5, "blk.1.ffn_down.weight": 2e-6}))
    ids = ids_of(66)
    assert largest_result(step, card, "glu", ids) > 1e5
    executor, expected = make(step, PLAN), reference_rows(step, ids, card)
    assert worst_row(rows_of(executor, ids, 1), expected) < TIES
    for chunk in (63, 64, 65):
        executor.poison()
        assert worst_row(rows_of(executor, ids, chunk), expected_rows(step, ids, chunk, card)) < ROWS


def test_a_residual_beyond_float16_stays_right(make: Make, card: torch.device) -> None:
    """N01: logits of both roads, and the tokens of a greedy answer."""
    checkpoint = checkpoint_of("gemma3", SHAPES["gemma3"], "BF16", card)
    step, ids = step_of(times(checkpoint, {"blk.1.post_ffw_norm.weight": 5e4})), ids_of(70)
    assert largest_result(step, card, "add", ids) > HALF_MAX
    executor, expected = make(step, PLAN), reference_rows(step, ids, card)
    assert worst_row(rows_of(executor, ids, 1), expected) < TIES
    executor.poison()
    assert worst_row(rows_of(executor, ids, 70), expected_rows(step, ids, 70, card)) < ROWS
    executor.poison()
    answer = greedy_of(executor, [5], 60)
    assert len(set(answer)) > 1
    assert_same_choice(torch.tensor(answer, device=card), reference_rows(step, [5, *answer[:-1]], card))


# --- lengths and chunks


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_chunk_size_changes_what_a_prompt_says(make: Make, card: torch.device, name: str) -> None:
    """K04: on both sides of every padding and of a tile of attention. No last chunk is a single row."""
    step, ids = synthetic(name, card), ids_of(102)
    executor = make(step, PLAN)
    of_few, of_many = (expected_rows(step, ids, chunk, card) for chunk in (51, 102))
    assert worst_row(rows_of(executor, ids, 1), reference_rows(step, ids, card)) < TIES
    for chunk in (2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 102):
        executor.poison()
        found, expected = rows_of(executor, ids, chunk), of_few if chunk <= FEW_ROWS else of_many
        assert worst_row(found, expected) < ROWS, chunk
        assert_same_choice(found.argmax(-1), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_length_at_and_beside_a_tile_is_right(make: Make, card: torch.device, name: str) -> None:
    """N05: decoded up to each length, and a token decoded after a prompt of each: tiles of 32, paddings up to 256."""
    step, ids = synthetic(name, card), ids_of(386)
    executor, expected = make(step, CachePlan(512, 400)), reference_rows(step, ids, card)
    found = rows_of(executor, ids, 1)
    assert worst_row(found, expected) < TIES
    for n in (26, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 384):
        executor.poison()
        cache, reference = cache_at(executor, 0), DeviceReference(step, 400, card)
        assert worst_row(rows_of(executor, ids[:n], n, cache), reference.run(ids[:n])) < ROWS, n
        after = ids[n : n + 1]
        assert worst_row(rows_of(executor, after, 1, cache), reference.run(after)) < ROWS, n


@pytest.mark.parametrize(("name", "window"), [("gemma3", 24), ("gemma4", 40)])
def test_lengths_around_a_window_are_right_however_they_are_cut(
    make: Make, card: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, window: int
) -> None:
    """S03: token by token, by the graph and by the kernels of many rows; in chunks, and in one pass."""
    step, ids = synthetic(name, card), ids_of(2 * window + 3)
    assert window in {kind.window for kind in step.kinds}
    executor, expected = make(step, PLAN), reference_rows(step, ids, card)
    of_few, of_many = (expected_rows(step, ids, chunk, card) for chunk in (len(ids) // 2 + 1, len(ids)))
    for n in (window - 1, window, window + 1, 2 * window + 3):
        executor.poison()
        alone = rows_of(executor, ids[:n], 1)
        assert worst_row(alone, expected[:n]) < TIES
        with monkeypatch.context() as patch:
            patch.setattr(device_module, "MOST_ROWS_ONE_BY_ONE", 0)
            for chunk in (7, n) if n != window + 1 else (1, 7, n):
                executor.poison()
                as_prompt = of_few if chunk <= FEW_ROWS else of_many
                assert worst_row(rows_of(executor, ids[:n], chunk), as_prompt[:n]) < ROWS, (n, chunk)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_what_unused_cells_hold_changes_nothing(make: Make, card: torch.device, name: str) -> None:
    """N04, N02: NaN in every cell that was not written, as against zeros: the same bits."""
    executor, ids = make(synthetic(name, card), PLAN), ids_of(90)
    for chunk in (1, 45):
        executor.poison()
        found = rows_of(executor, ids, chunk)
        for pool in executor.pools.values():
            pool.zero_()
        settle(card)
        assert torch.equal(rows_of(executor, ids, chunk), found)
        assert bool(found.isfinite().all())


def test_long_and_short_prompts_by_turns_share_one_capture(make: Make, card: torch.device) -> None:
    """X01: one sequence grows over pages while others come and go beside it; replayed and launched alike."""
    step, plan = synthetic("gemma4", card), CachePlan(256, 128, n_sequences=2)
    executor, pools = make(step, plan), make_pools(plan, step.kinds)
    long, ids, reference = SequenceCache(plan, step.kinds, pools), ids_of(200), DeviceReference(step, 256, card)
    for turn, (n, n_short) in enumerate(((100, 1), (3, 90), (25, 5), (1, 30), (24, 62), (40, 2), (7, 65))):
        rows = ids[long.length : long.length + n]
        assert worst_row(rows_of(executor, rows, n, long), reference.run(rows)) < ROWS
        short, others = SequenceCache(plan, step.kinds, pools), ids_of(n_short, turn)
        expected = expected_rows(step, others, n_short, card)
        assert worst_row(rows_of(executor, others, n_short, short), expected) < ROWS
        batch, eager = Batch(), []
        short.append_rows(batch, [7], [0], n_reserved=4)
        replayed = executor.decode_greedy(batch, 4).tolist()
        for token in (7, *replayed[:-1]):
            batch = Batch()
            short.append_rows(batch, [token], [0])
            eager.append(int(executor.run(batch, is_eager=True)[0].argmax()))
            short.commit(1)
        assert replayed == eager
        short.free()
    assert long.length == 200
    settle(card)  # raises what a kernel left behind


# --- far out: tables of RoPE, and the activation


def to_half(table: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(torch.tensor(table, dtype=torch.float64).half().tolist())


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_rows_at_position_30000_are_right(make: Make, card: torch.device, name: str) -> None:
    """N08: by the graph and as a prompt; tables in half precision would be seen."""
    step, plan = synthetic(name, card), CachePlan(32768, 64)
    spoiled = with_frequencies(step, to_half)
    executor = make(step, plan)
    for n, bound, steps in (
        (1, TIES, (step, spoiled)),
        (30, ROWS, (as_rows(step, 30, card), as_rows(spoiled, 30, card))),
    ):
        executors = [executor, *(ReferenceExecutor(s, plan, device=card) for s in steps)]
        found, expected, wrong = rows_at(executors, 30_000, ids_of(n), n)
        assert worst_row(found, expected) < bound
        assert difference(wrong, expected) > 3 * bound


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_the_activation_is_the_configs_on_every_road(make: Make, card: torch.device, name: str) -> None:
    """N08: the same weights with SwiGLU and with GeGLU."""
    model, ids, expected = load_model(checkpoint_of(name, SHAPES[name], "BF16", card)), ids_of(40), []
    for activation in ("silu", "gelu_tanh"):
        step = build_step(replace(model.config, activation=activation), model.weights, DEVICE_ROUNDING)
        executor = make(step, PLAN)
        expected.append(reference_rows(step, ids, card))
        assert worst_row(rows_of(executor, ids, 1), expected[-1]) < TIES
        executor.poison()
        assert worst_row(rows_of(executor, ids, 40), expected_rows(step, ids, 40, card)) < ROWS
    assert difference(*expected) > 3 * ROWS


def test_gemma3_scales_positions_of_global_layers_alone(make: Make, card: torch.device) -> None:
    """R02: 2,900 tokens in; no scaling, and scaling of all layers, would be seen."""
    shape = SHAPES["gemma3"]
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    step = step_of(checkpoint_of("gemma3", replace(shape, keys={**shape.keys, **scaling}), "Q4_K_M", card))
    tables = {call.attributes["inverse_frequencies"] for call in step.calls if call.op.name == "rope"}
    assert {table[0] for table in tables} == {1.0, 1 / 8}
    plan = CachePlan(4096, 64)
    unscaled = with_frequencies(step, lambda table: tuple(x / table[0] for x in table))
    all_scaled = with_frequencies(step, lambda table: tuple(x / table[0] / 8 for x in table))
    steps, executor = (step, unscaled, all_scaled), make(step, plan)
    for n, bound, each in ((1, TIES, steps), (30, ROWS, [as_rows(s, 30, card) for s in steps])):
        executors = [executor, *(ReferenceExecutor(s, plan, device=card) for s in each)]
        found, expected, *wrong = rows_at(executors, 2900, ids_of(n), n)
        assert worst_row(found, expected) < bound
        assert all(difference(other, expected) > 3 * bound for other in wrong)


# --- caches: shared, and of fewer bits


def test_layers_that_share_keys_and_values_decode_as_the_reference(make: Make, card: torch.device) -> None:
    """S08: they read the pages of their source, write none, and see what it wrote in the same step."""
    step, ids = synthetic("gemma4-e", card), ids_of(100)
    assert sum(step.n_cache_layers.values()) == 2
    executor = make(step, PLAN)
    attention = [launch for launch in executor.launches if launch.kernel.name == "attention"]
    assert [dict(launch.kernel.defines)["OWNS_KV"] for launch in attention] == ["1", "1", "0", "0"]
    places = [launch.arguments[4].data_ptr() for launch in attention]
    assert places[:2] == places[2:]
    assert places[0] != places[1]
    for chunk, bound in ((1, TIES), (100, ROWS), (30, ROWS)):
        executor.poison()
        assert worst_row(rows_of(executor, ids, chunk), expected_rows(step, ids, chunk, card)) < bound


def made_or_refused(make: Make, step: Step) -> DeviceExecutor | str:
    """The executor, or the words with which it is refused."""
    try:
        return make(step, PLAN)
    except UnsupportedError as error:
        return str(error)


@pytest.mark.parametrize("storage", list(STORAGE_BYTES))
def test_every_storage_of_the_cache_has_kernels_or_is_refused_by_name(
    make: Make, card: torch.device, storage: str
) -> None:
    """S12: keys and values have one storage together; no other way to run is taken silently."""
    rounding = replace(DEVICE_ROUNDING, cache=storage)
    step, ids = step_of(checkpoint_of("gemma4", SHAPES["gemma4"], "Q4_K_M", card), rounding), ids_of(70)
    executor = made_or_refused(make, step)
    if isinstance(executor, str):
        assert storage not in MOST_KL
        assert "cache" in executor
        assert storage in executor
        return
    rounded, exact = (reference_rows(step, ids, card, rounds) for rounds in (True, False))
    assert difference(rows_of(executor, ids, 1), rounded) < max(TIES, difference(rounded, exact) / 2)


BY_HEAD_SIZE = {
    64: SHAPES["llama"],
    128: SHAPES["qwen3"],
    256: SHAPES["gemma3"],
    512: replace(SHAPES["gemma4"], n_heads=4, n_kv_heads=2, global_head_size=512),
}
MOST_KL = {"bf16": 3e-5, "int8": 4e-4, "fp8": 5e-3}
"""Three times what rounding alone costs the worst of these models."""


def mean_kl(exact: Tensor, found: Tensor) -> float:
    p, q = (logits.double().log_softmax(-1) for logits in (exact, found))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.mark.parametrize("head_size", list(BY_HEAD_SIZE))
@pytest.mark.parametrize("storage", list(MOST_KL))
def test_a_cache_of_fewer_bits_costs_what_its_bits_cost(
    make: Make, card: torch.device, storage: str, head_size: int
) -> None:
    """S13: mean KL to a float32 cache is that of rounding alone, under a limit for each storage; of a prompt that of
    rounding activations too."""
    checkpoint = checkpoint_of("model", BY_HEAD_SIZE[head_size], "BF16", card)
    step, ids = step_of(checkpoint, replace(DEVICE_ROUNDING, cache=storage)), ids_of(100)
    assert head_size in {kind.head_size for kind in step.kinds}
    executor = made_or_refused(make, step)
    assert not isinstance(executor, str), executor
    exact = reference_rows(step_of(checkpoint, Rounding()), ids, card)
    rounding = mean_kl(exact, reference_rows(step, ids, card))
    assert 0.3 * rounding < mean_kl(exact, rows_of(executor, ids, 1)) < min(3 * rounding, MOST_KL[storage])
    as_prompt = mean_kl(exact, reference_rows(as_rows(step), ids, card))
    executor.poison()
    assert 0.3 * as_prompt < mean_kl(exact, rows_of(executor, ids, 100)) < 3 * as_prompt


# --- weights


@pytest.mark.parametrize("mixture", ["Q4_K_M", "BF16"])
@pytest.mark.parametrize("name", ["llama", "gemma4-e"])
def test_every_byte_that_is_read_was_filled(
    make: Make, card: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, mixture: str
) -> None:
    """K13: over memory that held NaN in every place; one matrix left out would be seen."""
    step, ids = synthetic(name, card, mixture), ids_of(40)
    expected = [rows_of(make(step, PLAN), ids, chunk) for chunk in (1, 40)]
    allocate, pack_chunk = PackedWeights.allocate, PackedWeights._pack_chunk

    def allocate_spoiled(weights: PackedWeights) -> None:
        allocate(weights)
        for packed in weights._packed.values():
            packed.fill_(0xFF)

    monkeypatch.setattr(PackedWeights, "allocate", allocate_spoiled)
    executor = make(step, PLAN)
    assert all(torch.equal(rows_of(executor, ids, chunk), rows) for chunk, rows in zip((1, 40), expected, strict=True))
    assert bool(expected[0].isfinite().all())
    if card.type == "cpu":
        return  # a twin multiplies with what the file holds

    def leave_one_out(weights: PackedWeights, group: Any, *rest: Any) -> None:
        if group is not weights._groups[-2]:
            pack_chunk(weights, group, *rest)

    monkeypatch.setattr(PackedWeights, "_pack_chunk", leave_one_out)
    assert not bool(rows_of(make(step, PLAN), ids, 1).isfinite().any())


@pytest.mark.parametrize("tensor", [
    "token_embd", "output", *(f"blk.0.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                                           "ffn_up", "ffn_down")),
])  # fmt: skip
def test_a_matrix_that_its_file_does_not_fill_is_refused_by_name(make: Make, card: torch.device, tensor: str) -> None:
    """K13: a row short."""
    checkpoint, name = checkpoint_of("llama", SHAPES["llama"], "BF16", card), f"{tensor}.weight"
    found = checkpoint.tensors[name]
    short = stored_as("BF16", found, {key: part[:-1] for key, part in found.read().items()})
    with pytest.raises(BytefloorError, match=rf"tensor {name}: .*expected {found.shape[0]} rows"):
        make(step_of(replace(checkpoint, tensors={**checkpoint.tensors, name: short})), PLAN)


@pytest.mark.parametrize("mixture", ["F16", "BF16"])
def test_rows_that_kernels_do_not_divide_are_refused_by_name(make: Make, card: torch.device, mixture: str) -> None:
    """G17: 172 columns. Whoever opens the model takes the reference executor then, and says so; of 168 there are."""
    for width in (172, 168):
        shape = Shape("llama", width, width, 1, 4, 2, 32, 300, 4096, True, {"rope.freq_base": 1e4})
        step, ids = step_of(checkpoint_of("odd", shape, mixture, card)), ids_of(40)
        if width % 8:
            with pytest.raises(UnsupportedError, match=rf"layers\.0\.attention: .* {width} columns"):
                make(step, PLAN)
        else:
            executor = make(step, PLAN)
            assert worst_row(rows_of(executor, ids, 1), reference_rows(step, ids, card)) < TIES
            executor.poison()
            assert worst_row(rows_of(executor, ids, 40), expected_rows(step, ids, 40, card)) < ROWS


@pytest.mark.parametrize("head_size", [72, 528])
def test_a_head_size_without_a_kernel_is_refused_by_name(make: Make, card: torch.device, head_size: int) -> None:
    """R08"""
    shape = Shape("llama", 512, 768, 1, 16, 1, head_size, 512, 4096, True, {"rope.freq_base": 1e4})
    with pytest.raises(UnsupportedError, match=rf"attention: no attention kernel for head size {head_size}"):
        make(step_of(checkpoint_of("odd", shape, "BF16", card)), PLAN)
