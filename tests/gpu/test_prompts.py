"""Prompts in chunks on small random models: every length, any cut, in company; letters and numbers are cases' names.

``make`` and ``card`` come from conftest; with a Python twin in place of every kernel the same tests run on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.prefix import PrefixStore
from bytefloor.engine.row_products import FEW_ROWS
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import CapacityError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from device_prompts import Expected, caches_of, expect, feed, ids_of, largest_of, run_batch, spoil, spoil_pages
from device_rows import Make, assert_same_choice, cache_at, difference, rows_of, settle, step_of, times, worst_row
from gpu.test_device_executor import SHAPES

HALF_MAX = 65504.0
FLOAT32 = 1e-5
"""Of logits, where the same bf16 values are multiplied and only the sums' order differs."""
TILES = 5e-3
"""Of logits of up to FEW_ROWS rows against those of more: other numbers are rounded in tiles of few, 2^-9 each."""
MIXTURES = {"llama": "BF16"}
"""Others have Q4_K_M. Random blocks of it leave this one so sharp a softmax that rounding changes single rows a lot."""
# Columns that do not fill tiles of 64, which formats of 16 bits alone may have: a gate of twelve and a half, heads of
# three and three quarters.
ODD = Shape("llama", 288, 800, 2, 3, 1, 80, 304, 4096, True, {"rope.freq_base": 1e4})


def checkpoint(name: str, card: torch.device, mixture: str | None = None) -> Checkpoint:
    if name == "odd":
        return checkpoint_of(name, ODD, "BF16", card)
    return checkpoint_of(name, SHAPES[name], mixture or MIXTURES.get(name, "Q4_K_M"), card)


# --- one sequence: lengths, chunks, storages


LENGTHS = (*range(26, 34), 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 192, 224, 320, 384)


