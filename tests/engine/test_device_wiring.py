"""The device executor with a Python twin in place of every kernel: what it launches, on what, in which order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.kernels import SOURCES
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.planner import Launch
from bytefloor.engine.row_planner import RowPlanner
from bytefloor.engine.row_products import RowProduct
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.errors import CapacityError, FileError, UnsupportedError
from bytefloor.files.stored import Checkpoint, StoredTensor
from bytefloor.formats import get
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from kernel_twins import TwinDevice
from rows_reference import expected_rows

SHAPES = {
    "llama": Shape("llama", 256, 512, 2, 8, 2, 64, 272, 4096, False, {"rope.freq_base": 1e4}),
    "qwen3": Shape("qwen3", 256, 512, 2, 4, 2, 64, 272, 4096, True, {"rope.freq_base": 1e6}),
    "gemma3": Shape(
        "gemma3", 256, 512, 3, 4, 1, 64, 272, 4096, True,
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": 3},
    ),
    "gemma4": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 1, 128,
    ),
    "gemma4-e": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
    ),
}  # fmt: skip
IDS = torch.randint(0, 270, (70,), generator=torch.Generator().manual_seed(1)).tolist()
TIES = 1e-2
"""What keys and values at the border of two bf16 values may do to logits, and activations of prompts beside them."""
CODE_TIES = 2e-2
"""The same of two codes of eight bits."""
Make = Callable[..., DeviceExecutor]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make_executor(step: Step, banned: frozenset[int] = frozenset()) -> DeviceExecutor:
        executor = DeviceExecutor(step, CachePlan(128, 100), device="cpu", banned_ids=banned)
        twins.know(executor)
        executor.poison()
        return executor

    return make_executor


@pytest.fixture(params=list(SHAPES))
def step(request: pytest.FixtureRequest) -> Step:
    model = load_model(checkpoint_of(request.param, SHAPES[request.param], "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, DEVICE_ROUNDING)


def rows_of(executor: DeviceExecutor, ids: list[int], chunk: int) -> Tensor:
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    found = []
    for start in range(0, len(ids), chunk):
        rows, batch = ids[start : start + chunk], Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        found.append(executor.run(batch))
        cache.commit(len(rows))
    return torch.cat(found)


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def check_chunks(executor: DeviceExecutor, ids: list[int], chunks: tuple[int, ...], bound: float) -> None:
    """Row by row and as prompts of so many rows, over NaN, against the reference that rounds as each road does."""
    for chunk in chunks:
        executor.poison()
        expected = expected_rows(executor.step, ids, chunk)
        assert difference(rows_of(executor, ids, chunk), expected) < bound, chunk


def test_rows_one_by_one_and_prompts_equal_the_reference_that_rounds_alike(make: Make, step: Step) -> None:
    """In one chunk and in several, the last of them a single row by the graph: one layout of pages."""
    check_chunks(make(step), IDS, (1, 23, 70), TIES)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("family", list(SHAPES))
def test_caches_of_codes_equal_the_reference_that_rounds_alike(make: Make, family: str, storage: str) -> None:
    """Rows by the graph, rows as a prompt, and both by turns."""
    model = load_model(checkpoint_of(family, SHAPES[family], "Q4_K_M", "cpu"))
    step = build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache=storage))
    executor = make(step)
    assert {pool.dtype for pool in executor.pools.values()} == {torch.uint8}
    assert executor.cache_bytes() == sum(pool.nbytes for pool in executor.pools.values())
    check_chunks(executor, IDS, (1, 23, 70), CODE_TIES)


def test_a_cache_that_no_kernel_reads_is_refused(make: Make) -> None:
    model = load_model(checkpoint_of("llama", SHAPES["llama"], "Q4_K_M", "cpu"))
    with pytest.raises(UnsupportedError, match=r"cache of one of bf16, int8, fp8; .*float32"):
        make(build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache="float32")))


def test_per_layer_inputs_may_be_narrower_than_a_record(make: Make) -> None:
    shape = replace(SHAPES["gemma4-e"], per_layer_width=32)
    model = load_model(checkpoint_of("gemma4-e", shape, "BF16", "cpu"))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    check_chunks(make(step), IDS, (1, 70), TIES)


def test_tokens_fed_back_equal_those_of_the_host_and_none_is_banned(make: Make, step: Step) -> None:
    best = int(rows_of(make(step), [5], 1)[0].argmax())
    executor = make(step, frozenset({best}))
    cache = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds))
    batch = Batch()
    cache.append_rows(batch, [5], [0], n_reserved=60)
    fed_back = executor.decode_greedy(batch, 50).tolist()
    banned = torch.arange(step.logits.shape[-1]) == best
    token, by_host = 5, []
    again = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds))
    for _ in range(50):
        batch = Batch()
        again.append_rows(batch, [token], [0])
        token = int(executor.run(batch)[0].masked_fill(banned, float("-inf")).argmax())
        by_host.append(token)
        again.commit(1)
    assert fed_back == by_host


def test_a_forked_sequence_writes_into_its_own_page(make: Make, step: Step) -> None:
    executor = make(step)

    def decode(owner: SequenceCache, token: int) -> Tensor:
        batch = Batch()
        owner.append_rows(batch, [token], [0])
        logits = executor.run(batch)[0]
        owner.commit(1)
        return logits

    def after_prompt() -> SequenceCache:
        cache = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds))
        batch = Batch()
        cache.append_rows(batch, IDS[:20], [])
        executor.run(batch)
        cache.commit(20)
        return cache

    unforked = after_prompt()
    expected = [decode(unforked, token) for token in (7, 8)]
    executor.poison()
    cache = after_prompt()
    twin = cache.fork()
    assert torch.equal(decode(cache, 7), expected[0])
    assert torch.equal(decode(cache, 8), expected[1])
    assert torch.equal(decode(twin, 7), expected[0])


@pytest.mark.parametrize("is_eager", [False, True])
def test_logits_come_in_the_order_in_which_rows_are_wanted(make: Make, step: Step, is_eager: bool) -> None:
    executor, rows = make(step), list(range(40))

    def run(wanted: list[int]) -> Tensor:
        cache, batch = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds)), Batch()
        cache.append_rows(batch, IDS[:40], wanted)
        return executor.run(batch, is_eager=is_eager)

    everything = run(rows)
    assert difference(run([39, 0, 17, 0]), everything[[39, 0, 17, 0]]) < 1e-5


def test_more_pieces_than_attention_has_blocks_for_are_refused(make: Make) -> None:
    """Rows of one sequence with gaps between their slots, each of which is an item of its own."""
    model = load_model(checkpoint_of("llama", SHAPES["llama"], "Q4_K_M", "cpu"))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    executor, slots = make(step), [0, 2, 4, 6]
    cache, batch = SequenceCache(executor.plan, step.kinds, make_pools(executor.plan, step.kinds)), Batch()
    cache.show(batch, 7)
    batch.tokens, batch.positions, batch.slots, batch.sequence = slots, slots, slots, [0] * 4
    with pytest.raises(CapacityError, match="4 rows in 4 pieces of consecutive slots: there is room for 2"):
        executor.run(batch)


def test_launches_pass_as_many_arguments_as_kernels_take(make: Make, step: Step) -> None:
    """Those of a token, and those of a chunk of every padding with its head."""
    executor = make(step)
    rows = executor._prompts._planner
    walks = [rows.walk(pitch) for pitch in rows.paddings]
    chunks = [[*walk.trunk, *walk.head(32).launches] for walk in walks]
    launches = [*executor.launches, *(each for chunk in chunks for each in chunk if isinstance(each, Launch))]
    assert {launch.kernel.name for launch in launches} >= {"product", "product_rows", "norm_rows", "attention_rows"}
    for launch in launches:
        source = (SOURCES / f"{launch.kernel.name}.cu").read_text()
        signature = re.search(rf"{launch.kernel.name}\(([^)]*)\) {{", source[source.index('extern "C"') :], re.S)
        assert signature is not None, launch.kernel.name
        assert len(launch.arguments) == len(signature[1].split(",")), launch.kernel.name


def test_models_without_kernels_are_refused(make: Make, step: Step) -> None:
    odd = replace(step, calls=tuple(call for call in step.calls if call.op.name != "add"))
    with pytest.raises(UnsupportedError, match="where the one-row list expects"):
        make(odd)


def converted(checkpoint: Checkpoint, encode: Callable[[StoredTensor], tuple[str, dict[str, Tensor]]]) -> Checkpoint:
    """Every matrix in another format: ``encode`` gives its name and the parts."""

    def convert(tensor: StoredTensor) -> StoredTensor:
        name, parts = encode(tensor)
        n_bytes = sum(part.nbytes for part in parts.values())
        return StoredTensor(tensor.name, tensor.shape, name, get(name), n_bytes, lambda: parts)

    tensors = {name: convert(t) if len(t.shape) == 2 else t for name, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def by_own_encoder(name: str, tensor: StoredTensor) -> tuple[str, dict[str, Tensor]]:
    encode = get(name).encode
    assert encode is not None
    return name, encode(tensor.decode())


def as_affine(tensor: StoredTensor) -> tuple[str, dict[str, Tensor]]:
    """As MLX stores it, those of the MLP with more bits than the others."""
    return by_own_encoder("affine-8b-g32" if "ffn" in tensor.name else "affine-4b-g64", tensor)


def as_fp4(tensor: StoredTensor) -> tuple[str, dict[str, Tensor]]:
    """FP4 in groups of 128, and NVFP4 in the MLP: a scale of the whole tensor, another for gate than for up."""
    if "ffn" not in tensor.name:
        return by_own_encoder("FP4-E2M1-g128", tensor)
    (n, k), generator = tensor.shape, torch.Generator().manual_seed(len(tensor.name))
    return "NVFP4-modelopt", {
        "weight": torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8),
        "weight_scale": torch.randint(32, 64, (n, k // 16), generator=generator, dtype=torch.uint8),
        "weight_scale_2": torch.tensor(0.01 if "gate" in tensor.name else 0.02),
    }


def as_fp8(tensor: StoredTensor) -> tuple[str, dict[str, Tensor]]:
    """One scale a tensor, and tiles of 128 x 128 in the MLP, the last of which a matrix may cut."""
    is_mlp, (n, k) = "ffn" in tensor.name, tensor.shape
    name = "FP8-E4M3-128x128" if is_mlp else "FP8-E4M3-tensor"
    codes = (tensor.decode() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.full((-(-n // 128), -(-k // 128)), 0.01) if is_mlp else torch.tensor(0.01)
    return name, dict(zip(get(name).parts, (codes, scales), strict=True))


def with_formats(checkpoint: Checkpoint, other: Checkpoint, word: str) -> Checkpoint:
    """Tensors with a word in their names from the other checkpoint."""
    return replace(checkpoint, tensors={n: other.tensors[n] if word in n else t for n, t in checkpoint.tensors.items()})


def test_layers_of_one_kind_may_have_different_numbers_of_query_heads(make: Make) -> None:
    """What they keep is alike, so they share pages; what attends over them is not."""
    shape = SHAPES["llama"]
    eight, four = (checkpoint_of("llama", replace(shape, n_heads=n), "Q4_K_M", "cpu") for n in (8, 4))
    mixed = with_formats(eight, four, "blk.1.")
    model = load_model(replace(mixed, metadata={**mixed.metadata, "llama.attention.head_count": [8, 4]}))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    assert len(step.kinds) == 1
    check_chunks(make(step), IDS, (1, 70), TIES)


@pytest.mark.parametrize(("word", "n_launches"), [("attn_v", 2), ("attn_k", 3), ("attn_q", 2)])
def test_q_k_and_v_may_have_records_of_different_widths(make: Make, word: str, n_launches: int) -> None:
    shape = SHAPES["gemma3"]
    ours, others = (checkpoint_of("gemma3", shape, kind, "cpu") for kind in ("Q4_K", "BF16"))
    model = load_model(with_formats(ours, others, word))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    executor = make(step)
    parts = [launch.part for launch in executor.launches if launch.kernel.name == "product"]
    assert parts.count(parts[0]) == n_launches + 1, "and one for o"
    check_chunks(executor, IDS, (1, 70), TIES)


@pytest.mark.parametrize(
    ("encode", "forms"),
    [(as_affine, {"Affine<4", "Affine<8"}), (as_fp4, {"FP4_g128<4", "NVFP4_pairs<4"}), (as_fp8, {"FP8<2"})],
)
def test_other_formats_run_like_any_others(
    make: Make, encode: Callable[[StoredTensor], tuple[str, dict[str, Tensor]]], forms: set[str]
) -> None:
    model = load_model(converted(checkpoint_of("llama", SHAPES["llama"], "BF16", "cpu"), encode))
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    executor = make(step)
    products = [str(launch.kernel.defines) for launch in executor.launches if launch.kernel.name == "product"]
    assert {form for text in products for form in re.findall(r"\w+<\d", text)} == forms
    check_chunks(executor, IDS, (1, 70), TIES)


@pytest.mark.parametrize(
    ("name", "part", "at"), [("blk.0.ffn_up.weight", "blocks", (0, 1)), ("blk.1.ffn_norm.weight", "values", (0,))]
)
def test_a_value_that_is_not_finite_is_refused_with_its_tensors_name(
    make: Make, name: str, part: str, at: tuple[int, ...]
) -> None:
    """N06: also the second matrix of a pair that is packed as one, and vectors."""
    checkpoint = checkpoint_of("llama", SHAPES["llama"], "Q4_K_M", "cpu")
    found = checkpoint.tensors[name]

    def read() -> dict[str, Tensor]:
        parts = {key: value.clone() for key, value in found.read().items()}
        parts[part][at] = 0x7E if part == "blocks" else torch.nan  # the high byte of a fp16 scale
        return parts

    broken = replace(checkpoint, tensors={**checkpoint.tensors, name: replace(found, read=read)})
    model = load_model(broken)
    with pytest.raises(FileError, match=rf"{name}.*(not finite|NaN)"):
        make(build_step(model.config, model.weights, DEVICE_ROUNDING))


def test_every_kernel_of_any_chunk_is_compiled_at_the_start(make: Make, step: Step) -> None:
    """Those of more rows than the largest tile too, which are looked at for none of their own."""
    executor = make(step)
    whole = RowPlanner(
        executor._prompts._planner.fused, executor.weights, CachePlan(1024, 800), executor.pools, 800,
        torch.device("cpu"),
    )  # fmt: skip
    assert whole.paddings[-1] == 1024
    used = {
        launch.kernel
        for pitch in whole.paddings
        for launch in [*whole.walk(pitch).trunk, *whole.walk(pitch).head(pitch).launches]
        if isinstance(launch, Launch)
    }
    assert used == set(whole.specs())


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("family", list(SHAPES))
def test_outputs_go_straight_into_the_residual_where_no_norm_stands_between(
    make: Make, family: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And K is whole: parts of it come from blocks that nobody puts in order."""
    monkeypatch.setattr(RowProduct, "splits", lambda *_: 1 if is_whole else 2)
    model = load_model(checkpoint_of(family, SHAPES[family], "Q4_K_M", "cpu"))
    executor = make(build_step(model.config, model.weights, DEVICE_ROUNDING))
    walk = executor._prompts._planner.walk(128)
    products = [each for each in walk.trunk if isinstance(each, Launch) and each.kernel.name == "product_rows"]
    adding = [launch for launch in products if launch.arguments[-1]]
    assert len(adding) == (2 * SHAPES[family].n_layers if is_whole and family in ("llama", "qwen3") else 0)
    if is_whole:
        check_chunks(executor, IDS, (23, 70), TIES)
