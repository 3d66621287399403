"""Spans before they are measured: in the order of launches, each byte of the floor in one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.planner import Launch
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.tools.bench_prompt import prompt_flops
from bytefloor.tools.profile_data import KINDS, Span
from bytefloor.tools.profile_spans import (
    Rows,
    caches_of,
    chunk_spans,
    matrices_of,
    reference_spans,
    token_spans,
)
from kernel_twins import TwinDevice

SHAPES = {
    "llama": Shape("llama", 256, 512, 2, 8, 2, 64, 272, 4096, False, {"rope.freq_base": 1e4}),
    "gemma4": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 1, 128,
    ),
    "gemma4-e": Shape(
        "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
        {"attention.sliding_window": 40, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
    ),
}  # fmt: skip
DEPTHS = (0, 30, 90)


@pytest.fixture(params=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(checkpoint_of(request.param, SHAPES[request.param], "Q4_K_M", "cpu"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], DeviceExecutor]:
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make(model: Model) -> DeviceExecutor:
        step = build_step(model.config, model.weights, DEVICE_ROUNDING)
        executor = DeviceExecutor(step, CachePlan(128, 100), device="cpu")
        twins.know(executor)
        return executor

    return make


def needed(spans: tuple[Span, ...]) -> tuple[int, int]:
    return sum(span.file_bytes for span in spans), sum(span.cache_bytes for span in spans)


@pytest.mark.parametrize("depth", DEPTHS)
def test_spans_of_the_reference_need_what_a_token_needs(model: Model, depth: int) -> None:
    executor = ReferenceExecutor(build_step(model.config, model.weights, Rounding()), CachePlan(128, 100))
    spans = reference_spans(executor, Rows(1, depth))
    assert needed(spans) == executor.step.token_bytes(depth)
    assert [span.name for span in spans] == [call.op.name for call in executor.step.calls]
    # Matrices are decoded to float32, a table that is only looked up is left in the file.
    products = [span for span in spans if span.name == "linear"]
    sizes = {matrix.name: matrix.n * matrix.k for matrix in matrices_of(model)}
    assert all(span.moved_bytes == 4 * sizes[span.weights[0]] for span in products)
    assert {span.kind for span in products} >= {"qkv", "o", "gate_up", "down", "head"}


@pytest.mark.parametrize("depth", DEPTHS)
def test_spans_of_a_token_are_the_launches(model: Model, device: Callable[[Model], DeviceExecutor], depth: int) -> None:
    executor = device(model)
    spans = token_spans(executor, depth)
    assert [(span.part, span.name) for span in spans] == [(one.part, one.kernel.name) for one in executor.launches]
    assert needed(spans) == executor.step.token_bytes(depth)
    moved = sum(span.moved_bytes for span in spans)
    rest = moved - executor.moved_bytes()  # vectors, and rows of tables
    assert 0 < rest < 0.02 * moved
    names = {"embed": "embedding", "attention": "attention", "logits": "sampling", "per_layer": "per_layer"}
    assert all(span.kind == names[span.name] for span in spans if span.name != "product")
    assert all(span.layer == int(span.part.split(".")[1]) for span in spans if span.part.startswith("layers."))
    if model.config.family == "llama":
        attention = ["qkv", "attention", "o", "gate_up", "down"]
        # The V of the first layer has records of another width, and a launch of its own.
        assert [span.kind for span in spans] == ["embedding", *attention * 2, "head", "sampling"]
        assert spans[1].weights == ("layers.0.q", "layers.0.k", "layers.0.v")
        assert spans[4].formats == ("Q4_K",)


def test_matrices_of_two_widths_are_two_spans(device: Callable[[Model], DeviceExecutor]) -> None:
    """Records of Q4_K have 256 columns, those of BF16 64."""
    mixed, plain = (checkpoint_of("llama", SHAPES["llama"], mixture, "cpu") for mixture in ("Q4_K_M", "BF16"))
    name = "blk.0.attn_v.weight"
    mixed = replace(mixed, tensors={**mixed.tensors, name: plain.tensors[name]})
    executor = device(load_model(mixed))
    spans = token_spans(executor, 0)
    assert len(spans) == len(executor.launches)
    assert [span.formats for span in spans if span.kind == "qkv" and span.layer == 0] == [("Q4_K",), ("BF16",)]
    assert needed(spans) == executor.step.token_bytes(0)


def test_a_chunk_has_the_arithmetic_that_bench_counts(model: Model, device: Callable[[Model], DeviceExecutor]) -> None:
    executor = device(model)
    walk = executor._prompts._trunk(64).walk
    steps = [*walk.trunk, *walk.head(32).launches]
    spans = chunk_spans(executor, steps, Rows(50, 0))
    assert len(spans) == len(steps)
    for span, step in zip(spans, steps, strict=True):
        if isinstance(step, Launch):
            assert (span.name, span.part) == (step.kernel.name, step.part)
        else:
            assert (span.name, span.kind) == ("torch", "torch")
    names = {"product_rows", "attention_rows"}
    counted = sum(span.flops for span in spans if span.name in names) - _of_gates(executor)
    assert counted == prompt_flops(executor.step, 50)
    assert all(span.kind == "norm" for span in spans if span.name == "norm_rows")
    assert sum(span.file_bytes for span in spans) == sum(
        call.weight_bytes(Rows(50, 0).sizes) for call in executor.step.calls
    )


def _of_gates(executor: DeviceExecutor) -> int:
    """Gates are part of their products' kernels, and bench counts products and attention alone."""
    sizes = Rows(50, 0).sizes
    return sum(
        call.op.flops(call.bind(sizes)) for call in executor.step.calls if call.op.name == "glu" and "mlp" in call.part
    )


def test_the_cache_of_a_chunk_is_what_its_rows_see(model: Model, device: Callable[[Model], DeviceExecutor]) -> None:
    executor = device(model)
    walk = executor._prompts._trunk(32).walk
    one, many = (chunk_spans(executor, walk.trunk, Rows(n, 64)) for n in (1, 20))
    for first, then in zip(one, many, strict=True):
        if first.name == "attention_rows":
            layer = caches_of(model)[first.layer or 0]
            bytes_of_one = layer.position_bytes["bf16"]
            assert first.cache_bytes == bytes_of_one * min(65, layer.window or 65)
            assert then.cache_bytes == bytes_of_one * min(84, (layer.window or 84) + 19)
    assert {span.kind for span in many} <= set(KINDS)


def test_caches_are_smaller_in_codes(model: Model) -> None:
    for layer in caches_of(model):
        assert layer.position_bytes["int8"] < layer.position_bytes["bf16"] < layer.position_bytes["float32"]
        assert layer.window == model.config.layers[layer.layer].window
