"""The road of chips without bulk copies, run on one that has them."""

from __future__ import annotations

import pytest
import torch

from bytefloor.model.fuse import FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.ops import OPS
from device_kernels import fused_product, norm_call, run_product

GLU = OpCall(OPS["glu"], "test", {}, {"activation": "silu"}, None, {})


@pytest.mark.parametrize(
    ("fused", "weights", "k"),
    [
        (fused_product(1), [("Q4_K", 3840)], 4096),
        (fused_product(1), [("Q6_K", 272)], 15360),
        (fused_product(1, glu=GLU), [("Q8_0", 1024)], 640),
        (fused_product(3, norm=norm_call()), [("Q4_K", 512), ("Q4_K", 80), ("Q6_K", 96)], 1024),
    ],
    ids=["parts", "many parts", "glu", "segments"],
)
def test_products_without_bulk_copies_give_the_same_bits(
    fused: FusedProduct, weights: list[tuple[str, int]], k: int
) -> None:
    x, norm = torch.randn(k, device="cuda"), torch.randn(k, device="cuda")
    with_bulk, without = (run_product(fused, weights, k, x, has_bulk=b, norm=norm)[0] for b in (True, False))
    assert torch.equal(with_bulk, without)
