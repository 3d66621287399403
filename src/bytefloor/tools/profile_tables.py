"""What a profile says, as words and as rows of words: a terminal and a page show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytefloor.tools.floor_model import CacheClass, FloorModel, Prediction, predict
from bytefloor.tools.profile_data import Profile, StepProfile
from bytefloor.tools.profile_parts import MADE_OF, Part, made_of, parts_by_kind, parts_by_layer, whole
from bytefloor.tools.profile_recipes import Change, deep_end


@dataclass(frozen=True)
class Sheet:
    """Headings and rows; the first cell of a row says what it is of."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def facts(profile: Profile) -> list[str]:
    """What has to be said with every number."""
    clock = f" at {profile.clock_mhz:,} MHz" if profile.clock_mhz else ""
    found = [
        profile.format,
        f"cache {profile.kv}",
        profile.executor,
        f"{profile.card}{clock}",
        f"stream limit {speed(profile.stream_gb_s)} GB/s",
        f"tensor cores {profile.peak_tflops:,.0f} TFLOP/s" if profile.peak_tflops else None,
        profile.date,
        f"commit {profile.commit}" if profile.commit else None,
    ]
    return [fact for fact in found if fact]


def speed(rate: float) -> str:
    """Something a second, with as many places as say something."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:,.1f}" if rate >= 10 else f"{rate:,.2f}"


def time(us: float, sign: str = "") -> str:
    """Microseconds, tenths of them where they say something. sign: ``+`` shows it always."""
    return f"{us:{sign},.0f}" if abs(us) >= 10_000 else f"{round(us, 1) or 0.0:{sign},.1f}"


def headline(profile: Profile, step: StepProfile) -> str:
    """How fast a step is."""
    if step.kind == "chunk":
        tflops = step.flops / step.wall_us / 1e6
        peak = f", {tflops / profile.peak_tflops:.1%} of the peak" if profile.peak_tflops else ""
        return f"{step.wall_us:,.0f} us, {speed(step.rows * 1e6 / step.wall_us)} tok/s, {tflops:,.2f} TFLOP/s{peak}"
    floor_us = step.floor_us(profile.stream_gb_s)
    share = f"{floor_us / step.wall_us:.1%} of the floor, which is {floor_us:,.0f} us"
    return f"{step.wall_us:,.0f} us, {speed(1e6 / step.wall_us)} tok/s, {share}"


def trust(step: StepProfile) -> str:
    """How it was measured, and how far the parts can be believed."""
    spread = f", spread {step.spread:.1%}" if step.spread is not None else ""
    sampling = f"; a sampled token takes {step.sampling_us:,.1f} us more" if step.sampling_us is not None else ""
    return (
        f"{step.n_launches} launches, median of {step.n_repeats}{spread}; with stamps {step.overhead:+.1%}, "
        f"all parts together {step.sums_to:.1%} of the time without{sampling}"
    )


def by_kind(profile: Profile, step: StepProfile, model: FloorModel | None) -> Sheet:
    """The last row is of all; model: of tokens."""
    if step.kind == "chunk":
        parts = [*parts_by_kind(profile, step, None), whole(profile, step, None)]
        headings = ("part", "launches", "MB", "GFLOP", "us", "of step", "TFLOP/s", "of peak")
        return Sheet(headings, tuple(_chunk_cells(profile, part) for part in parts))
    parts = [*parts_by_kind(profile, step, model), whole(profile, step, model)]
    columns = ("part", "launches", "MB", "us", "of step", "GB/s", "of limit", *MADE_OF, "model", "rest")
    return Sheet(columns, tuple(_token_cells(part) for part in parts))


def _token_cells(part: Part) -> tuple[str, ...]:
    return (
        part.name,
        _launches(part),
        _megabytes(part.needed_bytes),
        time(part.us),
        f"{part.share_of_step:.1%}",
        *_pace(part),
        *map(time, made_of(part)),
        *_modelled(part),
        "" if part.residual_us is None else time(part.residual_us, "+"),
    )


def _chunk_cells(profile: Profile, part: Part) -> tuple[str, ...]:
    return (
        part.name,
        _launches(part),
        _megabytes(part.needed_bytes),
        f"{part.flops / 1e9:,.2f}",
        time(part.us),
        f"{part.share_of_step:.1%}",
        f"{part.tflops:,.2f}",
        f"{part.tflops / profile.peak_tflops:.1%}" if profile.peak_tflops else "",
    )


def by_layer(profile: Profile, step: StepProfile, model: FloorModel) -> Sheet:
    """Of a token."""
    headings = ("layer", "launches", "MB", "us", "GB/s", "of limit", "wait", "model")
    rows = [
        (
            part.name,
            _launches(part),
            _megabytes(part.needed_bytes),
            time(part.us),
            *_pace(part),
            time(part.wait_us),
            *_modelled(part),
        )
        for part in parts_by_layer(profile, step, model)
    ]
    return Sheet(headings, tuple(rows))


def _launches(part: Part) -> str:
    return f"{part.n_launches}" if part.n_launches else ""


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f}" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.2f}"


def _pace(part: Part) -> tuple[str, str]:
    return (speed(part.gb_s), f"{part.share_of_limit:.1%}") if part.needed_bytes else ("", "")


def _modelled(part: Part) -> tuple[str]:
    return ("" if part.predicted_us is None else time(part.predicted_us),)


def by_depth(profile: Profile, model: FloorModel) -> Sheet:
    """Each token that was measured beside what the model says."""
    rows = []
    for token in profile.tokens:
        us = predict(profile, model, None, token.depth).us
        assert us is not None  # nothing is another format
        times = (time(token.wall_us), time(us))
        rates = (speed(1e6 / token.wall_us), speed(1e6 / us))
        rows.append((f"{token.depth:,}", *times, *rates, f"{us / token.wall_us - 1:+.1%}"))
    return Sheet(("depth", "measured, us", "model, us", "tok/s", "by the model", "missed by"), tuple(rows))


def by_change(profile: Profile, changes: Sequence[Change]) -> Sheet:
    """The fifth column is the predicted rate at no depth."""
    deep = f"at {deep_end(profile):,}"
    headings = (
        "", "bits a weight", "MB a token", "floor, tok/s", "predicted, tok/s", f"floor {deep}", f"predicted {deep}",
    )  # fmt: skip
    rows = [
        (
            change.name,
            f"{change.bits_per_weight:.2f}",
            f"{change.shallow.needed_bytes / 1e6:,.1f}",
            speed(change.shallow.floor_tok_s),
            _rate(change.shallow),
            speed(change.deep.floor_tok_s),
            _rate(change.deep),
        )
        for change in changes
    ]
    return Sheet(headings, tuple(rows))


def _rate(prediction: Prediction) -> str:
    return "" if prediction.tok_s is None else speed(prediction.tok_s)


def of_model(model: FloorModel) -> str:
    """What was fitted, at the shallowest depth. Classes of layers whose launches cost the same by their windows."""
    boundaries = ", ".join(
        f"{kind} ({name}{_of_class(cache)}) {curve[0][1]:.2f}"
        for (kind, name, cache), curve in model.boundaries.items()
    )
    paces = ", ".join(f"{name or 'weights'} at {pace:.1%} of the stream limit" for name, pace in model.paces.items())
    return f"{paces or 'bytes at the stream limit'}; beside bytes a launch takes, in us: {boundaries}"


def _of_class(cache: CacheClass | None) -> str:
    return "" if cache is None else ", all positions" if cache[0] is None else f", window of {cache[0]:,}"
