"""Trained checkpoints read as prompts, in chunks of every size, against float32."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from device_prompts import feed
from device_rows import cache_at, rows_of
from gpu.test_trained import ACTIVATION_COST, CACHE_ONLY, DEVICE, find_checkpoint
from test_cache_storage import MOST_KL

CAPACITY = 2304
CHUNKS = {1: 64, 2: 256, 7: 256, 8: 256, 9: 256, 16: 400, 17: 400, 63: 800, 64: 800, 65: 800, 127: 1200, 129: 1200}
"""Rows that a chunk has, and how much of the text is read so: it would take long to the end."""
LARGE_CHUNKS = (512, 2048)
"""With these all of it is."""
CLEAR = 0.3
"""Nats between the best two: of two thousand positions some are moved by a tenth."""
CLEAR_OF_FIVE = 0.1
"""Nats between the fourth best and the seventh: both would have to move for two of five to leave."""
BLOCK = 128
"""Rows whose probabilities are worked out at once: those of 2,000 by 262,144 do not fit beside everything else."""
Opened = tuple[str, Model, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=list(ACTIVATION_COST))
def opened(request: pytest.FixtureRequest, shared_dir: Path) -> Opened:
    path = find_checkpoint(request.param, shared_dir)
    golden = json.loads((shared_dir / "golden" / f"{request.param}.json").read_text())
    return request.param, load_model(open_checkpoint(path)), golden["prompts"]


def longest_text(prompts: list[dict[str, Any]]) -> list[int]:
    return max(([*prompt["ids"], *prompt["greedy"]] for prompt in prompts), key=len)


def executor_of(model: Model, rounding: Rounding = DEVICE) -> DeviceExecutor:
    return DeviceExecutor(build_step(model.config, model.weights, rounding), CachePlan(CAPACITY, max(LARGE_CHUNKS)))


def reference_logits(model: Model, ids: Sequence[int], rounding: Rounding, rounds: bool) -> Tensor:
    step, chunk = build_step(model.config, model.weights, rounding), 512
    executor = ReferenceExecutor(step, CachePlan(CAPACITY, chunk), device="cuda", precision=Precision(rounds=rounds))
    return torch.cat([rows.float() for rows in score_chunks(executor, ids, chunk)])


def blocks(*logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Float64 log-probabilities of the same rows of each, some at a time, as far as the shortest goes."""
    n = min(len(each) for each in logits)
    for start in range(0, n, BLOCK):
        yield tuple(each[start : min(start + BLOCK, n)].double().log_softmax(-1) for each in logits)


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """Nats; over the rows that both have."""
    sums = [(p.exp() * (p - q)).sum() for p, q in blocks(exact, other)]
    return float(torch.stack(sums).sum()) / min(len(exact), len(other))


def flips(exact: Tensor, other: Tensor) -> int:
    """Rows whose best token differs although the exact best two are clearly apart."""
    exact = exact[: len(other)]
    best = exact.topk(2).values
    return int(((best[:, 0] - best[:, 1] > CLEAR) & (exact.argmax(-1) != other.argmax(-1))).sum())


