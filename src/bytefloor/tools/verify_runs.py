"""The upper rungs of ``verify``: whole runs, where errors have had time to grow, and what must be equal bit for bit."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import MOST_ROWS_ONE_BY_ONE, DeviceExecutor
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.errors import CapacityError
from bytefloor.files.stored import Checkpoint
from bytefloor.model.step import Step
from bytefloor.tools.bench_check import MOST_ERROR, compare_roads, most_rows
from bytefloor.tools.bench_prompt import empty_cache
from bytefloor.tools.bench_together import Executor
from bytefloor.tools.verify_oracle import ROW_ROUNDINGS, Oracle, Roundings
from bytefloor.tools.verify_report import EQUAL, MEASURED, SKIPPED, WRONG, Line

CLEAR_MARGIN = 0.3
"""Between the two best logits: where the oracle's are farther apart, another's best token must be the same."""
EAGER_ROWS = 24
TRANSFORMERS_ERROR = 1e-4
"""Of the logits' norm: float32 on either side, sums in another order."""
PLAIN = frozenset(["F32", "BF16", "F16"])
Rung = tuple[str, Callable[[], Iterator[Line]]]
MakeReference = Callable[[], ReferenceExecutor]


def check_device_runs(executor: DeviceExecutor, ids: Sequence[int]) -> list[Rung]:
    """Layers, logits, tokens; a graph against its launches one by one, a run against itself."""
    return [
        ("layers", lambda: _layers(executor, ids, "layers")),
        ("logits", lambda: _logits(executor, ids)),
        ("graphs against launches, runs against runs", lambda: _bits(executor, ids)),
    ]


def check_reference_runs(make: MakeReference, ids: Sequence[int]) -> list[Rung]:
    """Of the reference executor: rows one by one against all at once."""

    def layers() -> Iterator[Line]:
        executor = make()
        yield from _layers(executor, ids, "reference layers")

    name = "reference layers"
    return [(name, lambda: or_skipped(name, layers))]


def _layers(executor: Executor, ids: Sequence[int], rung: str) -> Iterator[Line]:
    """Rows one by one, a few at a time and all at once, which on a device share no product: keys and values of each
    layer, and the logits."""
    n_rows = most_rows(executor) if isinstance(executor, DeviceExecutor) else EAGER_ROWS
    parts = [call.part for call in executor.step.calls if call.op.name == "cache_write"]
    for part, apart in zip([*parts, "head"], compare_roads(executor, ids[:n_rows]), strict=True):
        what = "logits" if apart.layer is None else "keys and values"
        verdict = WRONG if apart.is_wrong else EQUAL
        yield Line(rung, "", part, what, apart.error, apart.bound, verdict, f"farthest: {apart.road}")


def _line(rung: str, part: str, name: str, error: float, bound: float, note: str = "") -> Line:
    """NaN is wrong too: it compares false with everything."""
    return Line(rung, "", part, name, error, bound, EQUAL if error <= bound else WRONG, note)


def oracle_logits(
    step: Step, plan: CachePlan, ids: Sequence[int], device: torch.device, roundings: Roundings | None = None
) -> Tensor:
    """[T, V], float64."""
    oracle = Oracle(step, plan, ids, device, roundings)
    for call in step.calls:
        oracle.take_in([call])
    return oracle.values[step.logits.id]


def measure_roundings(
    plain: Step, rounded: Step, plan: CachePlan, ids: Sequence[int], device: torch.device
) -> Iterator[Line]:
    """What the kernels' roundings cost on this text, by the oracle with and without them."""
    rung = "what roundings cost"
    exact = oracle_logits(plain, plan, ids, device)
    for name, roundings in (("decoding", None), ("many rows", ROW_ROUNDINGS)):
        found = oracle_logits(rounded, plan, ids, device, roundings)
        n_other = int((exact.argmax(-1) != found.argmax(-1)).sum())
        kl = mean_kl(exact, found)
        note = f"mean KL {kl:.2e} to float64 without roundings, {n_other} of {len(ids)} best tokens differ"
        yield Line(rung, "", "head", name, None, None, MEASURED if math.isfinite(kl) else WRONG, note)


