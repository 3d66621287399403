"""How ``profile`` looks on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bytefloor.tools.floor_model import FloorModel, fit
from bytefloor.tools.profile_compare import ComparedStep
from bytefloor.tools.profile_data import Profile, StepProfile
from bytefloor.tools.profile_parts import MADE_OF, explain, parts_by_kind, worth_words
from bytefloor.tools.profile_recipes import changes_of_caches, changes_of_formats
from bytefloor.tools.profile_tables import (
    Sheet,
    by_change,
    by_depth,
    by_kind,
    by_layer,
    facts,
    headline,
    of_model,
    speed,
    trust,
)

PIPE_WIDTH = 200


def print_profile(profile: Profile) -> None:
    """Every step by kind, the first token by layer, the model, and what would change it."""
    console = _console()
    console.print(f"[bold]{escape(profile.model)}[/bold], {escape(', '.join(facts(profile)))}")
    for note in profile.notes:
        console.print(f"note: {escape(note)}")
    model = fit(profile) if profile.tokens else None
    if model is not None:
        words = "; ".join(f"[bold]{name}[/bold], {said}" for name, said in MADE_OF.items())
        console.print(f"a token's time is {words}", soft_wrap=True)
    for step in (*profile.tokens, *profile.chunks):
        _print_step(console, profile, step, model)
    if model is None:
        return
    token = profile.tokens[0]
    _print_sheet(console, f"\n{token.title}, by layer", by_layer(profile, token, model))
    console.print(f"\nthe model: {of_model(model)}", soft_wrap=True)
    _print_sheet(console, "time against depth", by_depth(profile, model))
    written = [change for change in changes_of_formats(profile, model) if change.is_written]
    title = "\nwhat would change it: formats that quantize writes"
    _print_sheet(console, title, by_change(profile, written))
    _print_sheet(console, "\nwhat would change it: the cache", by_change(profile, changes_of_caches(profile, model)))


def _console() -> Console:
    # Into a pipe nothing is folded: whoever reads it there wants whole lines.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _print_sheet(console: Console, title: str, sheet: Sheet) -> None:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 1))
    for i, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _print_step(console: Console, profile: Profile, step: StepProfile, model: FloorModel | None) -> None:
    console.print(f"\n[bold]{step.title}: {headline(profile, step)}[/bold]")
    console.print(trust(step))
    _print_sheet(console, "", by_kind(profile, step, model))
    if profile.tokens and step is profile.tokens[0]:
        for part in worth_words(parts_by_kind(profile, step, model)):
            console.print(f"  {explain(part)}", soft_wrap=True)


def print_comparison(a: Profile, b: Profile, steps: Sequence[ComparedStep]) -> None:
    """By kind, both times and the difference."""
    console = _console()
    for name, profile in (("A", a), ("B", b)):
        console.print(f"{name}: [bold]{escape(profile.model)}[/bold], {escape(', '.join(facts(profile)))}")
    for compared in steps:
        first, then = compared.steps
        console.print(
            f"\n[bold]{first.title}[/bold]: A {first.wall_us:,.1f} us, B {then.wall_us:,.1f} us, "
            f"{then.wall_us - first.wall_us:+,.1f} us ({then.wall_us / first.wall_us - 1:+.1%})"
        )
        rows = [
            (
                row.name,
                "" if row.n_launches == (0, 0) else " / ".join(str(n) for n in dict.fromkeys(row.n_launches)),
                *(f"{us:,.1f}" for us in row.us),
                f"{row.more_us:+,.1f}",
                "" if row.share is None else f"{row.share:.1%}",
            )
            for row in compared.differences
        ]
        headings = ("part", "launches", "A, us", "B, us", "difference", "of all of it")
        _print_sheet(console, "", Sheet(headings, tuple(rows)))
        if compared.miss is not None and compared.predicted is not None and compared.predicted.us is not None:
            us = compared.predicted.us
            said = f"A's model says {us:,.1f} us for B, {speed(1e6 / us)} tok/s"
            console.print(f"{said}: {compared.miss:+.1%} beside what was measured")