@pytest.mark.parametrize("name", [*SHAPES, "odd"])
def test_a_prompt_of_every_length_is_right(make: Make, card: torch.device, name: str) -> None:
    """K04, N04, N05: in one chunk and in chunks of 100, over NaN in pages and buffers; then a token on top of it.

    Two runs give the same bits.
    """
    source, ids = checkpoint(name, card), ids_of(max(LENGTHS) + 1)
    executor, expected = make(step_of(source), CachePlan(512, 384)), expect(source, ids, card)
    for n in LENGTHS if card.type == "cuda" else (26, 32, 33, 65, 129):
        for chunk in {n, min(n, 100)}:
            found = []
            for _ in range(2):
                spoil(executor)
                cache = cache_at(executor, 0)
                found.append(rows_of(executor, ids[:n], chunk, cache))
            assert torch.equal(*found), (n, chunk)
            expected.check(found[0])
            # One row goes through the decode graph, which rounds less.
            expected.check(rows_of(executor, ids[n : n + 1], 1, cache), n)


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The builder of tiny models; it needs the transformers that has Gemma 4, before anything of torch is replaced."""
    return pytest.importorskip("tiny", exc_type=ImportError)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-27b", "gemma4-31b"])
def test_prompts_of_tiny_models_are_right(
    tiny: ModuleType, make: Make, card: torch.device, name: str, tmp_path: Path
) -> None:
    """N04, N05: rows of 288; gates of 96 in 62 layers; keys that are values, with two heads and an odd vocabulary."""
    model = tiny.build_tiny(name, tmp_path, torch.bfloat16)
    source, ids = open_checkpoint(model.directory), tiny.prompt_ids(131)
    executor, expected = make(step_of(source), CachePlan(256, 128)), expect(source, ids, card)
    for n, chunk in ((26, 26), (33, 33), (64, 64), (130, 100), (128, 128)):
        spoil(executor)
        cache = cache_at(executor, 0)
        expected.check(rows_of(executor, ids[:n], chunk, cache))
        expected.check(rows_of(executor, ids[n : n + 1], 1, cache), n)


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_no_chunk_size_changes_what_a_prompt_says(make: Make, card: torch.device, name: str) -> None:
    """K04: chunks on either side of every tile; the best tokens stay, and logits are near each other."""
    source, ids = checkpoint(name, card), ids_of(260)
    executor, expected = make(step_of(source), CachePlan(512, 260)), expect(source, ids, card)
    whole = rows_of(executor, ids, 260)
    sizes = (2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    for chunk in sizes if card.type == "cuda" else (7, 33, 129):
        spoil(executor)
        n = min(260, 24 * chunk)
        found = rows_of(executor, ids[:n], chunk)
        expected.check(found)
        assert difference(found, whole[:n]) < expected.most
        assert_same_choice(found.argmax(-1), expected.logits[:n])


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_prompts_over_a_cache_of_codes_are_right(make: Make, card: torch.device, name: str, storage: str) -> None:
    """S12, S13: no further from the reference with the same codes than rounding moves them; tokens on top too."""
    source, ids = checkpoint(name, card), ids_of(203)
    executor = make(step_of(source, replace(DEVICE_ROUNDING, cache=storage)), CachePlan(256, 200))
    expected = expect(source, ids, card, storage)
    for chunk in (200, 65, 33):
        spoil(executor)
        cache = cache_at(executor, 0)
        expected.check(rows_of(executor, ids[:200], chunk, cache))
        expected.check(rows_of(executor, ids[200:], 1, cache), 200)


@pytest.mark.parametrize("window", [4, 64])
def test_a_row_sees_its_window_and_no_key_more(make: Make, card: torch.device, window: int) -> None:
    """S02, N02: one layer, window 4: row 10 has keys 7 to 10, so another token at 6 changes row 9 and not row 10."""
    keys = {"attention.sliding_window": window, "attention.sliding_window_pattern": 3}
    shape = replace(SHAPES["gemma3"], n_layers=1, keys=keys)
    source = checkpoint_of(f"window {window}", shape, "BF16", card)
    step, ids = step_of(source), ids_of(200)
    assert [kind.window for kind in step.kinds] == [window]
    executor, expected = make(step, CachePlan(256, 200)), expect(source, ids, card)
    for changed in (6, 63, 64, 100):
        others = [*ids]
        others[changed] = (ids[changed] + 1) % 300
        for chunk in (200, 3 * window - 1):
            spoil(executor)
            found = rows_of(executor, ids, chunk)
            expected.check(found)
            spoil(executor)
            differs = (rows_of(executor, others, chunk) != found).any(-1).nonzero()[:, 0].tolist()
            assert differs == list(range(changed, changed + window)), (changed, chunk)


# --- several sequences in one batch


def text(n: int, sequence: int) -> list[int]:
    """n tokens of a sequence, its own one by turns with others (S07)."""
    return [token if i % 2 else 20 + sequence for i, token in enumerate(ids_of(n, 100 + sequence))]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "gemma4-e"])
def test_prompts_of_unequal_length_beside_each_other_are_each_alone(make: Make, card: torch.device, name: str) -> None:
    """S06, S07, S08: three prompts and decoding sequences in one batch, from the start and on top of earlier chunks.

    Near what each gets alone; the decoding ones, which go through their own graph, get the same bits.
    """
    source, plan = checkpoint(name, card), CachePlan(256, 256, n_sequences=8)
    executor, lengths = make(step_of(source), plan), (33, 100, 70)
    before, decoding = (0, 37, 90), (5, 64, 130)
    texts = [text(b + n, s) for s, (b, n) in enumerate(zip(before, lengths, strict=True))]
    wholes = [expect(source, ids, card) for ids in texts]
    caches = caches_of(executor, 6)
    for cache, ids, b in zip(caches[:3], texts, before, strict=True):
        if b:
            feed(executor, cache, ids[:b])
    for s, (cache, n) in enumerate(zip(caches[3:], decoding, strict=True)):
        feed(executor, cache, text(n, 3 + s))
    prompts = [(cache, ids[b:]) for cache, ids, b in zip(caches, texts, before, strict=False)]
    singles = [(cache, [40 + s]) for s, cache in enumerate(caches[3:])]
    alone = [run_batch(executor, [row])[0] for row in (*prompts, *singles)]
    # Decoding sequences stand between the prompts.
    order = [0, 3, 1, 4, 2, 5]
    together = run_batch(executor, [(*prompts, *singles)[i] for i in order])
    for i, found in zip(order, together, strict=True):
        if i < len(prompts):
            wholes[i].check(found, before[i])
            assert difference(found, alone[i]) < wholes[i].most
        else:
            assert torch.equal(found, alone[i]), f"decoding sequence {i - 3}"


@pytest.mark.parametrize("n_decoding", [1, 2, 3])
@pytest.mark.parametrize("n_prompts", [1, 2])
def test_a_decoding_row_gets_its_bits_whatever_runs_beside_it(
    make: Make, card: torch.device, n_decoding: int, n_prompts: int
) -> None:
    """S06, P09: by the graph of decoding, with prompts in the batch and without. Prompts do not notice it either."""
    executor = make(step_of(checkpoint("gemma4", card)), CachePlan(256, 128, n_sequences=8))
    caches = caches_of(executor, n_decoding + n_prompts)
    for s, cache in enumerate(caches[:n_decoding]):
        feed(executor, cache, text(50 + 30 * s, s))
    singles = [(cache, [7 + s]) for s, cache in enumerate(caches[:n_decoding])]
    prompts = [(cache, text(40 + s, 9 + s)) for s, cache in enumerate(caches[n_decoding:])]
    alone = [run_batch(executor, [row])[0] for row in singles]
    of_prompts = run_batch(executor, prompts)
    together = run_batch(executor, [*singles, *prompts])
    for s, (found, expected) in enumerate(zip(together, [*alone, *of_prompts], strict=True)):
        assert torch.equal(found, expected), s


def test_nothing_of_one_sequence_is_seen_by_another(make: Make, card: torch.device) -> None:
    """S06, S07: NaN in all pages of one makes its own rows NaN and changes no bit of the others'."""
    executor = make(step_of(checkpoint("gemma4", card)), CachePlan(256, 256, n_sequences=8))
    lengths, caches = (33, 64, 100, 2), caches_of(executor, 4)
    for s, cache in enumerate(caches):
        feed(executor, cache, text(50, s))
    rows = [(cache, text(n, 10 + s)) for s, (cache, n) in enumerate(zip(caches, lengths, strict=True))]
    healthy = run_batch(executor, rows)
    assert all(bool(logits.isfinite().all()) for logits in healthy)
    for ill in (1, 3):
        kept = {name: pool.clone() for name, pool in executor.pools.items()}
        spoil_pages(executor, caches[ill])
        for s, (found, expected) in enumerate(zip(run_batch(executor, rows), healthy, strict=True)):
            if s == ill:
                assert bool(found.isnan().any(-1).all())
            else:
                assert torch.equal(found, expected), s
        for name, pool in executor.pools.items():
            pool.copy_(kept[name])
        settle(card)


