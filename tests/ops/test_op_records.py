"""Op records: shapes are matched by name, and each reference computes its formula on every case."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bytefloor.errors import ShapeError
from bytefloor.ops import OPS
from bytefloor.ops.attention import reference as attention
from bytefloor.ops.cache_write import reference as cache_write
from bytefloor.ops.op import Case, Op, resolve
from bytefloor.ops.rope import reference as rope
from bytefloor.ops.round_to import round_to


def test_wrong_axis_is_named_with_what_was_found_and_expected() -> None:
    with pytest.raises(ShapeError, match=r"linear: weight axis 1 \(K\) is 63, expected 64"):
        OPS["linear"].bind({"x": ("T", 64), "weight": (8, 63)})


def test_missing_and_unknown_operands_are_named() -> None:
    with pytest.raises(ShapeError, match="operand weight is missing"):
        OPS["linear"].bind({"x": ("T", 64)})
    with pytest.raises(ShapeError, match="takes no operand bias"):
        OPS["linear"].bind({"x": ("T", 4), "weight": (8, 4), "bias": (8,)})


def test_leading_axes_carry_through() -> None:
    letters = OPS["rms_norm"].bind({"x": ("T", 4, 16), "weight": (16,)})
    assert OPS["rms_norm"].infer(letters)["out"] == ("T", 4, 16)


def test_every_op_has_cases_and_says_what_it_is() -> None:
    for name, op in OPS.items():
        assert op.cases, name
        assert op.name == name


def random_operands(op: Op, case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    operands = {}
    for operand in op.operands:
        if any(letter not in {**case.sizes, "...": 0, "1": 0} for letter in operand.shape):
            return {}
        shape = [
            case.sizes["T"] if letter == "..." else 1 if letter == "1" else case.sizes[letter]
            for letter in operand.shape
        ]
        if operand.dtype == "int64":
            top = case.sizes.get("V", case.sizes["T"])
            operands[operand.name] = torch.randint(0, top, shape, generator=generator)
        else:
            operands[operand.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return operands


def plain_python(name: str, o: dict[str, np.ndarray], a: dict) -> np.ndarray:
    """Each formula once more, in the plainest numpy."""
    if name == "embed":
        return np.stack([o["table"][t] * a["scale"] for t in o["tokens"]])
    if name == "rms_norm":
        return np.stack([row / math.sqrt((row**2).mean() + a["eps"]) * o["weight"] for row in o["x"]])
    if name == "linear":
        return np.array(
            [[sum(x * w for x, w in zip(row, column, strict=True)) for column in o["weight"]] for row in o["x"]]
        )
    if name == "glu":
        gate = o["gate"]
        if a["activation"] == "silu":
            return gate / (1 + np.exp(-gate)) * o["up"]
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * o["up"]
    if name == "add":
        return o["a"] + o["b"]
    if name == "scale":
        return o["x"] * a["factor"] * o["weight"]
    if name == "soft_cap":
        return np.tanh(o["x"] / a["cap"]) * a["cap"]
    if name == "gather_rows":
        return o["x"][o["rows"]]
    if name == "select":
        return o["x"][:, a["index"]]
    if name == "view":
        return o["x"].reshape(o["x"].shape[0], *a["shape"])
    if name == "rotate":
        n = next(n for n in (16, 8) if o["x"].shape[-1] % n == 0)
        signs = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
        blocks = o["x"].reshape(*o["x"].shape[:-1], -1, n)
        return np.einsum("thbi,ij->thbj", blocks, signs / math.sqrt(n)).reshape(o["x"].shape)
    raise KeyError(name)


OPS_OF_PAGES = {"attention", "attention_coded", "cache_write", "code_pages"}
FORMULA_OPS = sorted(set(OPS) - {"rope", "round_to"} - OPS_OF_PAGES)


@pytest.mark.parametrize("name", FORMULA_OPS)
def test_reference_is_its_formula(name: str) -> None:
    op = OPS[name]
    for case in op.cases:
        operands = random_operands(op, case)
        assert operands, f"{name}: case {case} does not size every operand"
        found = op.reference(**operands, **case.attributes)
        expected = plain_python(name, {k: v.numpy() for k, v in operands.items()}, case.attributes)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
        if op.outputs:
            shapes = {k: tuple(v.shape) for k, v in operands.items()}
            inferred = op.infer(op.bind(shapes))[op.outputs[0].name]
            assert tuple(found.shape) == resolve(inferred, case.sizes)


@pytest.mark.parametrize("style", ["split", "interleaved"])
def test_rope_turns_pairs_by_position_times_frequency(style: str) -> None:
    """R03: the pairing of lanes is the style's, and a frequency of zero leaves its pair alone."""
    frequencies = (1.0, 0.25, 0.0)
    x = torch.randn(2, 1, 6, dtype=torch.float64)
    positions = torch.tensor([3, 5000])
    found = rope(x, positions, style, frequencies)
    for t in range(2):
        for i, frequency in enumerate(frequencies):
            a, b = (i, i + 3) if style == "split" else (2 * i, 2 * i + 1)
            angle = int(positions[t]) * frequency
            z = complex(x[t, 0, a], x[t, 0, b]) * complex(math.cos(angle), math.sin(angle))
            assert found[t, 0, a].item() == pytest.approx(z.real, abs=1e-9)
            assert found[t, 0, b].item() == pytest.approx(z.imag, abs=1e-9)