def or_skipped(rung: str, lines: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """Lines, or that there is no memory for them: op by op a model needs far less than to run as a whole."""
    try:
        yield from lines()
    except CapacityError as error:
        yield Line(rung, "", "", "", None, None, SKIPPED, str(error))


def run_rows(executor: Executor, ids: Sequence[int], chunk: int, **more: Any) -> Tensor:
    """Logits [T, V] of a text from an empty cache, so many rows at a time."""
    cache, found = empty_cache(executor), []
    for start in range(0, len(ids), chunk):
        rows, batch = ids[start : start + chunk], Batch()
        cache.append_rows(batch, rows, range(len(rows)))
        found.append(executor.run(batch, **more).clone())
        cache.commit(len(rows))
    return torch.cat(found)


def _logits(executor: DeviceExecutor, ids: Sequence[int]) -> Iterator[Line]:
    """Of a whole text, through both roads, each against the oracle that rounds alike."""
    storage = executor.step.storage
    bounds, n = MOST_ERROR[storage], sum(executor.step.n_cache_layers.values())
    bound = bounds.at(n)
    roads = [("all rows at once", len(ids), ROW_ROUNDINGS), ("rows one by one", 1, None)]
    for name, chunk, roundings in roads:
        own = ids if chunk > MOST_ROWS_ONE_BY_ONE else ids[:EAGER_ROWS]
        expected = oracle_logits(executor.step, executor.plan, own, executor.device, roundings)
        found = run_rows(executor, own, chunk).double()
        error = float((found - expected).norm() / expected.norm())
        kl = mean_kl(expected, found)
        yield _line("logits", "head", name, error, bound, f"mean KL {kl:.1e}")
        yield _tokens(name, expected, found)


def mean_kl(expected: Tensor, found: Tensor) -> float:
    """Nats a row."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def _tokens(name: str, expected: Tensor, found: Tensor) -> Line:
    """Best tokens, each after the text's own: a legal flip does not void the rest."""
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > CLEAR_MARGIN
    n_other = int((expected.argmax(-1) != found.argmax(-1))[is_clear].sum())
    return _line("logits", "head", f"best tokens, {name}", float(n_other), 0.0, f"{int(is_clear.sum())} clear ones")


def _bits(executor: DeviceExecutor, ids: Sequence[int]) -> Iterator[Line]:
    """Shares of values whose bits differ."""
    rung, few = "graphs against launches, runs against runs", ids[:EAGER_ROWS]
    replayed, launched = run_rows(executor, few, 1), run_rows(executor, few, 1, is_eager=True)
    pairs = [
        ("a graph and its launches", replayed, launched),
        ("two runs row by row", replayed, run_rows(executor, few, 1)),
    ]
    pairs.append(("two runs at once", run_rows(executor, ids, len(ids)), run_rows(executor, ids, len(ids))))
    for name, one, other in pairs:
        yield _line(rung, "", name, float((one != other).double().mean()), 0.0)


# --- another implementation


def compare_with_transformers(
    make: MakeReference, path: Path | None, checkpoint: Checkpoint, ids: Sequence[int], kv: str | None
) -> Iterator[Line]:
    """Its float32 logits, where it is installed and reads the same files to the same values."""
    rung = "transformers"
    reason = _why_not(path, checkpoint, kv)
    if reason:
        yield Line(rung, "", "", "logits", None, None, SKIPPED, reason)
        return
    import transformers

    assert checkpoint.directory is not None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as refusal:
        told = str(refusal).strip().partition("\n")[0]
        yield Line(rung, "", "", "logits", None, None, SKIPPED, f"transformers does not open it: {told}")
        return
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    found = run_rows(make(), ids, len(ids)).cpu().double()
    error = float((found - expected).norm() / expected.norm())
    yield _line(rung, "head", "logits", error, TRANSFORMERS_ERROR, f"transformers {transformers.__version__}")


def _why_not(path: Path | None, checkpoint: Checkpoint, kv: str | None) -> str:
    """Empty where there is nothing in the way."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if path is None or checkpoint.container != "safetensors" or checkpoint.directory is None:
        return "only directories of safetensors are read by transformers as they are"
    formats = {tensor.format_name for tensor in checkpoint.tensors.values()}
    if formats - PLAIN:
        return f"weights are stored as {', '.join(sorted(formats - PLAIN))}, which transformers decodes in its own way"
    return f"--kv {kv} rounds, transformers does not" if kv is not None else ""
