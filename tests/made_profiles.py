"""Profiles of models on a device that is not there: spans as kernels would have them, times by a rule that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.packed import padded_rows
from bytefloor.engine.planner import Launch
from bytefloor.engine.synthetic import make_checkpoint
from bytefloor.formats.lanes import StreamForm
from bytefloor.formats.stream import choose
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.fuse import Fused, FusedAttention, FusedEmbed, FusedPerLayer, FusedProduct, fuse_one_row
from bytefloor.model.weights import Weight
from bytefloor.tools.bench import main_format
from bytefloor.tools.floor_model import ALONE, is_product
from bytefloor.tools.profile_data import Profile, Span, StepProfile
from bytefloor.tools.profile_spans import Rows, caches_of, chunk_spans, matrices_of, token_spans

GB_S, PEAK = 4600.0, 780.0


@dataclass(frozen=True)
class Truth:
    """What a launch takes: of its kind so many us, of which a part is waiting, and its bytes at the limit; of a product
    the paces of its formats, those of ``paces`` where they are not what they are alone, and a start. odd: more, by
    span.
    """

    boundaries: dict[str, float] = field(
        default_factory=lambda: {
            "embedding": 2.5, "qkv": 3.4, "attention": 6.5, "o": 2.9, "gate_up": 3.1, "down": 2.7, "per_layer": 2.2,
            "head": 3.4, "sampling": 6.0,
        }
    )  # fmt: skip
    paces: dict[str, float] = field(default_factory=dict)
    waiting: float = 0.55
    overhead: float = 0.011
    beside_us: float = 3.0
    odd: Callable[[Span], float] = lambda span: 0.0

    gb_s: float = GB_S

    def us(self, span: Span) -> float:
        """Alone in the chain. A span has products of one pace."""
        alone = [ALONE[name] for name in span.formats]
        pace = min((self.paces.get(name, pace) for name, (pace, _) in zip(span.formats, alone, strict=True)), default=1)
        start = max(start for _, start in alone) if is_product(span) else 0.0
        bytes_us = span.streamed_bytes / (self.gb_s * pace * 1e3)
        return self.boundaries[span.kind] + start + bytes_us + self.odd(span)


def made_profile(
    name: str = "synthetic:llama31-8b/Q4_K_M",
    depths: Sequence[int] = (0, 4096, 32768),
    chunks: Sequence[int] = (2048,),
    truth: Truth | None = None,
    model: Model | None = None,
    **more: Any,
) -> Profile:
    """Of a model with random weights, none of which is drawn."""
    truth = truth or Truth()
    model = model or load_model(make_checkpoint(name, "cpu"))
    executor = _executor(model)
    steps = [made_token(token_spans(executor, depth), depth, truth) for depth in depths]
    steps += [made_chunk(chunk_spans(executor, executor.chunk, Rows(n, 0)), n) for n in chunks]
    first = model.config.layers[0]
    facts = {
        "model": model.config.name, "family": model.config.family, "format": main_format(model), "kv": "bf16",
        "executor": "kernels", "stream_gb_s": truth.gb_s, "peak_tflops": PEAK, "context": model.config.context_length,
        "capacity": max((*depths, 2048)) + 1, "card": "NVIDIA H200", "clock_mhz": 1980, "commit": "0123abc",
        "date": "2026-11-30", "notes": (), "n_layers": len(model.config.layers),
        "n_gqa": first.n_heads // first.n_kv_heads, "matrices": matrices_of(model), "caches": caches_of(model),
        "steps": tuple(steps),
    }  # fmt: skip
    return Profile(**{**facts, **more})


def _executor(model: Model) -> Any:
    """What ``token_spans`` and ``chunk_spans`` look at of an executor."""
    step = build_step(model.config, model.weights, DEVICE_ROUNDING)
    fused = fuse_one_row(step)
    token = [launch for one in fused for launch in _launches(one)]
    chunk = [launch for one in fused[:-1] for launch in _chunk_launches(one)]
    return SimpleNamespace(step=step, weights=SimpleNamespace(form_of=_form_of), launches=token, chunk=chunk)


def _form_of(weight: Weight) -> StreamForm:
    """As ``PackedWeights`` chooses it, but for scales that would have to be drawn: they are taken for bf16."""
    n, k = weight.shape
    return choose(weight.stored.format_name, padded_rows(n), k, torch.bfloat16)


def _launch(part: str, name: str) -> Launch:
    return Launch(part, SimpleNamespace(name=name), (1, 1), ())  # type: ignore[arg-type]


def _launches(fused: Fused) -> Iterator[Launch]:
    if isinstance(fused, FusedEmbed):
        yield _launch("embedding", "embed")
    elif isinstance(fused, FusedPerLayer):
        yield _launch(fused.part, "per_layer")
    elif isinstance(fused, FusedProduct | FusedAttention):
        yield _launch(fused.part, "product" if isinstance(fused, FusedProduct) else "attention")
    else:
        yield _launch("head", "logits")


def _chunk_launches(fused: Fused) -> Iterator[Any]:
    if isinstance(fused, FusedEmbed):
        yield _launch("embedding", "unpack")
    elif isinstance(fused, FusedPerLayer):
        yield from (_launch(fused.part, "unpack"), lambda: None)
    elif isinstance(fused, FusedAttention):
        yield from (_launch(fused.part, "heads_rows"), _launch(fused.part, "attention_rows"))
    elif isinstance(fused, FusedProduct):
        if fused.norm is not None or fused.has_delta:
            yield _launch(fused.part, "norm_rows")
        yield _launch(fused.part, "product_rows")
        if fused.factor is not None:
            yield _launch(fused.part, "glu_rows")


def made_token(spans: Sequence[Span], depth: int, truth: Truth, **more: Any) -> StepProfile:
    """Kernels that are there as soon as the one before the last has ended."""
    ends, timed = [0.0, 0.0], []
    for span in spans:
        us = truth.us(span)
        ready = ends[-1] + min(us, truth.boundaries[span.kind] * truth.waiting)
        timed.append(span.timed(ends[-2], ready, ends[-1] + us))
        ends.append(timed[-1].end_us)
    profiled = ends[-1] + truth.beside_us
    facts = {"sampling_us": 95.0, "n_repeats": 20, "spread": 0.004, "wall_us": profiled / (1 + truth.overhead)}
    return StepProfile("token", 1, depth, tuple(timed), profiled_us=profiled, **{**facts, **more})


def made_chunk(spans: Sequence[Span], n_rows: int) -> StepProfile:
    """Kernels one after another, products at three quarters of the peak."""
    at, timed = 0.0, []
    for span in spans:
        us = 4.0 + span.flops / (PEAK * 1e6) / (0.75 if span.kind != "attention" else 0.45) + span.file_bytes / 4e6
        timed.append(span.timed(at + 1.0, at + 2.0, at + us))
        at += us
    wall = at / 1.004
    return StepProfile("chunk", n_rows, 0, tuple(timed), wall, at, None, 5, 0.01)
