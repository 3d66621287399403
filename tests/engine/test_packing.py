"""Packing chunk by chunk: the bytes of packing whole, errors that name tensor and row, memory within the plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from bytefloor.engine import packed as packed_module
from bytefloor.engine import staging as staging_module
from bytefloor.engine.packed import PackedWeights, chunks_of
from bytefloor.engine.progress import LOADING, Silent
from bytefloor.engine.staging import STAGING_BYTES, Staging
from bytefloor.errors import FileError, ShapeError, UnsupportedError
from bytefloor.files.stored import StoredTensor
from bytefloor.formats import get, stream
from bytefloor.formats.finite import finite_rows
from bytefloor.model.fuse import FusedProduct
from bytefloor.model.step import Buffer, StepBuilder
from bytefloor.model.weights import Weight
from live_bytes import LiveBytes

FORMATS = ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")
K = 512
CPU = torch.device("cpu")


def random_parts(name: str, n: int, seed: int, k: int = K) -> dict[str, Tensor]:
    """Any bytes whose fp16 scales are finite."""
    generator = torch.Generator().manual_seed(seed)
    record = get(name)
    if record.block_bytes is None:
        values = torch.randn(n, k, generator=generator)
        return {"values": values.to(torch.bfloat16 if name == "BF16" else torch.float16)}
    blocks = torch.randint(0, 256, (n, k // record.block, record.block_bytes), generator=generator, dtype=torch.uint8)
    for offset in {"Q6_K": (208,)}.get(name, (0, 2)):
        blocks[..., offset + 1] &= 0x3F
    return {"blocks": blocks.flatten(1)}


def make_weight(name: str, n: int, seed: int) -> Weight:
    parts = random_parts(name, n, seed)
    n_bytes = sum(part.nbytes for part in parts.values())
    return Weight(f"w{seed}", StoredTensor(f"tensor.{seed}", (n, K), name, get(name), n_bytes, lambda: parts))


def packed_weights(*groups: Sequence[Weight]) -> PackedWeights:
    """Each group a product, those of two a gate and an up."""
    builder = StepBuilder((), {})
    x, fused = Buffer(99, "x", ("T", K)), []
    for group in groups:
        outputs = [builder.linear(x, weight) for weight in group]
        calls = tuple(builder.calls[-len(group) :])
        if len(group) == 2:
            builder.glu(outputs[0], outputs[1], "silu")
        glu = builder.calls[-1] if len(group) == 2 else None
        fused.append(FusedProduct("part", calls, None, False, None, None, glu, calls))
    return PackedWeights(fused, CPU)


def whole(name: str, group: Sequence[Weight]) -> Tensor:
    """All rows at once: by turns, zeros up to a whole tile."""
    parts = {}
    for key in group[0].stored.read():
        rows = torch.stack([weight.stored.read()[key] for weight in group], dim=1).flatten(0, 1)
        padded = rows.new_zeros(-(-rows.shape[0] // 16) * 16, rows.shape[1])
        padded[: rows.shape[0]] = rows
        parts[key] = padded
    n = next(iter(parts.values())).shape[0]
    return stream.choose(name, n, K).pack(parts).flatten()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n_rows", [16, 32, 43, 72])
@pytest.mark.parametrize("n_members", [1, 2])
@pytest.mark.parametrize("rows_a_chunk", [16, 32, 1000])
def test_chunks_give_the_bytes_of_the_whole(
    name: str, n_rows: int, n_members: int, rows_a_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "CHUNK_WEIGHTS", rows_a_chunk * K * n_members)
    group = [make_weight(name, n_rows, seed) for seed in range(n_members)]
    weights = packed_weights(group)
    weights.allocate()
    weights.packed(group[0]).fill_(0xA5)
    told: list[tuple[str, int, int]] = []
    progress = Silent()
    monkeypatch.setattr(progress, "advance", lambda *step: told.append(step))
    weights.pack(progress)
    assert torch.equal(weights.packed(group[0]), whole(name, group))
    n_bytes = sum(weight.n_bytes for weight in group)
    assert len(told) == -(-n_rows // rows_a_chunk)
    assert told[-1] == (LOADING, n_bytes, n_bytes)


def test_chunks_are_whole_tiles_that_fit_a_staging_buffer() -> None:
    """Rows of a 12B model's head in 16 bits, and of a pair."""
    for n, k, n_members in ((262144, 3840, 1), (15360, 3840, 2), (37, 64, 1)):
        stored = StoredTensor("t", (n, k), "BF16", get("BF16"), 2 * n * k, dict)
        group = [Weight(str(i), stored) for i in range(n_members)]
        chunks = list(chunks_of(group))
        assert [first for first, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])]
        assert chunks[-1][1] == n
        assert all(first % 16 == 0 for first, _ in chunks)
        largest = max(stop - first for first, stop in chunks) * n_members * k * 2
        assert 0.9 * min(STAGING_BYTES, n_members * 2 * n * k) < largest <= STAGING_BYTES


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("member", "row"), [(0, 0), (1, 15), (1, 16), (0, 42)])
def test_a_bad_value_in_any_chunk_names_tensor_and_row(
    name: str, member: int, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "CHUNK_WEIGHTS", 16 * K * 2)
    group = [make_weight(name, 43, seed) for seed in range(2)]
    before = make_weight(name, 43, 7)
    spoil(name, group[member].stored.read(), row)
    weights = packed_weights([before], group)
    weights.allocate()
    with pytest.raises(FileError, match=rf"tensor\.{member} holds values that are not finite, the first in row {row}$"):
        weights.pack(Silent())