@pytest.mark.parametrize("name", ["odd", "gemma4-e"])
def test_a_batch_of_nan_leaves_nothing_behind(make: Make, card: torch.device, name: str) -> None:
    """N04, N06: buffers are shared by batches of all lengths, whose tiles lie elsewhere in them each time.

    Where columns do not fill tiles of 64, what lies behind them must not be left from another batch.
    """
    executor, ids = make(step_of(checkpoint(name, card)), CachePlan(512, 400)), ids_of(400)
    sizes = (400, 20, 250, 60, 100) if card.type == "cuda" else (100, 20, 60)
    healthy = [rows_of(executor, ids[:n], n) for n in sizes]
    for first in sizes:
        ill = cache_at(executor, 0)
        feed(executor, ill, ids[:64])
        spoil_pages(executor, ill)
        assert bool(run_batch(executor, [(ill, ids[:first])])[0].isnan().all())
        for n, expected in zip(sizes, healthy, strict=True):
            assert torch.equal(rows_of(executor, ids[:n], n), expected), (first, n)


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_more_sequences_than_a_graph_holds_go_together(make: Make, card: torch.device, name: str) -> None:
    """S06, X02: 17, 33 and 64 with a row each, and 20 beside a prompt, against each alone by the graph."""
    source, ids = checkpoint(name, card), ids_of(100)
    executor = make(step_of(source), CachePlan(128, 64, n_sequences=64))
    expected, caches = expect(source, ids, card), caches_of(executor, 64)
    # Sequences of every length from 1 to 64, all of one text, which the reference needs to read only once.
    depths = [1 + 37 * s % 64 for s in range(64)]
    for cache, n in zip(caches, depths, strict=True):
        feed(executor, cache, ids[:n])
    rows = [(cache, [ids[n]]) for cache, n in zip(caches, depths, strict=True)]
    references = expected.logits[depths]
    alone = torch.cat([run_batch(executor, [row])[0] for row in rows])
    assert difference(alone, references) < expected.most
    for n in (17, 33, 64):
        found = torch.cat(run_batch(executor, rows[:n]))
        assert worst_row(found, references[:n]) < expected.most_a_row
        assert difference(found, alone[:n]) < expected.most
        assert_same_choice(found.argmax(-1), alone[:n])
    n_longer = 30
    longest = max(range(21, 64), key=lambda s: depths[s])
    prompt = (caches[longest], ids[depths[longest] : depths[longest] + n_longer])
    *singles, tail = run_batch(executor, [*rows[:20], prompt])
    assert difference(torch.cat(singles), alone[:20]) < expected.most
    expected.check(tail, depths[longest])


