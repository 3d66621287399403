"""How far another executor's float32 may be from the oracle's float64, call by call, derived and not measured.

Every rule takes the errors of a call's inputs and gives that of its output, elementwise and absolute: what arrives,
carried through the formula, and what the call itself rounds. ``STEP`` is the distance of float32 numbers, 2^-23 of
them: rounding loses half of it, and the parity bit with which kernels hand values over (ops/handover.cuh) all of it.

| call | its own error |
|---|---|
| embed, add, scale | 2 steps of the result |
| rms_norm | 8 steps: a sum of squares by lanes, then rsqrt |
| rope | 8 steps of the two values it turns |
| glu | 16 steps of gate times up: exponentials, and what tanh cancels |
| round_to | one code, or one bf16 step, more: a value between two codes falls either way |
| linear | (8 + K / 2) steps of the root of the sum of its squared terms, which may all have one sign; where weights |
| | are rounded to bf16, a bf16 step of each that is within 2^-15 of the border of two |
| attention | twice the largest error of a score, and what shares round, of the mixture of absolute values |
| soft_cap | 8 steps of the cap |

Errors of a product's inputs are independent of each other and add up by squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytefloor.model.step import Buffer, OpCall
from bytefloor.model.weights import Weight
from bytefloor.ops.round_to import GROUP, LARGEST_CODE, LARGEST_OF_ALL, round_to
from bytefloor.tools.verify_oracle import Oracle

STEP = 2.0**-23
BF16_STEP = 2.0**-7
"""The distance of bf16 numbers, of the smallest that have it; rounding loses half of it."""
SCORE_ERROR = 2.0**-15
"""Of scores of decoding, of the largest they could be: a query in two bf16, or in codes of 16 bits."""
ROW_SCORE_ERROR = 2.0**-20
"""The same of many rows, whose queries are bf16 before they come: float32 sums are left."""
SLOPE = 1.13
"""The steepest that silu and GELU are."""
BORDER = 2.0**-15
"""How far, relative to it, a weight of many rows may be from its float32 value before it is rounded to bf16
(ops/fragments.cuh): one that is so near to the border of two bf16 numbers may become either."""
UNIT_ERROR = 2.0**-6
"""Of weights that are bf16 multiples of a unit where the oracle has the bf16 nearest to each: of each weight, and of
the largest of a group of 32 what they all have in common, which is where a minimum is added. Both add up as what is
independent does: 14 times what sums of either make on average. docs/numerics.md says which products those are."""
UNIT_GROUP = 32


@dataclass
class Valued:
    """Values of the buffers of some calls, float64, and how far another's may be from them."""

    values: dict[int, Tensor]
    errors: dict[int, Tensor]

    def of(self, call: OpCall) -> tuple[Tensor, Tensor]:
        assert call.output is not None
        values = self.values[call.output.id]
        return values, self.errors[call.output.id].expand_as(values)


def evaluate(
    oracle: Oracle,
    calls: Sequence[OpCall],
    inputs: Mapping[int, Tensor],
    input_error: float = 0.0,
    weight_error: float = 0.0,
) -> Valued:
    """The calls on given inputs. Those that use the cache are left out, and what comes behind attention is as well.

    input_error: of inputs, relative to each. weight_error: of values of matrices, as UNIT_ERROR says.
    """
    found = Valued(dict(inputs), {key: input_error * x.double().abs() for key, x in inputs.items()})
    for call in calls:
        buffers = [operand.id for operand in call.operands.values() if isinstance(operand, Buffer)]
        if call.op.reads_cache or call.output is None or any(key not in found.values for key in buffers):
            continue
        result = oracle.result(call, found.values)
        errors = {
            name: found.errors[operand.id].to(oracle.device)
            for name, operand in call.operands.items()
            if isinstance(operand, Buffer)
        }
        found.values[call.output.id] = result
        found.errors[call.output.id] = _error(oracle, call, found.values, errors, result, weight_error)
    return found