def spoil(name: str, parts: dict[str, Tensor], row: int, offset: int | None = None) -> None:
    """A NaN in the last column or block of a row."""
    if "values" in parts:
        parts["values"][row, -1] = torch.nan
        return
    n_bytes = get(name).block_bytes
    assert n_bytes is not None
    place = {"Q6_K": 208}.get(name, 0) if offset is None else offset
    parts["blocks"][row, -n_bytes + place + 1] = 0x7E


@pytest.mark.parametrize(
    ("name", "offset"),
    [*((name, None) for name in FORMATS), *((name, 2) for name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1"))],
)
@pytest.mark.parametrize("is_bad", [False, True])
def test_rows_are_finite_exactly_where_decoding_says_so(name: str, offset: int | None, is_bad: bool) -> None:
    """Any bytes with finite scales, the largest among them, and one scale that is NaN."""
    parts = random_parts(name, 5, 3)
    record = get(name)
    if record.block_bytes is not None:
        for at in {"Q6_K": (208,)}.get(name, (0, 2) if name in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else (0,)):
            parts["blocks"][1, at : at + 2] = torch.tensor([0xFF, 0x7B], dtype=torch.uint8)  # 65504
    if is_bad:
        spoil(name, parts, 3, offset)
    decoded = []
    for row in range(5):
        try:
            decoded.append(bool(torch.isfinite(record.decode({k: v[row : row + 1] for k, v in parts.items()})).all()))
        except FileError:
            decoded.append(False)
    assert decoded == [True, True, True, not is_bad, True]
    assert finite_rows(record, parts).tolist() == decoded


def test_formats_whose_scales_are_not_known_by_place_are_decoded() -> None:
    record = get("FP4-E2M1-g128")
    parts = {"weight": torch.zeros(4, 64, dtype=torch.uint8), "weight_scale": torch.ones(4, 1)}
    assert finite_rows(record, parts).tolist() == [True] * 4
    parts["weight_scale"][2] = torch.nan
    with pytest.raises(FileError, match="NaN or infinite at row 2"):
        finite_rows(record, parts)


def test_bytes_of_fp8_that_mean_nan_and_scales_that_are_not_finite_are_seen() -> None:
    codes = torch.arange(4 * 64).remainder(0x70).to(torch.uint8).view(4, 64)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.ones(4, 1)}
    assert finite_rows(get("FP8-E4M3-row"), parts).tolist() == [True] * 4
    codes[2, 5], parts["weight_scale"][0] = 0xFF, torch.inf
    assert finite_rows(get("FP8-E4M3-row"), parts).tolist() == [False, True, False, True]


def test_parts_that_have_no_row_for_each_row_are_refused() -> None:
    parts = {"values": torch.zeros(15, K, dtype=torch.bfloat16)}
    weights = packed_weights([Weight("w", StoredTensor("t", (16, K), "BF16", get("BF16"), 0, lambda: parts))])
    weights.allocate()
    with pytest.raises(ShapeError, match=r"tensor t: part values has shape \[15, 512\], expected 16 rows"):
        weights.pack(Silent())


def weight_of(name: str, seed: int, n: int, parts: dict[str, Tensor]) -> Weight:
    n_bytes = sum(part.nbytes for part in parts.values())
    return Weight(f"w{seed}", StoredTensor(f"tensor.{seed}", (n, K), name, get(name), n_bytes, lambda: parts))


def pack_all(*group: Weight) -> Tensor:
    weights = packed_weights(group)
    weights.allocate()
    weights.pack(Silent())
    return weights.packed(group[0])


def nvfp4_parts(seed: int, scale: float | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (32, K // 64, 36), generator=generator, dtype=torch.uint8)
    blocks[..., :4] &= 0x3F
    return {"blocks": blocks.flatten(1)} | ({} if scale is None else {"scale": torch.tensor([scale])})


@pytest.mark.parametrize("scales", [(None, 3.0), (3.0, None)])
def test_a_scale_that_only_one_of_gate_and_up_has_is_kept(scales: tuple[float | None, float | None]) -> None:
    found = pack_all(*(weight_of("NVFP4", i, 32, nvfp4_parts(i, scale)) for i, scale in enumerate(scales)))
    spelled = [1.0 if scale is None else scale for scale in scales]
    assert torch.equal(found, pack_all(*(weight_of("NVFP4", i, 32, nvfp4_parts(i, s)) for i, s in enumerate(spelled))))
    assert not torch.equal(found, pack_all(*(weight_of("NVFP4", i, 32, nvfp4_parts(i, None)) for i in range(2))))


@pytest.mark.parametrize("shapes", [((32,), (32, 1)), ((32, 1), (1,)), ((1,), ())])
def test_scales_of_gate_and_up_may_have_different_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    codes = torch.arange(32 * K, dtype=torch.int32).remainder(127).to(torch.uint8).view(32, K).view(torch.float8_e4m3fn)
    name = "FP8-E4M3-row"

    def packed(shapes: Sequence[tuple[int, ...]]) -> Tensor:
        parts = ({"weight": codes, "weight_scale": torch.full(shape, 0.5 + i)} for i, shape in enumerate(shapes))
        return pack_all(*(weight_of(name, i, 32, part) for i, part in enumerate(parts)))

    assert torch.equal(packed(shapes), packed(((32, 1), (32, 1))))


def test_rows_that_pad_are_zeros_where_a_divisor_scales() -> None:
    parts = {
        "weight_packed": torch.full((20, K // 2), 0x11, dtype=torch.uint8),
        "weight_scale": torch.ones(20, K // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
    }
    packed = pack_all(weight_of("NVFP4-compressed-tensors", 0, 20, parts))
    form = stream.choose("NVFP4-compressed-tensors", 32, K)
    multipliers = packed.view(32 // 16, K // form.columns, -1)[..., -64:].view(torch.float32).view(2, -1, 16)
    assert multipliers[0].unique().tolist() == [0.25]
    rows = multipliers[1].unique(dim=0)
    assert rows.shape == (1, 16)
    assert sorted(rows[0].tolist()) == [0.0] * 12 + [0.25] * 4


def test_gate_and_up_of_different_formats_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"w0: gate and up have different formats: Q4_0, Q4_1"):
        packed_weights([make_weight("Q4_0", 32, 0), make_weight("Q4_1", 32, 1)])


def test_affine_scales_and_biases_of_different_types_are_refused() -> None:
    parts = {
        "weight": torch.zeros(32, K // 8, dtype=torch.uint32),
        "scales": torch.ones(32, K // 64, dtype=torch.bfloat16),
        "biases": torch.ones(32, K // 64, dtype=torch.float16),
    }
    with pytest.raises(UnsupportedError, match=r"tensor tensor.0: scales and biases of different types"):
        packed_weights([weight_of("affine-4b-g64", 0, 32, parts)])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n_members", [1, 2])
def test_packing_takes_no_more_than_it_says(name: str, n_members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "CHUNK_WEIGHTS", 256 * K * n_members)
    weights = packed_weights([make_weight(name, 1000 + 43, seed) for seed in range(n_members)])
    weights.allocate()
    with LiveBytes() as live:
        weights.pack(Silent())
    assert 0.25 * weights.packing_bytes() < live.most <= weights.packing_bytes()


class Queue:
    """A stream or an event that writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    wait_event = wait_stream

    def record(self, stream: Queue) -> None:
        self.log.append(f"{stream.name} records {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    names = iter(("sent 0", "used 0", "sent 1", "used 1"))
    work, copies = Queue("work", found), Queue("copies", found)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Queue(next(names), found))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: work)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(staging_module, "STAGING_BYTES", 1 << 12)
    return found


def test_staged_tensors_arrive_and_each_queue_waits_for_the_others(log: list[str]) -> None:
    staging = Staging(CPU)
    for turn in range(4):
        sent = [torch.arange(37, dtype=torch.uint8) + turn, torch.full((3, 5), turn + 0.5, dtype=torch.bfloat16)]
        with staging.on_device(sent) as there:
            log.append("work")
            assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(there, sent, strict=True))
    rounds = [
        [
            f"host waits for sent {slot}",
            f"copies waits for used {slot}",
            f"copies records sent {slot}",
            f"work waits for sent {slot}",
            "work",
            f"work records used {slot}",
        ]
        for slot in (0, 1, 0, 1)
    ]
    assert log == ["copies waits for work", *(line for lines in rounds for line in lines)]