def best_five(exact: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """(how many of the exact five best are among the five best of each row, which rows are clear about it).

    For two to leave, one of the exact first four must fall behind the seventh or one still lower.
    """
    found, (values, ids) = other.topk(5).indices, exact[: len(other)].topk(7)
    overlap = (ids[:, :5, None] == found[:, None, :]).any(-1).sum(-1)
    return overlap, values[:, 3] - values[:, 6] > CLEAR_OF_FIVE


def measure(chunk: int, exact: Tensor, cached: Tensor, found: Tensor, other: Tensor) -> dict[str, Any]:
    """other: the same text in another chunk size."""
    overlap, is_clear = best_five(exact, found)
    return {
        "chunk": chunk,
        "n": len(found),
        "kl_prompt": mean_kl(exact[: len(found)], found),
        "kl_bf16_cache_only": mean_kl(exact[: len(found)], cached[: len(found)]),
        "kl_to_one_chunk": mean_kl(other[: len(found)], found),
        "top1": float((exact[: len(found)].argmax(-1) == found.argmax(-1)).double().mean()),
        "flips_margin_0.3": flips(exact, found),
        "top5_mean_overlap": float(overlap.double().mean()),
        "top5_least_overlap": int(overlap.min()),
        "top5_two_left_although_clear": int((is_clear & (overlap < 4)).sum()),
        "top5_share_clear": float(is_clear.double().mean()),
    }


def test_prompts_in_chunks_of_every_size_say_what_float32_says(opened: Opened) -> None:
    """K04, S03: no clear token flips; four of the five best stay but where ties are; mean KL is that of bf16.

    Chunk sizes among each other are no further apart than from float32.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    name, model, prompts = opened
    ids, executor = longest_text(prompts), executor_of(model)
    exact = reference_logits(model, ids, DEVICE, rounds=False)
    cached = reference_logits(model, ids, CACHE_ONLY, rounds=True)
    whole = rows_of(executor, ids, max(LARGE_CHUNKS))
    rows = [measure(max(LARGE_CHUNKS), exact, cached, whole, exact)]
    for chunk, n in {**CHUNKS, LARGE_CHUNKS[0]: len(ids)}.items():
        executor.poison()
        rows.append(measure(chunk, exact, cached, rows_of(executor, ids[:n], chunk), whole))
    save(name, rows)
    for row in rows:
        most = 1.5 * ACTIVATION_COST[name] + row["kl_bf16_cache_only"]
        assert row["kl_prompt"] <= most, row
        assert row["kl_to_one_chunk"] <= most, row
        assert row["flips_margin_0.3"] == 0, row
        assert row["top5_two_left_although_clear"] == 0, row
        assert row["top5_mean_overlap"] > 4.8, row


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_prompts_over_a_cache_of_codes(opened: Opened, storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """S13: it costs what it costs the executor that rounds alike, and what bf16 activations cost."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name, model, prompts = opened
    ids, rounding = longest_text(prompts)[:800], Rounding(activations="int16_g32", cache=storage)
    executor = executor_of(model, rounding)
    exact, alike = (reference_logits(model, ids, rounding, rounds) for rounds in (False, True))
    kl_alike = mean_kl(exact, alike)
    for chunk in (65, 512, 2048):
        executor.poison()
        found = rows_of(executor, ids, chunk)
        kl, between = mean_kl(exact, found), mean_kl(alike, found)
        with capsys.disabled():
            print(
                f"\n{name}, {storage}, chunks of {chunk}: KL to float32 {kl:.2e} (rounding alike {kl_alike:.2e}), ",
                end="",
            )
            print(f"to the executor that rounds alike {between:.2e}")
        assert kl <= 1.3 * kl_alike + 1.5 * ACTIVATION_COST[name]
        assert kl <= MOST_KL[name][storage]
        # Which of the clear tokens a cache of codes flips is chance: one more or less of 800.
        assert flips(exact, found) <= flips(exact, alike) + 1


@pytest.mark.parametrize("chunk", [17, 100, 2048])
def test_greedy_answers_go_on_after_prompts_in_chunks(opened: Opened, chunk: int) -> None:
    """The recorded tokens, teacher-forced: the first from the prompt, the others by the graph on top of its pages."""
    torch.backends.cuda.matmul.allow_tf32 = False
    _, model, prompts = opened
    executor = executor_of(model)
    n_clear = 0
    for prompt in prompts:
        executor.poison()
        cache, ids, greedy = cache_at(executor, 0), prompt["ids"], prompt["greedy"]
        last = -(-len(ids) // chunk) * chunk - chunk
        if last:
            feed(executor, cache, ids[:last], chunk)
        rows = [rows_of(executor, ids[last:], chunk, cache)[-1:], rows_of(executor, greedy[:-1], 1, cache)]
        found = torch.cat(rows).argmax(-1).tolist()
        clear = [i for i, margin in enumerate(prompt["top2_margin"]) if margin > CLEAR]
        assert [found[i] for i in clear] == [greedy[i] for i in clear]
        n_clear += len(clear)
    assert n_clear > 3 * len(prompts)


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """What the log quotes, under $OUT where it is set."""
    if folder := os.environ.get("OUT"):
        what = "teacher-forced as prompts in chunks; mean KL to the float32 reference executor, nats"
        content = {"model": name, "what": what, "card": torch.cuda.get_device_name(), "chunks": rows}
        (Path(folder) / f"prompts-{name}.json").write_text(json.dumps(content, indent=1))