def _error(
    oracle: Oracle,
    call: OpCall,
    values: Mapping[int, Tensor],
    errors: Mapping[str, Tensor],
    result: Tensor,
    weight_error: float,
) -> Tensor:
    name = call.op.name
    operands = {key: values[o.id] for key, o in call.operands.items() if isinstance(o, Buffer)}
    if name == "embed":
        return 2 * STEP * result.abs()
    if name in ("view", "select", "gather_rows"):
        return _moved(call, operands, errors, result)
    if name == "rms_norm":
        return _norm_error(oracle, call, operands["x"], errors["x"], result)
    if name == "rope":
        sums = pair_sums(operands["x"].abs(), call.attributes["style"])
        carried = pair_sums(errors["x"].expand_as(operands["x"]), call.attributes["style"])
        return carried + 8 * STEP * sums
    if name == "round_to":
        return errors["x"] + code_step(operands["x"], oracle.roundings.activations or call.attributes["to"])
    if name == "linear":
        return _product_error(oracle, call, operands["x"], errors["x"], result, weight_error)
    if name == "glu":
        gate, up = operands["gate"], operands["up"]
        acted = gate.abs() * up.abs()
        return SLOPE * up.abs() * errors["gate"] + gate.abs() * errors["up"] + 16 * STEP * acted
    if name == "add":
        return errors["a"] + errors["b"] + 2 * STEP * result.abs()
    if name == "scale":
        weight = call.operands.get("weight")
        factor = abs(call.attributes["factor"])
        if isinstance(weight, Weight):
            factor = factor * oracle.matrices.values(weight).double().abs()
        return factor * errors["x"] + 2 * STEP * result.abs()
    assert name == "soft_cap", name
    return errors["x"] + 8 * STEP * call.attributes["cap"]


def _moved(call: OpCall, operands: Mapping[str, Tensor], errors: Mapping[str, Tensor], result: Tensor) -> Tensor:
    """Errors go where values go."""
    if errors["x"].dim() == 0:
        return errors["x"].expand_as(result)
    return call.op.reference(**{**operands, "x": errors["x"].expand_as(operands["x"])}, **call.attributes)


def _norm_error(oracle: Oracle, call: OpCall, x: Tensor, error: Tensor, result: Tensor) -> Tensor:
    weight = call.operands.get("weight")
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + call.attributes["eps"])
    share = (x.abs() * error).mean(-1, keepdim=True) * factor.square()
    scaled = error * factor
    if isinstance(weight, Weight):
        scaled = scaled * oracle.matrices.values(weight).double().abs()
    return scaled + result.abs() * (share + 8 * STEP)


def _product_error(
    oracle: Oracle, call: OpCall, x: Tensor, error: Tensor, result: Tensor, weight_error: float
) -> Tensor:
    weight, roundings = call.operands["weight"], oracle.roundings
    assert isinstance(weight, Weight)
    own = (8 + x.shape[-1] / 2) * STEP
    squares = torch.cat((error.expand_as(x).square(), x.square()))
    bands = oracle.matrices.bands(weight, roundings.weights)
    carried, terms = torch.cat([squares @ band.square().T for band in bands], dim=-1).sqrt().chunk(2)
    rounded = 0.0 if roundings.sums == "float32" else BF16_STEP / 2
    error = carried + own * terms + rounded * result.abs()
    if weight_error:
        error = error + weight_error * (terms + _in_common(oracle, weight, x))
    return error + _either(oracle, weight, x) if roundings.weights == "bf16" else error


def _in_common(oracle: Oracle, weight: Weight, x: Tensor) -> Tensor:
    """The root of the sum over groups of what x adds up to in each, times the largest weight, squared: [T, N]."""
    sums = x.unflatten(-1, (-1, UNIT_GROUP)).sum(-1)
    bands = oracle.matrices.bands(weight, "float32")
    return torch.cat(
        [(sums.square() @ band.abs().unflatten(-1, (-1, UNIT_GROUP)).amax(-1).square().T).sqrt() for band in bands],
        dim=-1,
    )


def _either(oracle: Oracle, weight: Weight, x: Tensor) -> Tensor:
    """What weights make of a product, all that may become either of two bf16 numbers: [T, N]."""
    bands = oracle.matrices.bands(weight, "float32")
    widths = [(round_to(w * (1 + BORDER), "bf16") - round_to(w * (1 - BORDER), "bf16")).abs() for w in bands]
    return torch.cat([x.abs() @ width.T for width in widths], dim=-1)


