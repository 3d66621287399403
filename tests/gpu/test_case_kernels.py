"""Cases from public threads (the letters and numbers in docstrings) on single kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import device_kernels
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.kernels import spec
from bytefloor.engine.launches import Card, plan_attention
from bytefloor.formats import get
from bytefloor.model.fuse import FusedAttention
from bytefloor.model.step import CacheKind, CacheLayer, OpCall
from bytefloor.ops import OPS
from bytefloor.ops.round_to import round_to
from device_kernels import (
    form_of,
    fused_product,
    handed,
    launch,
    random_parts,
    relative_error,
    run_product,
    step_state,
    taken,
)
from gpu.test_attention import check_attention
from gpu.test_kernels import TIGHT

SECOND_SCALES = {
    "NVFP4": ("scale", 0.01),
    "NVFP4-modelopt": ("weight_scale_2", 0.01),
    "NVFP4-compressed-tensors": ("weight_global_scale", 100.0),
}
"""Of the whole tensor: its name, and what stands for a hundredth. The last one divides."""
EMBEDDINGS = ("Q4_K", "Q6_K", "Q8_0", "Q5_0", "MXFP4", "affine-4b-g64", "affine-8b-g64")


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16", "BF16", "MXFP4", "FP8-E4M3-row"])
def test_activations_of_a_hundred_thousand_are_multiplied(name: str) -> None:
    """K02: beyond float16, among small ones in the same groups and in others."""
    x = torch.randn(512, device="cuda")
    x[::37] *= 1e5
    assert x.abs().max() > 1e5
    found, dense, _ = run_product(fused_product(1), [(name, 64)], 512, x)
    assert relative_error(found, dense @ round_to(x, "int16_g32").double()) < TIGHT


@pytest.mark.parametrize("name", list(SECOND_SCALES))
def test_the_second_scale_of_nvfp4_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """K09: a hundredth of the outputs where it says so; where it is absent it is 1."""
    part, value = SECOND_SCALES[name]
    x, draw = torch.randn(512, device="cuda"), random_parts
    found = {}
    for scale in (None, value, value**0):

        def with_scale(*which: object, scale: float | None = scale) -> dict[str, Tensor]:
            parts = {key: values for key, values in draw(*which).items() if key != part}
            return parts if scale is None else {**parts, part: torch.tensor([scale], device="cuda")}

        monkeypatch.setattr(device_kernels, "random_parts", with_scale)
        found[scale], dense, _ = run_product(fused_product(1), [(name, 64)], 512, x)
        assert relative_error(found[scale], dense @ round_to(x, "int16_g32").double()) < TIGHT
    assert torch.equal(found[1.0], found[None])
    assert relative_error(found[value] * 100, found[None]) < 1e-5


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_quantised_embedding_row_is_the_decoded_one(name: str) -> None:
    """K13: of one token by the decode graph's kernel, of several by that of a prompt: bit for bit."""
    parts, form = random_parts(name, 64, 512, 3), form_of(name, 64, 512)
    decoded, packed, scale = get(name).decode(parts), form.pack(parts), math.sqrt(512)
    for token in (0, 41, 63):
        out = torch.full((512,), float("nan"), device="cuda")
        kernel = spec("embed", 128, FORM=form.name, D=512, V=64, SCALE=scale)
        launch(kernel, (4, 1), packed, step_state(token), out)
        # The parity takes the last bit of what is handed over.
        assert torch.equal(taken(out), taken(handed(decoded[token] * torch.tensor(scale, device="cuda"))))
    rows = torch.tensor([63, 0, 41, 41], device="cuda")
    found = torch.full((4, 512), float("nan"), device="cuda")
    launch(spec("unpack", 256, FORM=form.name, K=512), (64, 1), packed, rows, 0, 0, 4, found)
    assert torch.equal(found, decoded[rows])


@pytest.mark.parametrize("window", [1, 4, 65])
def test_a_window_counts_the_row_itself(window: int) -> None:
    """S02, N02: with values that name their position, and every score the same, the mean of what is seen tells.

    At tile edges whole tiles are masked but for one position; what is outside the window is NaN.
    """
    plan, kind, e = CachePlan(256, chunk=64), CacheKind("kind", 1, 64, window, "bf16"), 64
    attention = OpCall(OPS["attention"], "test", {}, {"scale": 1.0}, None, {"H": 1})
    fused = FusedAttention("test", attention, None, None, None, None, CacheLayer(kind, 0), True, False, ())
    launched = plan_attention(fused, 1, 1, 1e-6, plan, Card(132))
    n_table, page = plan.n_table(kind), plan.page_size
    table = torch.arange(n_table, 0, -1, dtype=torch.int32, device="cuda")
    parts = torch.zeros(launched.n_parts + launched.n_sums, dtype=torch.int64, device="cuda")
    for n_steps, position in enumerate((0, 2, 3, 10, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 200), start=1):
        first = max(0, position - window + 1)
        cache = torch.full((n_table + 1, 2, 1, page, e), float("nan"), dtype=torch.bfloat16, device="cuda")
        for p in range(first, position):
            at = int(table[(p // page) % n_table])
            cache[at, 0, 0, p % page] = 0
            cache[at, 1, 0, p % page] = p
        qkv = torch.zeros(1, 3 * e, device="cuda")
        qkv[:, 2 * e :] = position
        out = torch.full((e,), float("nan"), device="cuda")
        launch(
            launched.kernel, launched.grid, handed(qkv, n_steps), None, None, None, cache,
            table, n_table, step_state(0, position, n_steps), parts, parts[launched.n_parts :], 0, 1, out,
        )  # fmt: skip
        expected = sum(range(first, position + 1)) / (position + 1 - first)
        assert (taken(out, n_steps) - expected).abs().max().item() < 1e-3 * max(1.0, expected), position


@pytest.mark.parametrize(("position", "storage"), [(70, "bf16"), (300, "bf16"), (300, "int8")])
@pytest.mark.parametrize("head_size", [16, 32, 48, 64, 80, 96, 128, 256, 512])
def test_sixteen_query_heads_share_one_key_head(head_size: int, position: int, storage: str) -> None:
    """R08: every head size that is not refused."""
    check_attention(head_size, 16, 1, None, position, False, "split", storage=storage)
