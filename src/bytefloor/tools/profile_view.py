"""How ``profile`` looks on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bytefloor.tools.floor_model import FloorModel, Prediction, fit, predict
from bytefloor.tools.profile_compare import ComparedStep
from bytefloor.tools.profile_data import Profile, StepProfile
from bytefloor.tools.profile_parts import (
    MADE_OF,
    Part,
    explain,
    made_of,
    parts_by_kind,
    parts_by_layer,
    whole,
    worth_words,
)
from bytefloor.tools.profile_recipes import Change, changes_of_caches, changes_of_formats, deep_end

PIPE_WIDTH = 200


def print_profile(profile: Profile) -> None:
    """Every step by kind, the first token by layer, the model, and what would change it."""
    console = _console()
    console.print(f"[bold]{escape(profile.model)}[/bold], {', '.join(facts(profile))}")
    for note in profile.notes:
        console.print(f"note: {escape(note)}")
    model = fit(profile) if profile.tokens else None
    if model is not None:
        console.print(
            "a token's time is " + "; ".join(f"[bold]{name}[/bold]: {said}" for name, said in MADE_OF.items())
        )
    for step in (*profile.tokens, *profile.chunks):
        _print_step(console, profile, step, model)
    if model is None:
        return
    _print_layers(console, profile, profile.tokens[0], model)
    _print_model(console, profile, model)
    _print_changes(
        console, profile, "what would change it: formats of the same model", changes_of_formats(profile, model)
    )
    _print_changes(console, profile, "what would change it: the cache", changes_of_caches(profile, model))


def facts(profile: Profile) -> list[str]:
    """What has to be said with every number."""
    clock = f" at {profile.clock_mhz:,} MHz" if profile.clock_mhz else ""
    peak = f"tensor cores {profile.peak_tflops:,.0f} TFLOP/s" if profile.peak_tflops else None
    found = [
        profile.format,
        f"cache {profile.kv}",
        profile.executor,
        f"{profile.card}{clock}",
        f"stream limit {speed(profile.stream_gb_s)} GB/s",
        peak,
        profile.date,
        f"commit {profile.commit}" if profile.commit else None,
    ]
    return [fact for fact in found if fact]


def headline(profile: Profile, step: StepProfile) -> str:
    """A step in a line."""
    if step.kind == "chunk":
        rate = f"{step.rows * 1e6 / step.wall_us:,.0f} tok/s"
        tflops = step.flops / step.wall_us / 1e6
        peak = f", {tflops / profile.peak_tflops:.1%} of the peak" if profile.peak_tflops else ""
        return f"{step.title}: {step.wall_us:,.0f} us, {rate}, {tflops:,.2f} TFLOP/s{peak}"
    floor_us = step.floor_us(profile.stream_gb_s)
    return (
        f"{step.title}: {step.wall_us:,.0f} us, {1e6 / step.wall_us:,.1f} tok/s, "
        f"{floor_us / step.wall_us:.1%} of the floor, which is {floor_us:,.0f} us"
    )


def trust(step: StepProfile) -> str:
    """How it was measured, and how far the parts can be believed."""
    spread = f", spread {step.spread:.1%}" if step.spread is not None else ""
    sampling = f"; a sampled token takes {step.sampling_us:,.1f} us more" if step.sampling_us is not None else ""
    return (
        f"{step.n_launches} launches, median of {step.n_repeats}{spread}; with stamps {step.overhead:+.1%}, "
        f"all parts together {step.sums_to:.1%} of the time without{sampling}"
    )


def _console() -> Console:
    # Into a pipe nothing is folded: whoever reads it there wants whole lines.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def _print_step(console: Console, profile: Profile, step: StepProfile, model: FloorModel | None) -> None:
    console.print(f"\n[bold]{headline(profile, step)}[/bold]")
    console.print(trust(step))
    if step.kind == "chunk":
        _print_chunk(console, profile, step)
        return
    parts = parts_by_kind(profile, step, model)
    headings = (
        "part", "launches", "MB", "us", "of step", "GB/s", "of limit", *MADE_OF, "model", "beside it",
    )  # fmt: skip
    table = _table("", headings)
    for part in (*parts, whole(profile, step, model)):
        table.add_row(*_token_cells(part))
    console.print(table)
    if step is profile.tokens[0]:
        for part in worth_words(parts):
            console.print(f"  {explain(part)}", soft_wrap=True)


def speed(gb_s: float) -> str:
    """10^9 bytes a second, with as many places as say something."""
    return f"{gb_s:,.0f}" if gb_s >= 100 else f"{gb_s:,.2f}"


def _token_cells(part: Part) -> list[str]:
    return [
        part.name,
        str(part.n_launches) if part.n_launches else "",
        f"{part.needed_bytes / 1e6:,.2f}",
        f"{part.us:,.1f}",
        f"{part.share_of_step:.1%}",
        speed(part.gb_s) if part.needed_bytes else "",
        f"{part.share_of_limit:.1%}" if part.needed_bytes else "",
        *(f"{us:,.1f}" for us in made_of(part)),
        "" if part.predicted_us is None else f"{part.predicted_us:,.1f}",
        "" if part.residual_us is None else f"{part.residual_us:+,.1f}",
    ]


def _print_chunk(console: Console, profile: Profile, step: StepProfile) -> None:
    peak = profile.peak_tflops
    table = _table("", ("part", "launches", "MB", "GFLOP", "us", "of step", "TFLOP/s", *(("of peak",) if peak else ())))
    for part in (*parts_by_kind(profile, step, None), whole(profile, step, None)):
        shares = (f"{part.tflops / peak:.1%}",) if peak else ()
        table.add_row(
            part.name, str(part.n_launches) if part.n_launches else "", f"{part.needed_bytes / 1e6:,.2f}",
            f"{part.flops / 1e9:,.2f}", f"{part.us:,.1f}", f"{part.share_of_step:.1%}", f"{part.tflops:,.2f}", *shares,
        )  # fmt: skip
    console.print(table)


def _print_layers(console: Console, profile: Profile, step: StepProfile, model: FloorModel) -> None:
    table = _table(f"\n{step.title}, by layer", ("layer", "launches", "MB", "us", "GB/s", "of limit", "wait", "model"))
    for part in parts_by_layer(profile, step, model):
        table.add_row(
            part.name, str(part.n_launches), f"{part.needed_bytes / 1e6:,.2f}", f"{part.us:,.1f}", speed(part.gb_s),
            f"{part.share_of_limit:.1%}", f"{part.wait_us:,.1f}", f"{part.predicted_us:,.1f}",
        )  # fmt: skip
    console.print(table)


def _print_model(console: Console, profile: Profile, model: FloorModel) -> None:
    console.print(
        f"\nthe model: bytes at {model.efficiency:.1%} of the stream limit, and beside them a launch, in us: "
        + ", ".join(f"{kind} ({name}) {us:.2f}" for (kind, name), us in model.boundaries_us.items()),
        soft_wrap=True,
    )
    table = _table("time against depth", ("depth", "measured, us", "model, us", "tok/s", "by the model", "missed by"))
    for token in profile.tokens:
        us = predict(profile, model, None, token.depth).us
        assert us is not None
        table.add_row(
            f"{token.depth:,}", f"{token.wall_us:,.1f}", f"{us:,.1f}", f"{1e6 / token.wall_us:,.1f}",
            f"{1e6 / us:,.1f}", f"{us / token.wall_us - 1:+.1%}",
        )  # fmt: skip
    console.print(table)


def _print_changes(console: Console, profile: Profile, title: str, changes: Sequence[Change]) -> None:
    deep = f"at {deep_end(profile):,}"
    headings = ("", "bits a weight", "MB", "floor, tok/s", "predicted", f"floor {deep}", f"predicted {deep}")
    table = _table(f"\n{title}", headings)
    for change in changes:
        table.add_row(
            escape(change.name), f"{change.bits_per_weight:.2f}", f"{change.shallow.needed_bytes / 1e6:,.1f}",
            f"{change.shallow.floor_tok_s:,.1f}", _rate(change.shallow), f"{change.deep.floor_tok_s:,.1f}",
            _rate(change.deep),
        )  # fmt: skip
    console.print(table)


def _rate(prediction: Prediction) -> str:
    return "" if prediction.tok_s is None else f"{prediction.tok_s:,.1f}"


def print_comparison(a: Profile, b: Profile, steps: Sequence[ComparedStep]) -> None:
    """By kind, both times and the difference."""
    console = _console()
    for name, profile in (("A", a), ("B", b)):
        console.print(f"{name}: [bold]{escape(profile.model)}[/bold], {', '.join(facts(profile))}")
    for compared in steps:
        first, then = compared.steps
        console.print(
            f"\n[bold]{first.title}[/bold]: {first.wall_us:,.1f} us, then {then.wall_us:,.1f} us, "
            f"{then.wall_us - first.wall_us:+,.1f} us ({then.wall_us / first.wall_us - 1:+.1%})"
        )
        table = _table("", ("part", "launches", "A, us", "B, us", "difference", "of all of it"))
        for row in compared.differences:
            launches = "" if row.n_launches == (0, 0) else " / ".join(map(str, dict.fromkeys(row.n_launches)))
            share = "" if row.share is None else f"{row.share:.1%}"
            table.add_row(row.name, launches, *(f"{us:,.1f}" for us in row.us), f"{row.more_us:+,.1f}", share)
        console.print(table)
        if compared.predicted is not None and compared.miss is not None:
            console.print(
                f"A's model says {compared.predicted.us:,.1f} us for B, {compared.predicted.tok_s:,.1f} tok/s: "
                f"{compared.miss:+.1%} beside what was measured"
            )