def pair_sums(x: Tensor, style: str) -> Tensor:
    """For each lane the sum over the pair that RoPE turns it in; x [..., E]."""
    if style == "split":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a + b, a + b), dim=-1)
    return x.unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*x.shape[:-1], x.shape[-1] // 2, 2).flatten(-2)


def code_step(x: Tensor, to: str) -> Tensor:
    """From a value to the next one that the narrower type has, at most."""
    if to in LARGEST_CODE:
        width = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
        step = padded.abs().amax(-1, keepdim=True) / LARGEST_CODE[to]
        return step.expand_as(padded).flatten(-2)[..., :width] + 2 * STEP * x.abs()
    if to in LARGEST_OF_ALL:
        scale = x.abs().amax(-1, keepdim=True) / LARGEST_OF_ALL[to]
        return 2 * kept_error(x, torch.zeros_like(x), to) + BF16_STEP * scale
    return torch.zeros_like(x) if to == "float32" else BF16_STEP * x.abs()


def kept_error(x: Tensor, error: Tensor, storage: str) -> Tensor:
    """How far what a cache keeps may be from values [..., E] that are themselves off by an error.

    bf16: half a step. Codes: half of one, of a scale that is rounded to bf16; the largest value may have been cut.
    """
    size = x.abs() + error
    if storage == "float32":
        return error
    if storage == "bf16":
        return error + BF16_STEP / 2 * size
    scale = (size.amax(-1, keepdim=True) / LARGEST_OF_ALL[storage]) * (1 + BF16_STEP)
    half = scale / 2 if storage == "int8" else torch.maximum(size / 16, scale * 2.0**-10)
    return error + half + BF16_STEP / 2 * size


@dataclass(frozen=True)
class Mixture:
    """What bounds an attention: m [T, H, E], the shares' sum of |v|; largest [T, H], what a score could be; seen
    [T, H], the error of a score that errors of the query make."""

    m: Tensor
    largest: Tensor
    seen: Tensor


def mixture(
    q: Tensor, q_error: Tensor, k: Tensor, v: Tensor, slots: Tensor, scale: float, window: int | None
) -> Mixture:
    """q, q_error [T, H, E]; k, v [n, J, E] of positions 0 .. n - 1, of which those in no row's band may be NaN."""
    n, groups = k.shape[0], q.shape[1] // k.shape[1]
    positions = torch.arange(n, device=q.device)
    is_visible = positions[None] <= slots[:, None]
    if window is not None:
        is_visible &= positions[None] > slots[:, None] - window
    k, v = (torch.nan_to_num(x).repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))  # [H, n, E]
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~is_visible, -torch.inf)
    m = (scores.softmax(-1) @ v.abs()).transpose(0, 1)
    sums = k.abs().sum(-1)[:, None, :].expand_as(scores).masked_fill(~is_visible, 0).amax(-1)  # [H, T]
    largest = abs(scale) * q.abs().amax(-1) * sums.T
    errors = q_error.expand_as(q).transpose(0, 1) @ k.abs().transpose(1, 2)
    seen = abs(scale) * errors.masked_fill(~is_visible, 0).amax(-1).T
    return Mixture(m, largest, seen)


def attention_error(found: Mixture, result: Tensor, score_error: float, is_bf16: bool = False) -> Tensor:
    """[T, H, E]. score_error: of the largest a score could be. is_bf16: shares and outputs are, as of many rows."""
    score = found.seen + score_error * (1 + found.largest)
    error = 2 * score[..., None] * found.m
    return error + BF16_STEP * found.m + BF16_STEP / 2 * result.abs() if is_bf16 else error


def differs_from_rounded(found: Tensor, expected: Tensor, error: Tensor) -> tuple[int, float]:
    """(how many values are not the bf16 of what is expected, how many may be).

    A value falls to the other side where its error reaches across the middle of two numbers: as often as that is long.
    """
    n_other = int((found != round_to(expected, "bf16")).sum())
    chance = (2 * error / (BF16_STEP / 2 * expected.abs()).clamp_min(1e-30)).clamp_max(1).sum().item()
    return n_other, 4 + chance + 4 * chance**0.5
