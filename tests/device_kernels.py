"""Launching one kernel over random inputs: what the tests that need a GPU share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bytefloor.engine.device import device_architecture
from bytefloor.engine.kernels import KernelSpec, load_kernels
from bytefloor.engine.launches import Card, Rows, Segment, plan_product
from bytefloor.engine.synthetic import _random_blocks
from bytefloor.formats import get, lookups, stream
from bytefloor.model.fuse import FusedProduct
from bytefloor.model.step import OpCall
from bytefloor.ops import OPS


def launch(kernel: KernelSpec, grid: tuple[int, int], *arguments: object) -> None:
    loaded = load_kernels([kernel], device_architecture(torch.device("cuda")))[kernel]
    loaded.launch(torch.cuda.current_stream().cuda_stream, grid, arguments)
    torch.cuda.synchronize()


def random_parts(name: str, n: int, k: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    record = get(name)
    if name.startswith("affine"):
        weights = torch.randn(n, k, generator=generator, device="cuda")
        assert record.encode is not None
        parts = record.encode(weights)
        # Scales of either sign, which the format allows.
        return {**parts, "scales": parts["scales"] * (torch.arange(k // record.block, device="cuda") % 3 - 1)}
    if name.startswith("FP8"):
        assert record.encode is not None
        return record.encode(torch.randn(n, k, generator=generator, device="cuda"))
    if name == "mlx-mxfp8":
        codes = torch.randint(0, 127, (n, k), generator=generator, device="cuda", dtype=torch.uint8)
        codes |= torch.randint(0, 2, (n, k), generator=generator, device="cuda", dtype=torch.uint8) << 7
        scales = torch.randint(100, 140, (n, k // 32), generator=generator, device="cuda", dtype=torch.uint8)
        return {"weight": codes.view(torch.uint32), "scales": scales}
    if name in lookups.NAMES or name in ("Q2_K", "Q3_K"):
        return random_codes(name, n, k, generator)
    if record.block_bytes is None:
        values = torch.randn(n, k, generator=generator, device="cuda")
        return {"values": values.to(torch.bfloat16 if name == "BF16" else torch.float16)}
    blocks = _random_blocks(record, (n, k), generator, torch.device("cuda"))
    # Scales of either sign, some zero: a sign or a stale scale that is lost shows.
    rows = blocks.view(-1, record.block_bytes)
    offset = 208 if name == "Q6_K" else 0
    scale = rows[:, offset : offset + 2].contiguous().view(torch.float16)
    scale[::3] *= -1
    scale[::7] = 0
    rows[:, offset : offset + 2] = scale.view(torch.uint8)
    return {"blocks": blocks}


def random_codes(name: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random codes under random scales of formats that have no encoder, none of which means NaN."""
    record = get(name)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator, device="cuda", dtype=torch.uint8)

    if record.block_bytes is None:
        codes, scales = record.parts
        packed = draw(256, n, k // 2)
        whole = {key: torch.tensor([0.37], device="cuda") for key in record.optional_parts}
        groups = n, k // record.block
        found = torch.randn(*groups, generator=generator, device="cuda") if "FP4-E2M1" in name else draw(100, *groups)
        return {codes: packed.view(torch.uint32) if name.startswith("mlx") else packed, scales: found, **whole}
    blocks = draw(256, n, k // record.block, record.block_bytes)
    if name in ("MXFP4", "NVFP4"):
        blocks[..., : 1 if name == "MXFP4" else 4] %= 100
        return {"blocks": blocks.flatten(1)}
    for offset in {"Q2_K": (80, 82), "Q3_K": (108,)}.get(name, (0,)):
        scale = torch.randn(n, k // record.block, 1, generator=generator, device="cuda").half()
        blocks[..., offset : offset + 2] = scale.view(torch.uint8)
    return {"blocks": blocks.flatten(1)}


def form_of(name: str, n: int, k: int) -> stream.StreamForm:
    return stream.choose(name, n, k, torch.bfloat16)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def product_call(n: int, k: int) -> OpCall:
    return OpCall(OPS["linear"], "test", {}, {}, None, {"N": n, "K": k})


def fused_product(n_products: int, **parts: object) -> FusedProduct:
    settings: dict = {"norm": None, "has_delta": False, "post_norm": None, "scalar": None, "glu": None} | parts
    return FusedProduct("test", tuple(product_call(0, 0) for _ in range(n_products)), replaces=(), **settings)


def norm_call() -> OpCall:
    return OpCall(OPS["rms_norm"], "test", {}, {"eps": 1e-6}, None, {})


def step_state(token: int = 0, position: int = 0, n_steps: int = 1, dropped: int = 0) -> Tensor:
    return torch.tensor([token, position, n_steps, dropped], dtype=torch.int32, device="cuda")


def handed(x: Tensor, n_steps: int = 1) -> Tensor:
    """Values as a kernel of step n leaves them: the parity in the last bit, which costs that bit."""
    return (x.contiguous().view(torch.int32) & ~1 | n_steps & 1).view(torch.float32)


def taken(x: Tensor, n_steps: int = 1) -> Tensor:
    """What was handed over, after a look at every parity."""
    bits = x.view(torch.int32)
    assert bool(((bits & 1) == n_steps % 2).all()), "a value was not handed over"
    return (bits & ~1).view(torch.float32)


def run_product(
    fused: FusedProduct,
    weights: list[tuple[str, int]],
    k: int,
    x: Tensor,
    n_multiprocessors: int = 132,
    has_bulk: bool = True,
    **more: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of the planes, float64 weights, the residual that the kernel wrote)."""
    segments, packed, dense = [], [], []
    for seed, (name, n) in enumerate(weights):
        parts = random_parts(name, n, k, seed)
        segments.append(Segment(form_of(name, n, k), n))
        packed.append(segments[-1].form.pack(parts))
        dense.append(get(name).decode(parts).double())
    delta, factor = more.get("delta"), more.get("factor")
    plan = plan_product(fused, segments, k, 0 if delta is None else delta.shape[0], 1e-6, Card(n_multiprocessors))
    n = sum(segment.n for segment in segments) // (2 if fused.glu is not None and factor is None else 1)
    kernel = plan.kernel if has_bulk else replace(plan.kernel, defines=(*plan.kernel.defines, ("BULK", "0")))
    pointers = [*packed, *[None] * (3 - len(packed))]
    found, tickets = [], torch.zeros(plan.planes, dtype=torch.int32, device="cuda")
    for n_steps in (1, 2):  # either parity, over what the other left
        y = torch.full((plan.planes, n), float("nan"), device="cuda") if n_steps == 1 else y  # noqa: F821
        x_out = torch.full((k,), float("nan"), device="cuda")
        x_out = handed(x_out, n_steps + 1)
        launch(
            kernel, (plan.n_blocks, 1), *pointers, handed(x, n_steps),
            None if delta is None else handed(delta, n_steps), more.get("post"), more.get("norm"), more.get("scalar"),
            x_out, y, tickets, step_state(n_steps=n_steps), None if factor is None else handed(factor, n_steps),
        )  # fmt: skip
        residual = taken(x_out, n_steps) if fused.has_delta else x_out
        found.append((taken(y, n_steps).double().sum(0), residual))
    assert torch.equal(found[0][0].nan_to_num(7.0), found[1][0].nan_to_num(7.0))
    return found[0][0], torch.cat(dense), found[0][1]


def run_tokens(
    fused: FusedProduct, weights: list[tuple[str, int]], k: int, x: Tensor, **more: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(planes of all tokens at once, of each alone, the residual of both ways).

    x float32 [T, K], delta [T, planes, K].
    """
    parts = [random_parts(name, n, k, seed) for seed, (name, n) in enumerate(weights)]
    segments = [Segment(form_of(name, n, k), n) for name, n in weights]
    packed = [segment.form.pack(part) for segment, part in zip(segments, parts, strict=True)]
    delta, factor, n_tokens = more.get("delta"), more.get("factor"), x.shape[0]
    delta_planes = 0 if delta is None else delta.shape[1]
    n = sum(segment.n for segment in segments) // (2 if fused.glu is not None and factor is None else 1)
    rows = Rows(n_tokens, k, delta_planes * k, 0 if factor is None else factor.shape[1], n)
    plan = plan_product(fused, segments, k, delta_planes, 1e-6, Card(132), rows)
    plan_one = plan_product(fused, segments, k, delta_planes, 1e-6, Card(132))
    pointers = (*packed, *[None] * (3 - len(packed)))
    norms = more.get("post"), more.get("norm"), more.get("scalar")
    nan = float("nan")
    places = torch.zeros(plan.n_places, dtype=torch.int64, device="cuda")
    tickets = torch.zeros(plan.planes, dtype=torch.int32, device="cuda")
    y = torch.full((n_tokens, plan.planes, n), nan, device="cuda")
    for n_steps in (1, 2):
        residual = handed(torch.full((n_tokens, k), nan, device="cuda"), n_steps + 1)
        launch(
            plan.kernel, (plan.n_blocks, 1), *pointers, handed(x, n_steps),
            None if delta is None else handed(delta, n_steps), *norms, residual, y, tickets,
            step_state(n_steps=n_steps), None if factor is None else handed(factor, n_steps), places,
        )  # fmt: skip
    alone, residuals = torch.full_like(y, nan), torch.full_like(residual, nan)
    for t in range(n_tokens):
        out, kept = handed(torch.full_like(y[t], nan), 1), handed(residuals[t], 1)
        launch(
            plan_one.kernel, (plan_one.n_blocks, 1), *pointers, handed(x[t], 2),
            None if delta is None else handed(delta[t], 2), *norms, kept, out, tickets, step_state(n_steps=2),
            None if factor is None else handed(factor[t], 2),
        )  # fmt: skip
        alone[t], residuals[t] = taken(out, 2), taken(kept, 2) if fused.has_delta else kept
    return taken(y, 2), alone, taken(residual, 2) if fused.has_delta else residual, residuals