# --- residuals beyond float16


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_residual_beyond_float16_stays_right(make: Make, card: torch.device, name: str) -> None:
    """N01: prompts in one chunk and in several, decoded on top."""
    source, ids = times(checkpoint(name, card, "BF16"), {"blk.1.post_ffw_norm.weight": 5e4}), ids_of(130)
    step = step_of(source)
    assert largest_of(step, ids, card, "add") > 2 * HALF_MAX
    executor, expected = make(step, CachePlan(256, 128)), expect(source, ids, card)
    for chunk in (128, 50):
        spoil(executor)
        cache = cache_at(executor, 0)
        expected.check(rows_of(executor, ids[:128], chunk, cache))
        expected.check(rows_of(executor, ids[128:], 1, cache), 128)


def test_inputs_of_down_beyond_float16_stay_right(make: Make, card: torch.device) -> None:
    """K02: on either side of every number of rows where another kernel takes over."""
    source = times(checkpoint("llama", card), {"blk.1.ffn_up.weight": 5e5, "blk.1.ffn_down.weight": 2e-6})
    step, ids = step_of(source), ids_of(260)
    assert largest_of(step, ids, card, "glu") > 1e5
    executor, expected = make(step, CachePlan(512, 260)), expect(source, ids, card)
    for n in (31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257) if card.type == "cuda" else (32, 33):
        spoil(executor)
        expected.check(rows_of(executor, ids[:n], n))


# --- which rows want logits, and how many rows there may be


