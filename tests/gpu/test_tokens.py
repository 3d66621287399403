"""Several tokens in one pass over the weights: each gets, bit for bit, what it gets alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bytefloor.formats import lookups
from bytefloor.model.fuse import FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.ops import OPS
from device_kernels import fused_product, norm_call, run_tokens

FORMATS = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16",
    *[f"affine-{bits}b-g64" for bits in (2, 3, 4, 5, 6, 8)], "affine-4b-g32", "affine-8b-g128", "FP8-E4M3-row",
    "mlx-mxfp8", *lookups.NAMES,
)  # fmt: skip
N_TOKENS = (4, 8, 16)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("n_tokens", N_TOKENS)
@pytest.mark.parametrize("name", FORMATS)
def test_each_token_gets_the_bits_it_gets_alone(name: str, n_tokens: int) -> None:
    """K05, S11: every form, few tiles and many, columns in parts; tokens a thousand times as large as others."""
    for n, k in ((48, 1024), (3840, 3840), (272, 15360)):
        x = (
            torch.randn(n_tokens, k, device="cuda")
            * 10.0 ** torch.arange(-3, 1, device="cuda").repeat(n_tokens)[:n_tokens, None]
        )
        found, alone, _, _ = run_tokens(fused_product(1), [(name, n)], k, x)
        assert bool(alone.isfinite().all())
        assert same_bits(found, alone)


@pytest.mark.parametrize("n_tokens", N_TOKENS)
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_norms_and_residuals_of_each_token(has_post_norm: bool, n_tokens: int) -> None:
    k, scalar = 3840, torch.tensor([0.37], device="cuda")
    x, delta = torch.randn(n_tokens, k, device="cuda"), torch.randn(n_tokens, 4, k, device="cuda")
    post, norm = torch.randn(k, device="cuda"), torch.randn(k, device="cuda")
    fused = fused_product(3, norm=norm_call(), has_delta=True)
    fused = FusedProduct(**{**vars(fused), "post_norm": norm_call() if has_post_norm else None, "scalar": scalar})
    weights = [("Q4_K", 512), ("Q5_K", 80), ("Q6_K", 96)]
    found, alone, residual, expected = run_tokens(
        fused, weights, k, x, delta=delta, post=post, norm=norm, scalar=scalar
    )
    assert same_bits(found, alone)
    assert same_bits(residual, expected)


@pytest.mark.parametrize("n_tokens", N_TOKENS)
@pytest.mark.parametrize("has_factor", [False, True])
def test_gates_of_each_token(has_factor: bool, n_tokens: int) -> None:
    glu = OpCall(OPS["glu"], "test", {}, {"activation": "gelu_tanh"}, None, {})
    more = {"factor": torch.randn(n_tokens, 1024, device="cuda")} if has_factor else {}
    call = OpCall(OPS["select"], "test", {}, {"index": 0}, None, {}) if has_factor else None
    fused = fused_product(1, glu=glu, factor=call)
    found, alone, _, _ = run_tokens(fused, [("Q6_K", 1024)], 512, torch.randn(n_tokens, 512, device="cuda"), **more)
    assert same_bits(found, alone)


def test_a_nan_stays_with_its_token() -> None:
    """N04: padded and broken rows of a batch leave the others alone."""
    x = torch.randn(8, 1024, device="cuda")
    clean, _, _, _ = run_tokens(fused_product(1), [("Q4_K", 64)], 1024, x)
    x[3, 77], x[6] = float("nan"), float("inf")
    found, alone, _, _ = run_tokens(fused_product(1), [("Q4_K", 64)], 1024, x)
    assert bool(found[3].isnan().all())
    assert not bool(found[6].isfinite().any())
    others = [0, 1, 2, 4, 5, 7]
    assert same_bits(found[others], clean[others])
    assert same_bits(found[others], alone[others])