def test_rope_of_float32_is_right_at_position_100000() -> None:
    """N08: angles do not lose their last bits to float32."""
    x = torch.tensor([[[1.0, 0.0]]])
    found = rope(x, torch.tensor([100_003]), "split", (0.7,))
    assert found[0, 0, 0].item() == pytest.approx(math.cos(100_003 * 0.7), abs=1e-6)


def test_int8_rounding_takes_a_scale_per_group_of_32() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 40] = 127.0, 0.6, 1.27
    found = round_to(x, "int8_g32")
    assert found[0, :2].tolist() == [127.0, 1.0]
    assert found[0, 40].item() == pytest.approx(1.27)


def test_int8_rounding_of_large_values_stays_finite() -> None:
    """K01: 32 values of 3000 sum beyond float16, which no sum here is kept in."""
    assert round_to(torch.full((1, 32), 3000.0), "int8_g32").tolist() == [[3000.0] * 32]


def test_int8_rounding_handles_a_short_last_group() -> None:
    x = torch.randn(3, 40)
    found = round_to(x, "int8_g32")
    assert found.shape == x.shape
    tail_scale = x[:, 32:].abs().amax(dim=1, keepdim=True) / 127
    assert bool(((found[:, 32:] - x[:, 32:]).abs() <= tail_scale / 2 + 1e-6).all())


PAGE = 4


def filled_cache(n_positions: int, n_table: int, table: list[int], n_kv: int, e: int) -> tuple[torch.Tensor, ...]:
    """A poisoned cache into which positions 0 .. n - 1 of one sequence were written, and what was written."""
    cache = torch.full((n_table + 3, 2, n_kv, PAGE, e), float("nan"), dtype=torch.float64)
    k = torch.randn(n_positions, n_kv, e, dtype=torch.float64)
    v = torch.randn(n_positions, n_kv, e, dtype=torch.float64)
    slots = torch.arange(n_positions)
    for start in range(0, n_positions, 3):
        rows = slice(start, start + 3)
        sequence = torch.zeros(len(slots[rows]), dtype=torch.int64)
        cache_write(k[rows], v[rows], slots[rows], sequence, torch.tensor([table]), cache, "float32")
    return cache, k, v


@pytest.mark.parametrize(("window", "length"), [(None, 11), (4, 11), (4, 3), (1, 5), (8, 20)])
def test_attention_sees_its_window_and_nothing_else(window: int | None, length: int) -> None:
    """S02, N04: window W counts the row itself, and unwritten cells full of NaN do not matter."""
    n_heads, n_kv, e, scale = 4, 2, 8, 0.3
    table = [5, 2, 4, 1, 3][: max(3, -(-length // PAGE))]
    cache, k, v = filled_cache(length, len(table), table, n_kv, e)
    first = max(0, length - 3)
    q = torch.randn(length - first, n_heads, e, dtype=torch.float64)
    slots = torch.arange(first, length)
    sequence = torch.zeros(length - first, dtype=torch.int64)
    found = attention(q, slots, sequence, torch.tensor([table]), cache, scale, window)
    for row, slot in enumerate(slots.tolist()):
        seen = range(0 if window is None else max(0, slot - window + 1), slot + 1)
        for h in range(n_heads):
            j = h // (n_heads // n_kv)
            scores = torch.stack([scale * q[row, h] @ k[s, j] for s in seen])
            expected = sum(p * v[s, j] for p, s in zip(scores.softmax(0), seen, strict=True))
            torch.testing.assert_close(found[row, h], expected)


def test_window_of_four_at_position_ten_sees_seven_to_ten() -> None:
    """S02: with values that name their position, the mean of what is seen tells the window."""
    cache, _, _ = filled_cache(11, 3, [1, 2, 3], 1, 2)
    cache[:, 0] = 0.0
    for slot in range(11):
        cache[[1, 2, 3][slot // PAGE], 1, 0, slot % PAGE] = float(slot)
    q, slot = torch.randn(1, 1, 2, dtype=torch.float64), torch.tensor([10])
    found = attention(q, slot, torch.tensor([0]), torch.tensor([[1, 2, 3]]), cache, 1.0, 4)
    assert found[0, 0].tolist() == [8.5, 8.5]


def test_heads_that_do_not_divide_are_refused() -> None:
    """R08"""
    cache, _, _ = filled_cache(3, 3, [1, 2, 3], 2, 8)
    q = torch.randn(1, 3, 8, dtype=torch.float64)
    with pytest.raises(ShapeError, match="3 query heads are not a multiple of 2"):
        attention(q, torch.tensor([2]), torch.tensor([0]), torch.tensor([[1, 2, 3]]), cache, 1.0, None)


def test_glu_is_right_to_a_thousandth_over_its_whole_range() -> None:
    """N07: computed in float32, not in a half-precision table."""
    x = torch.linspace(-10, 10, 2001)
    found = OPS["glu"].reference(x, torch.ones_like(x), "gelu_tanh").double()
    wide = x.double()
    exact = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    assert (found - exact).abs().max().item() < 1e-5
