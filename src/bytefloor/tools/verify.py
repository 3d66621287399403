"""``verify``: the ladder from single ops to whole texts, on any checkpoint; it stops at the first broken rung.

What is right by definition is the plain list in float64 (``verify_oracle.py``). Op by op everything else is given its
inputs, so that the first wrong op is named and none behind it is blamed; whole runs come after that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import DEVICE_ROUNDING, KERNEL_KV_TYPES, check_kv, choose_device, open_tokenizer
from bytefloor.engine.memory import Advice
from bytefloor.engine.progress import Progress, Silent
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.engine.synthetic import is_synthetic, make_checkpoint, with_tokenizer
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.fuse import Fused, fuse_one_row, unfused
from bytefloor.model.step import OpCall, Step
from bytefloor.tools.models import find_model
from bytefloor.tools.verify_decode import DecodeKernels, decode_rung
from bytefloor.tools.verify_lists import Arithmetic, PlainCalls, compare_lists
from bytefloor.tools.verify_oracle import ROW_ROUNDINGS, Oracle
from bytefloor.tools.verify_report import SKIPPED, Line, numbers_of
from bytefloor.tools.verify_rows import RowKernels
from bytefloor.tools.verify_runs import (
    check_device_runs,
    check_reference_runs,
    compare_with_transformers,
    measure_roundings,
    or_skipped,
)

PAGE = 64
LEAST_ROWS, MOST_ROWS = 130, 1100
"""Of the text: over two pages and a tile of 128 rows; over a window of 1,024."""
BEYOND = 70
"""Rows behind the last edge of a window: more than a page, so that one falls out of it."""
LAST_ROWS = 23
"""Of the second chunk: few, on top of a cache, beginning and ending in the middle of tiles."""
SEQUENCES = 16
"""The most whose tokens the kernels of decoding take at once, and the most rows of a draft."""
TEXT = (
    "A weir is a low wall across a river. Water gathers behind it until it stands as high as the wall, and then runs "
    "over. Whoever wants to know how much water a river carries can read it off a weir: the higher the water above the "
    "edge, the more flows, and since the edge never changes, a staff with marks is all it takes. In 1842 a miller near "
    "Lyon wrote down 17 such numbers a day, for 9 years (3,287 pages), and was called a fool for it; today they are "
    "the oldest series of that river. \"Measure first,\" says a note in the margin, \"and then argue.\"\n\n"
    "    def flow(height_m: float) -> float:\n        return 1.84 * 2.5 * height_m ** 1.5\n\n"
    "Ein Wehr kennt keine Meinung. \u6c34\u306f\u4f4e\u304d\u306b\u6d41\u308c\u308b\u3002 \u2014 "
)  # fmt: skip
"""What is read without -p or -f, again and again: prose, numbers, code, other languages."""


@dataclass(frozen=True)
class VerifyOptions:
    """text: None for TEXT. ops: ``A..B`` by number or part, None for all."""

    device: str = "auto"
    kv: str | None = None
    text: str | None = None
    ops: str | None = None


Rung = Callable[[], Iterable[Line]]


def verify(name: str | None, options: VerifyOptions, progress: Progress | None = None) -> Iterator[Line]:
    """Lines as they are known. Behind a rung with a wrong line come lines of what was not run."""
    check_kv(options.kv, KERNEL_KV_TYPES)
    progress, device = progress or Silent(), choose_device(options.device)
    checkpoint, path = _open(name, device)
    model = load_model(checkpoint)
    ids = read_text(checkpoint, model, options.text)
    progress.note(f"{len(ids)} rows of text{_windows_told(model, len(ids))}")
    yield from climb(_rungs(model, path, ids, device, options, progress))


def climb(rungs: Sequence[tuple[str, Rung]]) -> Iterator[Line]:
    """One rung after another, up to the first that is broken."""
    broken = ""
    for name, rung in rungs:
        if broken:
            yield Line(name, "", "", "", None, None, SKIPPED, f"{broken} is broken")
            continue
        is_wrong = False
        for line in rung():
            is_wrong |= line.is_wrong
            yield line
        broken = name if is_wrong else ""


def _open(name: str | None, device: torch.device) -> tuple[Checkpoint, Path | None]:
    if is_synthetic(name):
        assert name is not None
        return with_tokenizer(make_checkpoint(name, device)), None
    path = find_model(name)
    return open_checkpoint(path), path


def read_text(checkpoint: Checkpoint, model: Model, text: str | None) -> list[int]:
    """Tokens: of the user's text as many as there are, of our own as many as windows need; never beyond the context."""
    windows = [layer.window for layer in model.config.layers if layer.window is not None]
    most = min(MOST_ROWS, model.config.context_length)
    wanted = min(most, max([LEAST_ROWS, *(window + BEYOND for window in windows)]))
    tokenizer = open_tokenizer(checkpoint)
    if text is not None:
        ids = tokenizer.encode(text)[:most]
    else:
        ids = tokenizer.encode(TEXT)
        own = tokenizer.encode(TEXT, add_bos=False)
        while len(ids) < wanted and own:
            ids += own
        ids = ids[:wanted]
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} tokens, expected at least 2")
    return ids


