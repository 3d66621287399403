"""verify without kernels: lists against each other, the reference against the oracle, whole runs, the verb itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bytefloor.cli import app
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.synthetic import SHAPES, Shape, checkpoint_of
from bytefloor.errors import CapacityError, RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.fuse import fuse_one_row, unfused
from bytefloor.model.step import OpCall, Step
from bytefloor.tools import verify as verify_module
from bytefloor.tools import verify_runs
from bytefloor.tools.verify import TEXT, choose_calls, climb, list_rungs, plan_of, read_text
from bytefloor.tools.verify_lists import Arithmetic, PlainCalls, compare_lists
from bytefloor.tools.verify_oracle import Oracle
from bytefloor.tools.verify_report import EQUAL, MEASURED, SKIPPED, WRONG, Line
from bytefloor.tools.verify_view import show
from kernel_twins import TwinDevice, TwinKernel
from tiny import build_tiny

IDS = torch.randint(0, 270, (40,), generator=torch.Generator().manual_seed(1)).tolist()
SHAPE = Shape(
    "gemma4", 256, 512, 4, 4, 2, 64, 283, 4096, True,
    {"attention.sliding_window": 24, "final_logit_softcapping": 30.0}, 2, 2, 128, True, 2, 64,
)  # fmt: skip
CPU = torch.device("cpu")


def step_of(rounding: Rounding = DEVICE_ROUNDING) -> Step:
    model = load_model(checkpoint_of("gemma4-e", SHAPE, "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, rounding)


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of()


def find(step: Step, part: str, op: str, nth: int = 0) -> int:
    return [i for i, call in enumerate(step.calls) if call.part == part and call.op.name == op][nth]


def without(step: Step, index: int) -> Step:
    """Whoever read the call's output reads its input."""
    gone = step.calls[index]
    new = {gone.output.id: gone.operands["x"]} if gone.output else {}

    def rewired(call: OpCall) -> OpCall:
        return replace(call, operands={k: new.get(getattr(o, "id", None), o) for k, o in call.operands.items()})

    return replace(step, calls=tuple(rewired(call) for i, call in enumerate(step.calls) if i != index))


def changed(step: Step, index: int, **attributes: Any) -> Step:
    call = step.calls[index]
    calls = list(step.calls)
    calls[index] = replace(call, attributes={**call.attributes, **attributes})
    return replace(step, calls=tuple(calls))


def swapped(step: Step, index: int) -> Step:
    """The operands of a GLU."""
    call, calls = step.calls[index], list(step.calls)
    calls[index] = replace(call, operands={"gate": call.operands["up"], "up": call.operands["gate"]})
    return replace(step, calls=tuple(calls))


