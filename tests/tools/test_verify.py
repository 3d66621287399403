"""verify finds faults that are planted in the kernels' twins and names the op; where nothing is wrong it finds nothing.

Every fault is planted in both roads, decoding and many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernel_twins
import row_twins
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.synthetic import Shape, checkpoint_of
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import OpCall, Step
from bytefloor.model.weights import Weight
from bytefloor.ops import OPS
from bytefloor.ops.pages import page_shape, values_of
from bytefloor.tools.verify import climb, kernel_rungs, plan_of
from bytefloor.tools.verify_oracle import hide
from bytefloor.tools.verify_report import EQUAL, SKIPPED, Line
from kernel_twins import TwinDevice, TwinKernel

IDS = torch.randint(0, 270, (70,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOW = 24
GEMMA4 = Shape(
    "gemma4", 256, 512, 2, 4, 2, 64, 283, 4096, True,
    {"attention.sliding_window": WINDOW, "final_logit_softcapping": 30.0}, 2, 1, 128,
)  # fmt: skip
"""A sliding layer, then a global one whose V is K."""
LLAMA = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 4096, False, {"rope.freq_base": 1e4})
SHAPES = {"gemma4": GEMMA4, "llama": LLAMA}
DECODE, ROWS = 0, 1
Rung = int


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> TwinDevice:
    device = TwinDevice()
    device.install(monkeypatch)
    return device


def step_of(family: str = "gemma4", kv: str = "bf16", mixture: str = "Q4_K_M") -> Step:
    model = load_model(checkpoint_of(family, SHAPES[family], mixture, "cpu"))
    return build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache=kv))


def make(twins: TwinDevice, step: Step, n_sequences: int = 1) -> DeviceExecutor:
    executor = DeviceExecutor(step, plan_of(IDS, n_sequences), device="cpu", draft_rows=n_sequences)
    twins.know(executor)
    return executor


def lines_of(executor: DeviceExecutor, rung: Rung, ops: str | None = None) -> list[Line]:
    return list(kernel_rungs(executor, IDS, ops)[rung][1]())


def wrong_of(executor: DeviceExecutor, rung: Rung, ops: str | None = None) -> list[Line]:
    wrong = [line for line in lines_of(executor, rung, ops) if line.is_wrong]
    assert wrong, "the fault was not found"
    return wrong


roads = pytest.mark.parametrize("rung", [DECODE, ROWS], ids=["decode", "rows"])


def patch_constants(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[int], int]) -> None:
    found = TwinKernel.n
    monkeypatch.setattr(
        TwinKernel, "n", lambda self, key: change(found(self, key)) if key == name else found(self, key)
    )


def spoil_matrix(
    twins: TwinDevice, executor: DeviceExecutor, role: str, change: Callable[[Tensor, Weight], Tensor]
) -> None:
    """What the packed matrix of a role decodes to."""
    weight, key = packed_as(executor, role)
    twins.matrices[key] = change(twins.matrices[key].clone(), weight)


def packed_as(executor: DeviceExecutor, role: str) -> tuple[Weight, int]:
    """A weight, and where it is packed."""
    weight = next(w for call in executor.step.calls for w in call.weights if w.name == role)
    return weight, executor.weights.packed(weight).data_ptr()


# --- the ten faults


@roads
@pytest.mark.parametrize("family", list(SHAPES))
def test_a_wrong_eps(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung, family: str) -> None:
    """Where rows are of ordinary size it changes nothing that could be seen."""
    executor, found = make(twins, step_of(family)), TwinKernel.f
    monkeypatch.setattr(TwinKernel, "f", lambda self, key: found(self, key) * (10 if key == "EPS" else 1))
    wrong = wrong_of(executor, rung)
    assert wrong[0].part == "layers.0.attention"
    assert wrong[0].name.startswith("rms_norm")
    assert all("rms_norm" in line.name for line in wrong)
    assert all("linear" not in line.name for line in wrong)


@roads
def test_a_norm_behind_rope(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    executor = make(twins, step_of())

    def turned(self: TwinKernel, heads: Tensor, weight: Tensor, frequencies: Tensor, at: Tensor) -> Tensor:
        style, is_one = {1: "split", 2: "interleaved"}[self.n("ROPE")], heads.dim() == 2
        rows = heads[None] if is_one else heads
        rows = OPS["rope"].reference(rows, at.long(), style, frequencies.tolist())
        rows = OPS["rms_norm"].reference(rows, self.f("EPS"), weight)
        return rows[0] if is_one else rows

    monkeypatch.setattr(TwinKernel, "_turned", turned)
    monkeypatch.setattr(TwinKernel, "_turned_rows", turned)
    wrong = wrong_of(executor, rung)
    assert [(line.part, line.name) for line in wrong] == [
        ("layers.0.attention", "rope"),
        ("layers.1.attention", "rope"),
    ]


@roads
def test_a_missing_layer_scalar(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    executor = make(twins, step_of())
    patch_constants(monkeypatch, "SCALAR", lambda n: 0)
    wrong = [(line.part, line.name) for line in wrong_of(executor, rung)]
    # Of many rows the residual in front of the head is looked at by nobody, and its norm takes every factor out again.
    behind = [("head", "scale scalar")] if rung == DECODE else []
    assert wrong == [("layers.1.attention", "scale scalar"), *behind]


@roads
def test_gate_and_up_that_are_swapped(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    executor, glu = make(twins, step_of()), OPS["glu"]
    swapped = replace(glu, reference=lambda gate, up, activation: glu.reference(up, gate, activation))
    for module in (kernel_twins, row_twins):
        monkeypatch.setattr(module, "OPS", {**OPS, "glu": swapped})
    wrong = wrong_of(executor, rung)
    assert [line.part for line in wrong] == ["layers.0.mlp", "layers.1.mlp"]
    assert wrong[0].name.endswith("linear gate, linear up, glu")
    assert "add" not in wrong[0].name


@roads
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_that_is_off_by_one(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung, by: int) -> None:
    executor = make(twins, step_of())
    patch_constants(monkeypatch, "WINDOW", lambda n: n + by if n else n)
    assert [(line.part, line.name) for line in wrong_of(executor, rung)] == [("layers.0.attention", "attention")]


@roads
def test_a_stale_scale(twins: TwinDevice, rung: Rung) -> None:
    """Of one group of 32 in one row: that of the group before it."""
    executor = make(twins, step_of())

    def stale(matrix: Tensor, weight: Weight) -> Tensor:
        blocks = weight.stored.read()["blocks"].clone()
        rows = blocks.view(weight.shape[0], -1)
        rows[3, 5] = rows[3, 4]  # the six bits of scale 1 of the first block of row 3
        matrix[: weight.shape[0]] = weight.stored.require_format().decode({"blocks": blocks})
        return matrix

    spoil_matrix(twins, executor, "layers.1.o", stale)
    (line,) = wrong_of(executor, rung)
    assert (line.part, line.name.rpartition(", ")[2]) == ("layers.1.attention", "linear o")
    assert "value [3]" in line.note


@roads
def test_a_stale_scale_that_few_rows_show(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    """A right row does not clear a matrix: of one token every third multiplication here is right."""
    executor, found = make(twins, step_of("llama")), TwinKernel._multiply

    def stale(matrix: Tensor, weight: Weight) -> Tensor:
        matrix[6, 32:64] *= 1.4  # row 3 of gate, among rows of up by turns
        return matrix

    spoil_matrix(twins, executor, "layers.0.gate", stale)
    if rung == DECODE:
        spoilt = twins.matrices[packed_as(executor, "layers.0.gate")[1]]
        n_calls = [0]

        def multiply(self: TwinKernel, packed: Sequence[Tensor | None], x: Tensor, y: Tensor, factor: object) -> None:
            assert packed[0] is not None
            matrix, n_calls[0] = twins.matrices[packed[0].data_ptr()], n_calls[0] + 1
            before = matrix[6, 32:64].clone()
            if matrix is spoilt and n_calls[0] % 3 == 0:
                matrix[6, 32:64] /= 1.4
            found(self, packed, x, y, factor)
            matrix[6, 32:64] = before

        monkeypatch.setattr(TwinKernel, "_multiply", multiply)
    (line,) = wrong_of(executor, rung)
    assert (line.part, line.name.partition("linear")[2]) == ("layers.0.mlp", " gate, linear up, glu")


@roads
def test_a_dropped_minimum(twins: TwinDevice, rung: Rung) -> None:
    executor = make(twins, step_of())

    def dropped(matrix: Tensor, weight: Weight) -> Tensor:
        assert weight.stored.format_name == "Q4_K"
        blocks = weight.stored.read()["blocks"].clone()
        blocks.view(-1, 144)[:, 2:4] = 0
        matrix[: weight.shape[0]] = weight.stored.require_format().decode({"blocks": blocks})
        return matrix

    spoil_matrix(twins, executor, "layers.0.q", dropped)
    (line,) = wrong_of(executor, rung)
    assert (line.part, line.name) == ("layers.0.attention", "linear q")


@roads
def test_a_wrong_rope_base_on_global_layers(twins: TwinDevice, rung: Rung) -> None:
    """Planted in the list that the kernels were planned from."""
    right = step_of()

    def changed(call: OpCall) -> OpCall:
        if call.op.name != "rope" or not call.part.startswith("layers.1"):
            return call
        table = tuple(frequency**0.9 if frequency else 0.0 for frequency in call.attributes["inverse_frequencies"])
        return replace(call, attributes={**call.attributes, "inverse_frequencies": table})

    executor = make(twins, replace(right, calls=tuple(changed(call) for call in right.calls)))
    same = {id(old): new for old, new in zip(executor.step.calls, right.calls, strict=True)}
    assert len(same) == len(right.calls)
    executor.step = right
    assert [(line.part, line.name) for line in wrong_of(executor, rung)] == [("layers.1.attention", "rope")]


@roads
def test_a_missing_norm_of_values(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    executor = make(twins, step_of())
    patch_constants(monkeypatch, "V_NORM", lambda n: 0)
    wrong = wrong_of(executor, rung)
    assert [line.part for line in wrong] == ["layers.0.attention", "layers.1.attention"]
    assert wrong[0].name == "rms_norm"


@roads
@pytest.mark.parametrize("role", ["layers.0.down", "layers.1.k", "embedding"])
def test_one_bad_tile(twins: TwinDevice, rung: Rung, role: str) -> None:
    executor = make(twins, step_of())

    def bad(matrix: Tensor, weight: Weight) -> Tensor:
        matrix[16:32, 64:128] = matrix[32:48, 64:128]
        return matrix

    spoil_matrix(twins, executor, role, bad)
    wrong = wrong_of(executor, rung)
    name = role.rpartition(".")[2]
    assert wrong[-1].name.endswith(f"linear {name}")
    assert len(wrong) == (2 if role == "embedding" and any(16 <= id_ < 32 for id_ in seen(executor, rung)) else 1)


def seen(executor: DeviceExecutor, rung: Rung) -> Sequence[int]:
    """Tokens whose rows of the embedding are looked at."""
    from bytefloor.tools.verify import edges

    return IDS if rung == ROWS else [IDS[p] for p in edges(executor.step, len(IDS))]


# --- nothing wrong


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("family", list(SHAPES))
def test_right_kernels_agree(twins: TwinDevice, family: str, kv: str) -> None:
    """Of one token, of 70 and of 23 rows, of four tokens, of four of one sequence."""
    executor = make(twins, step_of(family, kv), 4)
    rungs = kernel_rungs(executor, IDS)
    assert [name for name, _ in rungs] == [
        "kernels of one token", "kernels of 70 rows", "kernels of 23 rows", "kernels of 4 tokens",
        "kernels of 4 tokens of one sequence",
    ]  # fmt: skip
    lines = list(climb(rungs))
    assert {line.verdict for line in lines} == {EQUAL}
    assert len(lines) > 60


def test_the_ladder_stops_at_the_first_broken_rung(twins: TwinDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(twins, step_of())
    patch_constants(monkeypatch, "V_NORM", lambda n: 0)
    lines = list(climb(kernel_rungs(executor, IDS)))
    skipped = [line for line in lines if line.verdict == SKIPPED]
    assert [(line.rung, line.note) for line in skipped] == [
        ("kernels of 70 rows", "kernels of one token is broken"),
        ("kernels of 23 rows", "kernels of one token is broken"),
    ]


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_what_no_row_may_see_is_hidden(kv: str) -> None:
    """All else stays, in pages that do not follow each other."""
    step, table = step_of(kv=kv), [3, 1, 2]
    kind = step.kinds[0]
    page, dtype = page_shape(kv, kind.n_kv_heads, 4, kind.head_size)
    pool = torch.zeros(4, *page, dtype=dtype)
    hide(pool, table, 4, 3, 6)
    values = values_of(pool[table], kind.head_size, kv).movedim(-2, 1).flatten(0, 1)
    assert [bool(row.isnan().all()) for row in values] == [3 <= p < 6 for p in range(12)]
    assert not values[:3].any()
    assert not values[6:].any()