def _windows_told(model: Model, n: int) -> str:
    longer = sorted({layer.window for layer in model.config.layers if layer.window is not None and layer.window >= n})
    return f"; shorter than windows of {', '.join(map(str, longer))}: their edges are not reached" if longer else ""


# --- which ops


def choose_calls(step: Step, ops: str | None) -> set[int]:
    """Numbers of the plain list's calls that are asked for. RequestError for what names none."""
    if ops is None:
        return set(range(len(step.calls)))
    first, dots, last = ops.partition("..")
    starts, ends = _place(step, first or "0", ops), _place(step, last or str(len(step.calls) - 1), ops)
    chosen = set(range(min(starts), max(ends if dots else starts) + 1))
    if not chosen:
        raise RequestError(f"--ops {ops}: no ops, expected the first before the last")
    return chosen


def _place(step: Step, word: str, ops: str) -> list[int]:
    n = len(step.calls)
    if re.fullmatch(r"\d+", word) and int(word) < n:
        return [int(word)]
    found = [i for i, c in enumerate(step.calls) if c.part == word or c.part.startswith(f"{word}.")]
    if not found:
        parts = ", ".join(list(dict.fromkeys(call.part for call in step.calls))[:4])
        raise RequestError(f"--ops {ops}: {word!r} is neither a number below {n} nor a part such as {parts}")
    return found


# --- the rungs


def _rungs(
    model: Model, path: Path | None, ids: list[int], device: torch.device, options: VerifyOptions, progress: Progress
) -> list[tuple[str, Rung]]:
    """From single ops to whole texts."""
    kv = options.kv or DEVICE_ROUNDING.cache
    rounded = build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache=kv))
    # Roundings that change nothing are in the list all the same, so that both number their calls alike.
    plain = build_step(model.config, model.weights, Rounding("float32", options.kv or Rounding.cache))
    choose_calls(plain, options.ops)
    rungs = [*list_rungs(plain, rounded, ids, device, options.ops)]
    is_whole = options.ops is None
    if has_kernels(device):
        try:
            executor = DeviceExecutor(
                rounded,
                plan_of(ids, SEQUENCES),
                device=device,
                progress=progress,
                advice=Advice().kernels,
                draft_rows=SEQUENCES,
            )
            rungs += kernel_rungs(executor, ids, options.ops)
            if is_whole:
                rungs += check_device_runs(executor, ids)
        except UnsupportedError as error:
            refusal = Line("kernels", "", "", "", None, None, SKIPPED, str(error))
            rungs.append(("kernels", lambda: [refusal]))
    if is_whole:
        executors: list[ReferenceExecutor] = []

        def reference() -> ReferenceExecutor:
            if not executors:
                executors.append(ReferenceExecutor(plain, plan_of(ids), device=device, progress=progress))
            return executors[0]

        def other() -> Iterator[Line]:
            return compare_with_transformers(reference, path, model.checkpoint, ids, options.kv)

        rungs += check_reference_runs(reference, ids)
        rungs.append(("transformers", lambda: or_skipped("transformers", other)))
        rungs.append(("what roundings cost", lambda: measure_roundings(plain, rounded, plan_of(ids), ids, device)))
    return rungs


def has_kernels(device: torch.device) -> bool:
    """Whether it is worth asking; shapes and formats may still have none."""
    return device.type == "cuda"


