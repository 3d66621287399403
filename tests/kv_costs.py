"""What each ingredient of coded pages brings: `PYTHONPATH=src:tests python tests/kv_costs.py MODEL TEXT [-c N] ...`.

Mean KL to a float32 cache over the first windows of a text, the second half of each, with one thing left out or changed
at a time. Codes are made by the plain steps of `plain_tiles.py` and kept as values in float32 pages, so that recent
positions are not rounded; the executor, the pages and the rule of who sees which are the product's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.loading import CODED_CHUNK
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.model import decoder
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.step import StepBuilder
from bytefloor.ops import code_pages
from bytefloor.tools import scoring
from bytefloor.tools.divergence import summarise
from bytefloor.tools.perplexity import PerplexityOptions, _cut, _header
from bytefloor.tools.saved_base import BaseReader, BaseWriter
from bytefloor.tools.scoring import Runner, SavedBase, Source, open_source, score
from bytefloor.tools.windows import Windows, digest
from plain_tiles import KEYS, VALUES, Recipe, code_values

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """keys, values: how tiles are coded. turns: whether lanes are. recent, first: positions seen as they were written.
    page: positions of a page."""

    keys: Recipe = KEYS
    values: Recipe = VALUES
    turns: bool = True
    recent: int = decoder.RECENT
    first: int = decoder.FIRST
    page: int = 64


FLOAT = Recipe(16, 0)
BY_POSITION = replace(KEYS, over=1, rounds=0)
PLAIN = Variant(replace(KEYS, rounds=0), replace(VALUES, rounds=0))
"""Codes without factors: a key's by lane, a value's by position."""
VARIANTS = {
    "as it is": Variant(),
    "naive: by position, not turned, not made even": replace(PLAIN, keys=BY_POSITION, turns=False),
    "naive, no first page": replace(PLAIN, keys=BY_POSITION, turns=False, first=0),
    "keys by lane, not turned, not made even": replace(PLAIN, turns=False),
    "made even, not turned": Variant(turns=False),
    "turned, keys by position, not made even": replace(PLAIN, keys=BY_POSITION),
    "turned, keys by lane, not made even": PLAIN,
    **{f"{n} rounds": Variant(replace(KEYS, rounds=n), replace(VALUES, rounds=n)) for n in (1, 2, 4, 16)},
    "no first page": Variant(first=0),
    "first 128": Variant(first=128),
    "recent 64": Variant(recent=64),
    "recent 256": Variant(recent=256),
    "pages of 128": Variant(page=128),
    "keys float": Variant(keys=FLOAT),
    "values float": Variant(values=FLOAT),
    "values of 4 bits": Variant(values=replace(VALUES, bits=4)),
}


def runner_of(source: Source, windows: Windows, variant: Variant, stack: ExitStack) -> Runner:
    """The product, but for what the variant changes while the stack is open."""
    stack.enter_context(patch.multiple(decoder, RECENT=variant.recent, FIRST=variant.first))
    if not variant.turns:
        stack.enter_context(patch.object(StepBuilder, "rotate", lambda self, x: x))
    stack.enter_context(
        patch.multiple(
            code_pages,
            holds_codes=lambda cache: True,
            encode=lambda held: code_values(held.bfloat16().float(), variant.keys, variant.values),
        )
    )
    step = build_step(source.model.config, source.model.weights, Rounding(cache="k4v2"))
    plan = CachePlan(max(len(window.ids) for window in windows), CODED_CHUNK, n_snapshots=0, page_size=variant.page)
    executor = ReferenceExecutor(step, plan, precision=Precision(rounds=False))
    with patch.object(scoring, "make_executor", lambda *args, **more: (executor, ())):
        return Runner(source, windows, CPU, "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("-c", "--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--only", nargs="+", metavar="PART", help="variants whose names hold one of these")
    asked = parser.parse_args()
    options = PerplexityOptions(context=asked.context, n_windows=asked.chunks, device="cpu")
    source = open_source(asked.model)
    windows = _cut(source, asked.text.read_text(), options)
    print(f"{source.name}, {len(windows)} x {asked.context}: mean KL, 99.9 %, ratio of perplexities, same best token")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "base"
        plain = Runner(source, windows, CPU, "")
        with BaseWriter(path, _header(source, windows, options, digest(windows))) as writer:
            score(plain, windows, plain.chunk, None, writer)
        del plain
        for name, variant in VARIANTS.items():
            if asked.only is None or any(part in name for part in asked.only):
                start = time.perf_counter()
                with ExitStack() as stack, BaseReader(path) as base:
                    runner = runner_of(source, windows, variant, stack)
                    rows = score(runner, windows, runner.chunk, SavedBase(base, CPU)).rows
                assert rows is not None
                far = summarise(rows)
                kl = f"{far.kl.value:.2e} ± {far.kl.error:.0e}"
                others = f"{far.kl_percentiles['99.9']:.1e} | {far.ratio.value:.4f} | {far.same_best.value:.2%}"
                print(f"| {name} | {kl} | {others} |", flush=True)
                print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
