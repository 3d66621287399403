"""What cutting prompts costs in quality: KL from the whole cache, teacher-forced over what follows them.

PYTHONPATH=src:tests python tests/eviction_costs.py MODEL TEXT 16 [SAVE.json]

MODEL a file or directory, TEXT a file: windows of CONTEXT tokens side by side, of which the last N_GEN follow a prompt.
Beside what the prompt's last rows choose stands a choice that costs nothing, of as many positions: the first few, which
many heads lean on, and the latest. A prompt is computed once, and all but its last rows serve every choice.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from bytefloor.engine import eviction
from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.ops.eviction import OBSERVED, kept_slots
from bytefloor.tools.bench import main_format
from bytefloor.tools.bench_rows import origin
from bytefloor.tools.divergence import Estimate, Rows, compared, joined, mean_of, summarise
from bytefloor.tools.scoring import open_source
from bytefloor.tools.windows import cut_in_chunks

CONTEXT, N_GEN, CHUNK, N_FIRST = 2048, 256, 440, 4
N_PROMPT = CONTEXT - N_GEN
BUDGETS = (256, 512, 1024)


def latest(q: Tensor, keys: Tensor, scale: float, n_kept: int) -> Tensor:
    """In place of ``kept_slots``: the first N_FIRST, and the last."""
    n_slots = keys.shape[1]
    kept = [*range(N_FIRST), *range(n_slots - n_kept + N_FIRST, n_slots)]
    return torch.tensor(kept, device=q.device).expand(keys.shape[0], -1)


CHOICES = {"last rows": kept_slots, "latest": latest}


class Window:
    """One text, whose prompt is there but for the rows that choose."""

    def __init__(self, executor: ReferenceExecutor, ids: list[int]) -> None:
        self._executor, self._ids = executor, ids
        for start in range(0, N_PROMPT - OBSERVED, CHUNK):
            self._run(self._cache(start), min(start + CHUNK, N_PROMPT - OBSERVED))
        self._pools = {name: pool.clone() for name, pool in executor.pools.items()}

    def _cache(self, length: int) -> SequenceCache:
        """The books of a cache of so many positions, which are the same every time."""
        plan, kinds = self._executor.plan, self._executor.step.kinds
        cache = SequenceCache(plan, kinds, make_pools(plan, kinds))
        cache.cut_at(N_PROMPT)
        while cache.length < length:
            n_rows = min(CHUNK, length - cache.length)
            cache.reserve(n_rows)
            cache.commit(n_rows)
        return cache

    def _run(self, cache: SequenceCache, end: int) -> Tensor:
        """Log-probabilities, float64 [n, V], of the tokens behind the next rows up to ``end``."""
        batch, start = Batch(), cache.length
        cache.append_rows(batch, self._ids[start:end], range(end - start) if end > N_PROMPT else [])
        logits = self._executor.run(batch)
        cache.commit(end - start)
        return logits.double().log_softmax(-1)

    def answer(self) -> Tensor:
        """Of all tokens behind the first that follows the prompt, which is the same whatever is kept."""
        for name, pool in self._pools.items():
            self._executor.pools[name].copy_(pool)
        cache = self._cache(N_PROMPT - OBSERVED)
        self._run(cache, N_PROMPT)
        return self._run(cache, CONTEXT - 1)


def measure(name: str, text: str, n_windows: int) -> list[dict]:
    """A row for each budget and choice."""
    source = open_source(name)
    step = build_step(source.model.config, source.model.weights, Rounding())
    plan = CachePlan(CONTEXT, CHUNK)
    executor = ReferenceExecutor(step, plan)
    windows = cut_in_chunks(source.tokenizer.encode(text), CONTEXT, source.bos_id)
    found: dict[tuple[int, str], list[Rows]] = {}
    for number, cut in zip(range(1, n_windows + 1), windows, strict=False):
        executor.plan = plan
        window, targets = Window(executor, list(cut.ids)), torch.tensor(cut.ids[N_PROMPT + 1 :])
        whole = window.answer()
        nll = -whole.gather(1, targets[:, None])[:, 0]
        for budget in BUDGETS:
            executor.plan = replace(plan, budget=budget)
            for choice, choose in CHOICES.items():
                eviction.kept_slots = choose
                rows = compared(whole, whole.argmax(-1), nll, window.answer(), targets)
                found.setdefault((budget, choice), []).append(rows)
        print(f"[{number}] " + "; ".join(f"{n} {how} {told(v)}" for (n, how), v in found.items()), flush=True)
    return [
        {
            "verb": "eviction", "model": source.model.config.name, "format": main_format(source.model),
            "context": CONTEXT, "n_prompt": N_PROMPT, "n_windows": len(parts), "kv_budget": budget, "keeps": choice,
            "divergence": asdict(summarise(joined(parts))), "kl_windows": asdict(by_window(parts)),
            "kl_of_windows": [float(rows.divergence.mean()) for rows in parts], **origin(executor.device),
        }
        for (budget, choice), parts in found.items()
    ]  # fmt: skip


def by_window(parts: list[Rows]) -> Estimate:
    """Mean KL, and its standard error from how windows differ, which is larger than that from how tokens do."""
    return mean_of([rows.divergence.mean() for rows in parts])


def told(parts: list[Rows]) -> str:
    kl, best = by_window(parts), summarise(joined(parts)).same_best
    return f"{kl.value:.4f}" + (f" +/- {kl.error:.4f}" if kl.error is not None else "") + f", {best.value:.1%}"


if __name__ == "__main__":
    made = measure(sys.argv[1], Path(sys.argv[2]).read_text(), int(sys.argv[3]))
    if len(sys.argv) > 4:
        Path(sys.argv[4]).write_text(json.dumps(made, indent=1) + "\n")