def plan_of(ids: Sequence[int], n_sequences: int = 1) -> CachePlan:
    """Pages for the text in one chunk, whatever windows there are."""
    room = -(-(len(ids) + PAGE) // PAGE) * PAGE
    return CachePlan(room, len(ids), n_sequences, positions=room if n_sequences > 1 else None)


def list_rungs(
    plain: Step, rounded: Step, ids: Sequence[int], device: torch.device, ops: str | None = None
) -> Iterator[tuple[str, Rung]]:
    """What needs no kernels: lists as data, then the reference executor's arithmetic."""
    name = "the fused list"

    def fused() -> Iterator[Line]:
        chosen = choose_calls(rounded, ops)
        lines = compare_lists(rounded, unfused(rounded, fuse_one_row(rounded)), name)
        yield from (line for line in lines if not line.ops or int(line.ops) in chosen)

    if can_fuse(rounded):
        yield name, fused
    for step, arithmetic in (
        (plain, Arithmetic("float32, all rows at once")),
        (plain, Arithmetic("float32, row by row", by_row=True)),
        (rounded, Arithmetic("float32 with the kernels' roundings")),
        (plain, Arithmetic("bf16 weights", weights=torch.bfloat16)),
    ):
        yield arithmetic.name, _plain_rung(step, arithmetic, ids, device, ops)


def can_fuse(step: Step) -> bool:
    """Whether the list has a fused form: kernels need one, the reference executor does not."""
    try:
        fuse_one_row(step)
    except UnsupportedError:
        return False
    return True


def _plain_rung(step: Step, arithmetic: Arithmetic, ids: Sequence[int], device: torch.device, ops: str | None) -> Rung:
    def check() -> Iterator[Line]:
        oracle = Oracle(step, plan_of(ids), ids, device, arithmetic.roundings)
        chosen, calls = choose_calls(step, ops), PlainCalls(oracle, arithmetic)
        for number, call in enumerate(step.calls):
            if number > max(chosen):
                break
            inputs = oracle.inputs_of([call])
            oracle.take_in([call])
            if number in chosen and call.op.name not in ("view", "select"):
                yield calls.check(call, inputs)

    return check


def kernel_rungs(executor: DeviceExecutor, ids: Sequence[int], ops: str | None = None) -> list[tuple[str, Rung]]:
    """Launch by launch: of one token, of many rows in two chunks, of several tokens."""
    fused, step = fuse_one_row(executor.step), executor.step
    chosen = choose_calls(step, ops)
    n = len(ids)
    rungs: list[tuple[str, Rung]] = []

    def decode(n_tokens: int, of_one: bool = False) -> Iterator[Line]:
        oracle = Oracle(step, executor.plan, ids, executor.device)
        kernels = DecodeKernels(executor, fused, oracle, n_tokens, of_one)
        rows = edges(step, n)
        yield from _walk(oracle, fused, chosen, lambda call, inputs: [kernels.check(call, inputs, rows)])
        kernels.finish()

    def rows(chunk: range) -> Iterator[Line]:
        oracle = Oracle(step, executor.plan, ids, executor.device, ROW_ROUNDINGS)
        kernels = RowKernels(executor, fused, oracle, chunk)
        yield from _walk(oracle, fused, chosen, kernels.check)
        executor.poison()

    def add_decode(n_tokens: int, of_one: bool = False) -> None:
        rungs.append((decode_rung(n_tokens, of_one), lambda: decode(n_tokens, of_one)))

    def add_rows(chunk: range) -> None:
        rungs.append((f"kernels of {len(chunk)} rows", lambda: rows(chunk)))

    add_decode(1)
    add_rows(range(n))
    if n > LAST_ROWS + 1:
        add_rows(range(n - LAST_ROWS, n))
    for size in executor.batch_sizes:
        add_decode(size)
    for size in executor.draft_sizes:
        add_decode(size, of_one=True)
    return rungs


def _walk(
    oracle: Oracle,
    fused: Sequence[Fused],
    chosen: set[int],
    check: Callable[[Fused, dict[int, Tensor]], Iterable[Line]],
) -> Iterator[Line]:
    """The oracle takes in call after call; those that are asked for are checked."""
    numbers = numbers_of(oracle.step)

    def is_chosen(calls: Sequence[OpCall]) -> bool:
        return any(numbers[id(call)] in chosen for call in calls)

    last = max((i for i, call in enumerate(fused) if is_chosen(call.replaces)), default=-1)
    for call in fused[: last + 1]:
        if not call.replaces:
            continue
        inputs = oracle.inputs_of(call.replaces)
        oracle.take_in(call.replaces)
        if is_chosen(call.replaces):
            yield from check(call, inputs)


def edges(step: Step, n: int) -> list[int]:
    """Positions that decoding is looked at: the first, around the borders of pages and of windows, and the last."""
    windows = [kind.window for kind in step.kinds if kind.window is not None]
    wanted = [0, 1, PAGE - 1, PAGE, *(p for window in windows for p in (window - 1, window, window + 1)), n - 1]
    return sorted({p for p in wanted if 0 <= p < n})
