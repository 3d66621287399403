"""Synthetic checkpoints: real shapes, the mixtures that files have, and one value for every read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bytefloor.engine import synthetic
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.synthetic import SHAPES, Shape, checkpoint_of, make_checkpoint
from bytefloor.errors import RequestError, ShapeError
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import OpCall
from bytefloor.ops.op import Sizes

SMALL = Shape("gemma4", 256, 512, 2, 4, 2, 64, 288, 4096, True, {"attention.sliding_window": 40}, 2, 1, 128)
SMALL_E = replace(
    SMALL, n_layers=6, n_global_kv_heads=2, has_global_v=True, n_shared_kv=2, per_layer_width=256, vocabulary=300
)
MIXTURES = synthetic.MIXTURES


@pytest.mark.parametrize(
    ("name", "gb"), [("gemma4-12b", 7.36), ("llama31-8b", 4.62), ("qwen3-8b", 4.67)], ids=lambda value: str(value)
)
def test_a_token_of_a_q4_k_m_reads_what_it_reads_of_the_published_files(name: str, gb: float) -> None:
    model = load_model(make_checkpoint(f"synthetic:{name}/Q4_K_M", "cpu"))
    weights, _ = build_step(model.config, model.weights, Rounding()).token_bytes(0)
    assert weights / 1e9 == pytest.approx(gb, abs=0.006)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_model_and_mixture_has_a_step(name: str, mixture: str) -> None:
    if name == "smollm2-135m" and mixture == "FP4":
        with pytest.raises(RequestError, match="576 columns, FP4-E2M1-g128 needs a multiple of 128"):
            make_checkpoint(f"synthetic:{name}/{mixture}", "cpu")
        return
    model = load_model(make_checkpoint(f"synthetic:{name}/{mixture}", "cpu"))
    assert len(model.config.layers) == SHAPES[name].n_layers
    assert build_step(model.config, model.weights, Rounding()).logits.shape[-1] == SHAPES[name].vocabulary


@pytest.mark.parametrize("mixture", MIXTURES)
def test_bytes_are_those_of_the_parts(mixture: str) -> None:
    for tensor in checkpoint_of("small", SMALL, mixture, "cpu").tensors.values():
        assert tensor.n_bytes == sum(part.nbytes for part in tensor.read().values()), tensor.name


def test_a_mixture_says_what_each_matrix_is_kept_in() -> None:
    roles = ("token_embd", "blk.0.attn_q", "blk.0.ffn_up", "blk.0.ffn_down")
    found = {}
    for mixture in MIXTURES:
        tensors = make_checkpoint(f"synthetic:gemma4-12b/{mixture}", "cpu").tensors
        found[mixture] = [tensors[f"{role}.weight"].format_name.removeprefix("affine-") for role in roles]
    assert found == {
        "Q4_K_M": ["Q6_K", "Q4_K", "Q4_K", "Q6_K"],
        "Q8_0": ["Q8_0"] * 4,
        "BF16": ["BF16"] * 4,
        "MLX-4bit": ["4b-g64"] * 4,
        "MLX-4bit-MLP-8bit": ["4b-g64", "4b-g64", "8b-g64", "8b-g64"],
        "MLX-4bit-down-8bit": ["4b-g64", "4b-g64", "4b-g64", "8b-g64"],
        "MLX-4bit-MLP-g32": ["4b-g64", "4b-g64", "4b-g32", "4b-g32"],
        "FP4": ["FP8-E4M3-row", *["FP4-E2M1-g128"] * 3],
        "FP8": ["BF16", *["FP8-E4M3-row"] * 3],
        "NVFP4": ["BF16", *["NVFP4-modelopt"] * 3],
    }


def test_gemma4_e4b_is_the_published_one() -> None:
    """Layers 24 to 41 read the caches of 22 (sliding) and 23 (global); four billion weights beside the tables."""
    model = load_model(make_checkpoint("synthetic:gemma4-e4b/BF16", "cpu"))
    layers = model.config.layers
    assert [layer.kv_source for layer in layers] == [*range(24), *([22] * 5 + [23]) * 3]
    assert [layer.head_size for layer in layers] == ([256] * 5 + [512]) * 7
    assert not any(layer.has_v_from_k for layer in layers)
    tensors = model.checkpoint.tensors
    assert "blk.23.attn_v.weight" in tensors
    assert not [name for name in tensors if name.startswith("blk.24.attn_k") or name.startswith("blk.24.attn_v")]
    table = tensors["per_layer_token_embd.weight"]
    assert table.shape == (262144, 42 * 256)
    inner = sum(t.n_bytes for name, t in tensors.items() if len(t.shape) == 2 and "token_embd" not in name)
    assert inner / 2 == pytest.approx(3.97e9, rel=0.01)
    mixed = make_checkpoint("synthetic:gemma4-e4b/Q4_K_M", "cpu").tensors
    formats = {name: mixed[f"{name}.weight"].format_name for name in ("token_embd", "per_layer_token_embd")}
    assert formats == {"token_embd": "Q6_K", "per_layer_token_embd": "Q4_K"}
    assert mixed["per_layer_model_proj.weight"].format_name == "BF16"


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_small_model_of_the_e_kind_runs_and_draws_only_the_rows_it_looks_up(
    mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "BAND", 64)
    model = load_model(checkpoint_of("small-e", SMALL_E, mixture, "cpu"))
    executor = ReferenceExecutor(build_step(model.config, model.weights, Rounding()), CachePlan(64, 16))
    drawn, draw = [], synthetic._draw

    def watched(name: str, *arguments):
        drawn.append(name)
        return draw(name, *arguments)

    monkeypatch.setattr(synthetic, "_draw", watched)
    cache, batch = (
        SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds)),
        Batch(),
    )
    cache.append_rows(batch, [5, 7, 299], [0, 2])
    logits = executor.run(batch)
    assert logits.shape == (2, 300)
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0
    tables = [name for name in drawn if "embd" in name]
    assert tables == ["per_layer_token_embd.weight 0", "per_layer_token_embd.weight 4"]


@pytest.mark.parametrize("mixture", [*MIXTURES, "F16", "Q5_1"])
def test_rows_equal_those_of_the_whole_whatever_their_order(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "BAND", 64)
    table = checkpoint_of("small", SMALL, mixture, "cpu").tensors["token_embd.weight"]
    ids = torch.tensor([287, 0, 63, 64, 287, 200])
    whole = table.decode()
    assert torch.equal(table.rows(ids), whole[ids])
    assert not torch.equal(whole[:64], whole[64:128])
    assert table.rows(ids[:0]).shape == (0, 256)
    with pytest.raises(ShapeError, match="row 288 asked for"):
        table.rows(torch.tensor([288]))


@pytest.mark.parametrize("mixture", [*MIXTURES, "F16"])
def test_reads_agree_and_values_are_finite_with_the_spread_of_trained_ones(mixture: str) -> None:
    checkpoint = checkpoint_of("small", SMALL, mixture, "cpu")
    for name, tensor in checkpoint.tensors.items():
        first = tensor.decode()
        assert torch.equal(first, tensor.decode())
        if len(tensor.shape) == 2:
            assert bool(torch.isfinite(first).all())
            assert 0.3 < first.std().item() * tensor.shape[1] ** 0.5 < 3, name


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"expected synthetic:MODEL/MIXTURE of gemma4-12b, .*Q4_K_M"):
        make_checkpoint("synthetic:gpt-5/Q4_K_M", "cpu")
    for name, unknown in (
        ("gpt-5/Q4_K_M", "model 'gpt-5'"),
        ("qwen3-8b/Q9", "mixture 'Q9'"),
        ("qwen3-8b", "mixture ''"),
    ):
        with pytest.raises(RequestError, match=f"{name}: no {unknown}; expected"):
            make_checkpoint(f"synthetic:{name}", "cpu")


@pytest.mark.parametrize("kv", ["bf16", "k4v2"])
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma4-12b"])
def test_what_a_token_reads_is_added_up_once(name: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asked for by every answer of a server: layers that read alike are one, and the weights are known."""
    model = load_model(make_checkpoint(f"synthetic:{name}/Q4_K_M", "cpu"))
    step = build_step(model.config, model.weights, Rounding(cache=kv))

    def plain(depth: int, dropped: int) -> tuple[int, int]:
        sizes = {"T": 1, "R": 1, "B": 1, "S": depth + 1}
        weights, cache = 0, 0
        for call in step.calls:
            weights += call.weight_bytes(sizes)
            if call.op.reads_cache:
                assert call.cache is not None
                is_whole = call.cache.kind.window is not None
                cache += call.cache_bytes(sizes if is_whole else {**sizes, "S": depth + 1 - dropped})
        return weights, cache

    places = [(0, 0), (5, 2), (200, 0), (1023, 1), (1024, 900), (30000, 0), (30000, 20000)]
    expected = [plain(*place) for place in places]
    assert len(set(expected)) == len(expected)
    assert [step.token_bytes(*place) for place in places] == expected
    n_calls = 0
    right = OpCall.cache_bytes

    def counted(self: OpCall, sizes: Sizes) -> int:
        nonlocal n_calls
        n_calls += 1
        return right(self, sizes)

    monkeypatch.setattr(OpCall, "cache_bytes", counted)
    monkeypatch.delattr(OpCall, "weight_bytes")
    assert step.token_bytes(*places[-1]) == expected[-1]
    assert n_calls == len({call.cache.kind for call in step.calls if call.op.reads_cache and call.cache is not None})