FAULTS: dict[str, tuple[Callable[[Step], Step], str, str, str]] = {
    "eps": (lambda s: changed(s, find(s, "layers.0.mlp", "rms_norm"), eps=1e-5), "layers.0.mlp", "rms_norm", "eps is"),
    "window": (lambda s: changed(s, find(s, "layers.0.attention", "attention"), window=25), "layers.0.attention",
               "attention", "window is 25, expected 24"),
    "base": (lambda s: changed(s, find(s, "layers.1.attention", "rope"), inverse_frequencies=(1.0,) * 64),
             "layers.1.attention", "rope", "inverse_frequencies is"),
    "gate and up": (lambda s: swapped(s, find(s, "layers.1.mlp", "glu")), "layers.1.mlp", "glu", "gate comes from"),
    "scalar": (lambda s: without(s, find(s, "layers.0.per_layer", "scale")), "layers.0.per_layer", "scale",
               "no such call"),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_in_one_of_two_lists_is_named(step: Step, fault: str) -> None:
    plant, part, op, note = FAULTS[fault]
    wrong = [line for line in compare_lists(step, plant(step), "lists") if line.is_wrong]
    assert (wrong[0].part, wrong[0].name.split()[0]) == (part, op)
    assert note in wrong[0].note


def test_a_call_before_what_it_reads_is_named(step: Step) -> None:
    """Attention in front of the cache write, and a product in front of its norm."""
    calls = list(step.calls)
    write, norm = find(step, "layers.0.attention", "cache_write"), find(step, "layers.1.mlp", "rms_norm")
    calls[write], calls[write + 1] = calls[write + 1], calls[write]
    calls[norm], calls[norm + 1] = calls[norm + 1], calls[norm]
    wrong = [line for line in compare_lists(step, replace(step, calls=tuple(calls)), "lists") if line.is_wrong]
    assert [line.note.split(",")[0] for line in wrong] == [
        "reads keys and values before they are written", "x is made only later",
    ]  # fmt: skip


def test_the_fused_list_is_the_plain_one_in_another_order(step: Step) -> None:
    lines = list(compare_lists(step, unfused(step, fuse_one_row(step)), "lists"))
    assert len(lines) == len(step.calls)
    assert {line.verdict for line in lines} == {EQUAL}


def test_the_reference_agrees_with_the_oracle(step: Step) -> None:
    """In float32 with and without roundings, rows one by one and at once, with bf16 weights."""
    lines = list(climb(list(list_rungs(step_of(Rounding("float32")), step, IDS, CPU))))
    assert {line.verdict for line in lines} == {EQUAL}
    assert len({line.rung for line in lines}) == 5
    assert 0 < max(line.error / line.bound for line in lines if line.bound) <= 1


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("op", ["rms_norm", "linear", "attention", "rope", "cache_write", "glu", "soft_cap"])
def test_a_wrong_reference_is_named(step: Step, op: str, by_row: bool) -> None:
    """All of its calls, and no other."""
    arithmetic = Arithmetic("planted", by_row)
    oracle = Oracle(step, plan_of(IDS), IDS, CPU)
    right = PlainCalls(oracle, arithmetic)
    change = {"eps": 1e-5, "window": 23, "cap": 30.01, "activation": "silu"}

    def compute(call: OpCall, inputs: dict[int, Tensor], pool: Tensor | None) -> Any:
        if call.op.name != op:
            return right._run(call, inputs, pool)
        attributes = {k: change[k] if k in change and v else v for k, v in call.attributes.items()}
        if op == "rope":
            attributes["inverse_frequencies"] = tuple(f * 1.01 for f in attributes["inverse_frequencies"])
        if op == "cache_write":
            inputs = {key: x * 1.01 if x.is_floating_point() else x for key, x in inputs.items()}
        result = right._run(replace(call, attributes=attributes), inputs, pool)
        return result * 1.001 if op == "linear" else result

    calls, wrong, asked = PlainCalls(oracle, arithmetic, compute), [], 0
    for call in step.calls[: 40 if op != "soft_cap" else None]:
        inputs = oracle.inputs_of([call])
        oracle.take_in([call])
        if call.op.name in ("view", "select"):
            continue
        asked += call.op.name == op and (op != "attention" or bool(call.attributes["window"]))
        line = calls.check(call, inputs)
        wrong += [line] if line.is_wrong else []
    assert asked > 0
    assert [line.name.split()[0] for line in wrong] == [op] * asked


# --- whole runs


def test_runs_on_a_device(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    twins = TwinDevice()
    twins.install(monkeypatch)
    executor = DeviceExecutor(step, plan_of(IDS), device="cpu")
    twins.know(executor)
    lines = list(climb(verify_runs.check_device_runs(executor, IDS)))
    assert {line.verdict for line in lines} == {EQUAL}
    assert {line.name for line in lines} >= {"keys and values", "all rows at once", "two runs at once"}
    launch = executor.launch_all
    monkeypatch.setattr(
        executor, "launch_all", lambda launches=None: (launch(launches), executor._memory.logits.add_(1e-6))
    )
    wrong = [line.name for line in climb(verify_runs.check_device_runs(executor, IDS)) if line.is_wrong]
    assert wrong == ["a graph and its launches"]
    monkeypatch.setattr(TwinKernel, "_turned_rows", lambda self, heads, *others: heads)
    lines = list(climb(verify_runs.check_device_runs(executor, IDS)))
    assert lines[0].verdict == WRONG
    assert [line.verdict for line in lines[-2:]] == [SKIPPED, SKIPPED]


# --- the verb


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", *words])
    return result.exit_code, result.output


def test_the_verb_says_that_all_agree_and_saves_it(tmp_path: Path) -> None:
    tiny, saved = build_tiny("gemma3", tmp_path), tmp_path / "lines.json"
    status, output = run("-m", str(tiny.directory), "--save", str(saved))
    assert status == 0, output
    lines = json.loads(saved.read_text())
    assert {line["verdict"] for line in lines[:-2]} == {EQUAL}
    assert lines[-3]["rung"] == "transformers"
    assert 0 < lines[-3]["error"] < lines[-3]["bound"]
    assert [(line["rung"], line["verdict"]) for line in lines[-2:]] == [("what roundings cost", MEASURED)] * 2
    assert f"all agree: {len(lines) - 2} comparisons" in output


def test_where_there_are_kernels_the_verb_climbs_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins on a CPU, right ones and then wrong ones."""
    twins = TwinDevice()
    twins.install(monkeypatch)

    def make(step: Step, plan: CachePlan, **more: Any) -> DeviceExecutor:
        executor = DeviceExecutor(step, plan_of(range(plan.chunk), 4), device="cpu", draft_rows=4)
        twins.know(executor)
        return executor

    monkeypatch.setitem(SHAPES, "tiny", replace(SHAPE, n_layers=4))
    monkeypatch.setattr(verify_module, "DeviceExecutor", make)
    monkeypatch.setattr(verify_module, "has_kernels", lambda device: True)
    words = ("-m", "synthetic:tiny/Q4_K_M", "-p", "What is the height of the water?")
    status, output = run(*words)
    assert status == 0, output
    for rung in ("kernels of one token", "kernels of 4 tokens of one sequence", "layers", "graphs against launches"):
        assert f"\n{rung}" in output
    monkeypatch.setattr(TwinKernel, "_turned_rows", lambda self, heads, *others: heads)
    status, output = run(*words, "--ops", "layers.0.attention")
    assert status == 1
    assert "layers.0.attention: " in output.splitlines()[-1]


def test_what_there_is_no_memory_for_is_said() -> None:
    def lines() -> Any:
        raise CapacityError("48 GB needed, 24 GB free")
        yield

    (line,) = verify_runs.or_skipped("transformers", lines)
    assert (line.verdict, line.note) == (SKIPPED, "48 GB needed, 24 GB free")


def test_status_1_names_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = build_tiny("gemma3", tmp_path)
    found = PlainCalls._run

    def wrong(self: PlainCalls, call: OpCall, inputs: dict[int, Tensor], pool: Tensor | None) -> Any:
        result = found(self, call, inputs, pool)
        return result * 1.01 if call.part == "layers.1.mlp" and call.op.name == "glu" else result

    monkeypatch.setattr(PlainCalls, "_run", wrong)
    status, output = run("-m", str(tiny.directory), "--ops", "layers.1..layers.1.mlp")
    assert status == 1
    number = find(build_step(*parts_of(tiny.directory), DEVICE_ROUNDING), "layers.1.mlp", "glu")
    assert f"WRONG: op {number}, layers.1.mlp: glu (float32, all rows at once)" in output
    assert "float32, all rows at once is broken" in output


def parts_of(directory: Path) -> tuple[Any, Any]:
    model = load_model(open_checkpoint(directory))
    return model.config, model.weights


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--ops", "9999"), "'9999' is neither a number below"),
        (("--ops", "layers.77"), "nor a part such as embedding, layers.0.attention"),
        (("--ops", "9..3"), "expected the first before the last"),
        (("--kv", "int4"), "--kv int4: expected"),
        (("-p", "a", "-f", "b"), "both -p and -f"),
        (("--save", "/no/such/folder/x.json"), "/no/such/folder/x.json: cannot be written: there is no folder"),
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    status, output = run("-m", str(build_tiny("llama-tied", tmp_path).directory), *words)
    assert status == 2
    assert complaint in output


@pytest.mark.parametrize(
    ("ops", "first", "last"),
    [("3", 3, 3), ("3..7", 3, 7), ("..4", 0, 4), ("head..", -3, -1), ("layers.0", "layers.0", "layers.0")],
)
def test_ops_go_by_number_or_part(step: Step, ops: str, first: int | str, last: int | str) -> None:
    chosen, n = sorted(choose_calls(step, ops)), len(step.calls)
    if isinstance(first, str):
        expected = [i for i, call in enumerate(step.calls) if call.part.startswith(f"{first}.")]
        assert chosen == list(range(expected[0], expected[-1] + 1))
    elif ops.startswith("head"):
        assert [step.calls[i].part for i in chosen] == ["head"] * len(chosen)
        assert chosen[-1] == n - 1
    else:
        assert chosen == list(range(first, int(last) + 1))


def test_the_text_crosses_pages_and_windows(tmp_path: Path) -> None:
    tiny = build_tiny("gemma4-e", tmp_path)
    checkpoint = open_checkpoint(tiny.directory)
    ids = read_text(checkpoint, load_model(checkpoint), None)
    assert len(ids) == 130
    assert len(set(ids)) > 30
    assert read_text(checkpoint, load_model(checkpoint), TEXT[:200])[:20] == ids[:20]
    with pytest.raises(RequestError, match="expected at least 2"):
        read_text(checkpoint, replace_context(load_model(checkpoint)), "")


def replace_context(model: Any) -> Any:
    return replace(model, config=replace(model.config, context_length=1))


def as_q4_k(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {name: replace(tensor, format_name="Q4_K") for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: {"path": None}, "only directories of safetensors"),
        (lambda c: {"kv": "bf16"}, "--kv bf16 rounds"),
        (lambda c: {"checkpoint": as_q4_k(c)}, "weights are stored as Q4_K"),
    ],
)  # fmt: skip
def test_transformers_is_not_asked_what_it_cannot_say(tmp_path: Path, change: Any, reason: str) -> None:
    tiny = build_tiny("llama-tied", tmp_path)
    checkpoint = open_checkpoint(tiny.directory)
    asked = {"path": tiny.directory, "checkpoint": checkpoint, "kv": None, **change(checkpoint)}
    (line,) = verify_runs.compare_with_transformers(
        lambda: pytest.fail("not asked"), asked["path"], asked["checkpoint"], IDS, asked["kv"]
    )
    assert line.verdict == SKIPPED
    assert reason in line.note


def test_transformers_that_differs_is_found(tmp_path: Path) -> None:
    """Another model's list under the same files."""
    tiny = build_tiny("llama-tied", tmp_path)
    checkpoint = open_checkpoint(tiny.directory)
    model = load_model(checkpoint)
    config = replace(model.config, eps=model.config.eps * 1000)
    executor = verify_runs.ReferenceExecutor(build_step(config, model.weights, Rounding()), plan_of(IDS))
    (line,) = verify_runs.compare_with_transformers(lambda: executor, tiny.directory, checkpoint, IDS, None)
    assert line.verdict == WRONG


def test_without_transformers_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(build_tiny("llama-tied", tmp_path).directory)
    monkeypatch.setattr(verify_runs.importlib.util, "find_spec", lambda name: None)
    (line,) = verify_runs.compare_with_transformers(lambda: pytest.fail("not asked"), tmp_path, checkpoint, IDS, None)
    assert (line.verdict, line.note) == (SKIPPED, "transformers is not installed")


def test_a_report_in_which_nothing_was_compared_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    equal = Line("rung", "1", "part", "name", 0.0, 1.0, EQUAL)
    skipped = Line("other", "", "", "", None, None, SKIPPED, "why")
    assert show([equal, skipped], False, None) == 0
    assert "all agree: 1 comparisons; not run: other: why" in capsys.readouterr().out
    assert show([skipped], False, None) == 1
    assert "nothing was compared; not run: other: why" in capsys.readouterr().out
    assert show([], False, None) == 1
