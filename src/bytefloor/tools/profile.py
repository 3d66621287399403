"""``profile``: where the time of a token goes, and of a chunk of a prompt. docs/profile.md says what its words mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytefloor.engine.cache import Room
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import KERNEL_KV_TYPES, check_kv, choose_device, make_executor
from bytefloor.engine.memory import Advice
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.errors import RequestError
from bytefloor.tools import profile_device, profile_reference
from bytefloor.tools.bench import main_format, open_model
from bytefloor.tools.bench_rows import measure_limit, measure_peak, origin, say
from bytefloor.tools.bench_together import Executor, randomise_cache
from bytefloor.tools.profile_data import Profile, StepProfile
from bytefloor.tools.profile_spans import caches_of, matrices_of


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure: tokens at these depths, chunks of so many rows in an empty cache, and how often each.

    kv: what the cache keeps, see ``EngineOptions``.
    """

    depths: tuple[int, ...]
    chunks: tuple[int, ...]
    repeats: int
    device: str = "auto"
    kv: str | None = None


def profile(name: str | None, options: ProfileOptions) -> Profile:
    """Open a model and measure it.

    RequestError where nothing that was asked for fits in the model's context; single lengths that do not are named and
    left out.
    """
    check_kv(options.kv, KERNEL_KV_TYPES)
    device = choose_device(options.device)
    model = open_model(name, device)
    most = model.config.context_length
    is_card = device.type == "cuda"
    # A card's tokens are timed from one to the next.
    depths = _those_that_fit(options.depths, most - (2 if is_card else 1))
    chunks = _those_that_fit(options.chunks, most)
    if not options.depths and not options.chunks:
        raise RequestError("nothing to profile: -d and -p are both empty")
    if not depths and not chunks:
        raise RequestError(f"nothing to profile: {most} positions are all this model was made for")
    limit, peak = measure_limit(device), measure_peak(device)
    room = profile_device.TOKENS_AT_A_TIME if is_card else 1
    capacity = min(most, max((*(depth + room for depth in depths), *chunks)))
    words = "smaller -d or -p need less"
    executor, notices = make_executor(model, Room(capacity), device, advice=Advice(words, words), kv=options.kv)
    assert isinstance(executor, DeviceExecutor | ReferenceExecutor)
    say(notices)
    randomise_cache(executor)
    steps = [measure_token(executor, depth, options.repeats) for depth in depths]
    steps += [measure_chunk(executor, n, 0, options.repeats) for n in _whole_chunks(chunks, executor.plan.chunk)]
    first = model.config.layers[0]
    return Profile(
        model=model.config.name,
        family=model.config.family,
        format=main_format(model),
        kv=executor.step.storage,
        executor="kernels" if isinstance(executor, DeviceExecutor) else "reference",
        stream_gb_s=round(limit.gb_s, 1),
        peak_tflops=round(peak, 1) if peak is not None else None,
        context=most,
        capacity=executor.plan.capacity,
        notes=tuple(note for note in (*model.checkpoint.notices, *notices, limit.notice) if note),
        n_layers=len(model.config.layers),
        n_gqa=first.n_heads // first.n_kv_heads,
        matrices=matrices_of(model),
        caches=caches_of(model),
        steps=tuple(steps),
        **origin(device),
    )


def measure_token(executor: Executor, depth: int, repeats: int) -> StepProfile:
    """The token behind ``depth`` positions; medians over the repeats."""
    if isinstance(executor, DeviceExecutor):
        return profile_device.measure_token(executor, depth, repeats)
    return profile_reference.measure_token(executor, depth, repeats)


def measure_chunk(executor: Executor, n_rows: int, depth: int, repeats: int) -> StepProfile:
    """So many rows of a prompt behind ``depth`` positions, of which the last wants logits."""
    if isinstance(executor, DeviceExecutor):
        return profile_device.measure_chunk(executor, n_rows, depth, repeats)
    return profile_reference.measure_chunk(executor, n_rows, depth, repeats)


def _those_that_fit(lengths: tuple[int, ...], most: int) -> list[int]:
    say([f"{n} positions do not fit in the context and are left out" for n in lengths if n > most])
    return [n for n in dict.fromkeys(lengths) if n <= most]


def _whole_chunks(chunks: Sequence[int], most: int) -> list[int]:
    """Prompts longer than a chunk are profiled by one."""
    say([f"a prompt of {n} is read in chunks of {most} rows here: one of them is profiled" for n in chunks if n > most])
    return list(dict.fromkeys(min(n, most) for n in chunks))