WANTED: Sequence[Sequence[int]] = (
    [], [99], [0], [3, 40, 41, 99], [*range(0, 100, 3)], [*range(32)], [*range(33)], [*range(35, 100)], [*range(100)],
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_logits_of_the_wanted_rows_alone(make: Make, card: torch.device, name: str) -> None:
    """Any of them, in order, as when all are wanted; none gives [0, V] and fills the pages all the same."""
    source, ids = checkpoint(name, card), ids_of(150)
    executor, n_vocabulary = make(step_of(source), CachePlan(256, 100)), SHAPES[name].vocabulary
    everything = rows_of(executor, ids[:100], 100)
    for wanted in WANTED:
        spoil(executor)
        (found,) = run_batch(executor, [(cache_at(executor, 0), ids[:100])], wanted)
        assert found.shape == (len(wanted), n_vocabulary)
        bound = FLOAT32 if name in MIXTURES or len(wanted) > FEW_ROWS else TILES
        assert not wanted or worst_row(found, everything[list(wanted)]) < bound
    spoil(executor)
    after = rows_of(executor, ids, 100)[100:]
    # Three chunks that nobody waits for, one upon the other.
    for chunk in (100, 40):
        spoil(executor)
        cache = cache_at(executor, 0)
        feed(executor, cache, ids[:100], chunk)
        found = rows_of(executor, ids[100:], 50, cache)
        if chunk == 100:
            assert torch.equal(found, after)
        assert difference(found, after) < expect(source, ids, card).most


def test_sequences_of_a_batch_want_what_they_want(make: Make, card: torch.device) -> None:
    executor = make(step_of(checkpoint("gemma4", card)), CachePlan(256, 128, n_sequences=4))
    caches, batch = caches_of(executor, 3), Batch()
    rows = [(cache, text(n, s)) for s, (cache, n) in enumerate(zip(caches, (40, 3, 60), strict=True))]
    everything = run_batch(executor, rows)
    wanted: Sequence[Sequence[int]] = ([39], [], [0, 59])
    for (cache, ids), chosen in zip(rows, wanted, strict=True):
        cache.append_rows(batch, ids, chosen)
    expected = torch.cat([logits[list(chosen)] for logits, chosen in zip(everything, wanted, strict=True)])
    assert worst_row(executor.run(batch), expected) < TILES


def test_more_rows_than_a_chunk_has_are_refused_with_both_numbers(make: Make, card: torch.device) -> None:
    """Of one sequence, and of two together; the executor goes on."""
    executor, ids = make(step_of(checkpoint("llama", card)), CachePlan(256, 64, n_sequences=4)), ids_of(65)
    first, second = caches_of(executor, 2)
    expected = run_batch(executor, [(first, ids[:64])])[0]
    with pytest.raises(CapacityError, match=r"65 rows.* 64"):
        run_batch(executor, [(first, ids)])
    with pytest.raises(CapacityError, match=r"80 rows.* 64"):
        run_batch(executor, [(first, ids[:40]), (second, ids[:40])])
    assert torch.equal(run_batch(executor, [(first, ids[:64])])[0], expected)
    windowed = make(step_of(checkpoint("gemma3", card)), CachePlan(256, 64))
    with pytest.raises(CapacityError, match=r"65 rows.* 64"):
        run_batch(windowed, [(cache_at(windowed, 0), ids)])


# --- prefixes that several sequences share


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_a_prompt_on_top_of_shared_pages_is_the_whole(make: Make, card: torch.device, name: str, storage: str) -> None:
    """S04, S11: a fork within a page, whose source goes on otherwise first: the same bits in the same chunks."""
    source, ids = checkpoint(name, card), ids_of(230)
    plan = CachePlan(256, 100, n_sequences=4)
    executor = make(step_of(source, replace(DEVICE_ROUNDING, cache=storage)), plan)
    expected = expect(source, ids, card, storage)
    (cache,) = caches_of(executor, 1)
    whole = rows_of(executor, ids, 100, cache)
    expected.check(whole)
    cache.free()
    spoil(executor)
    first = rows_of(executor, ids[:100], 100, cache)
    twin = cache.fork()
    others = rows_of(executor, ids_of(90, seed=7), 90, cache)
    found = torch.cat([first, rows_of(executor, ids[100:], 100, twin)])
    assert torch.equal(found, whole)
    assert difference(others, whole[100:190]) > 0.1
    # Both of them at once, in one batch, write beside the pages that they share.
    cache.free()
    twin.free()
    spoil(executor)
    feed(executor, cache, ids[:100])
    twin = cache.fork()
    expected.check(run_batch(executor, [(cache, ids_of(20, seed=7)), (twin, ids[100:170])])[1], 100)


def test_a_stored_prefix_saves_its_rows_and_no_more(make: Make, card: torch.device) -> None:
    """S04, S11: rewound to where texts part, not at the end of a page; near a cold run in one pass."""
    source, ids = checkpoint("llama", card), ids_of(200)
    executor, store = make(step_of(source), CachePlan(256, 200, n_sequences=3)), PrefixStore(2)
    expected, (cache,) = expect(source, ids, card), caches_of(executor, 1)
    feed(executor, cache, [*ids[:90], *ids_of(60, seed=8)])
    store.put([*ids[:90], *ids_of(60, seed=8)], cache)
    twin = store.find(ids)
    assert twin is not None
    assert twin.length == 90
    expected.check(rows_of(executor, ids[90:], 110, twin), 90)


def check_greedy(found: Tensor, expected: Expected, first: int) -> None:
    assert_same_choice(found.argmax(-1), expected.logits[first : first + len(found)])


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "gemma4-e"])
def test_decoding_goes_on_where_a_prompt_ended(make: Make, card: torch.device, name: str) -> None:
    """X01: forty rows by the graph after each of several prompts, teacher-forced; best tokens where they are clear."""
    source, ids = checkpoint(name, card), ids_of(170)
    executor, expected = make(step_of(source), CachePlan(256, 128)), expect(source, ids, card)
    for n, chunk in ((30, 30), (64, 64), (130, 100)):
        spoil(executor)
        cache = cache_at(executor, 0)
        feed(executor, cache, ids[:n], chunk)
        found = rows_of(executor, ids[n : n + 40], 1, cache)
        expected.check(found, n)
        check_greedy(found, expected, n)
