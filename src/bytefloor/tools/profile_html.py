"""A profile as one HTML file that asks nobody for anything: no script, plots as SVG, light or dark as the reader is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from bytefloor.tools.floor_model import FloorModel, fit
from bytefloor.tools.profile_data import KINDS, Profile, StepProfile
from bytefloor.tools.profile_parts import GAPS, MADE_OF, explain, parts_by_kind, worth_words
from bytefloor.tools.profile_plots import (
    SHADES,
    WIDE,
    WIDTH,
    depth_plot,
    layer_bars,
    legend,
    roofline,
    token_bars,
)
from bytefloor.tools.profile_recipes import Change, changes_of_caches, changes_of_formats
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

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, even if somebody wrote it into the file."""
CHANGES = (
    "Bytes of each matrix in the format that quantize would give it, the floor of those, and what the model predicts; "
    "nothing is predicted where no kernel has a format, or the reference executor runs, which decodes what is stored. "
    "Tables kept: a format that only comes in files, with embedding and head as they are."
)


def write_html(profile: Profile, path: Path) -> None:
    """The whole page."""
    path.write_text(page_of(profile), encoding="utf-8")


def page_of(profile: Profile) -> str:
    """The text of the file."""
    model = fit(profile) if profile.tokens else None
    name = escape(profile.model)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{name}: where a token's time goes</title>
<style>
{_style()}</style>
</head>
<body>
<main>
<h1>{name}</h1>
<p class="facts">{", ".join(f"<span>{escape(fact)}</span>" for fact in facts(profile))}</p>
{"".join(f'<p class="note">note: {escape(note)}</p>' for note in profile.notes)}
{_numbers(profile)}
<div class="grid">
{"".join(_sections(profile, model))}
</div>
</main>
</body>
</html>
"""


def _style() -> str:
    sheet = (files("bytefloor.tools") / "profile_page.css").read_text(encoding="utf-8")
    names = [(f"k-{name}", name) for name in (*KINDS, GAPS)] + [(kind, name) for name, kind in SHADES.items()]
    return sheet + "".join(f".{kind} {{ fill: var(--{name}); background: var(--{name}); }}\n" for kind, name in names)


def _numbers(profile: Profile) -> str:
    """What matters most, large."""
    found: list[tuple[str, str]] = []
    for token in profile.tokens[:1]:
        floor_us = token.floor_us(profile.stream_gb_s)
        found += [
            (f"{speed(1e6 / token.wall_us)} tok/s", f"at depth {token.depth:,}, greedy"),
            (f"{floor_us / token.wall_us:.1%}", "of the floor"),
            (f"{speed(1e6 / floor_us)} tok/s", f"is the floor, {token.needed_bytes / 1e9:,.2f} GB a token"),
        ]
        if token.sampling_us is not None:
            found.append((f"{speed(1e6 / (token.wall_us + token.sampling_us))} tok/s", "sampled"))
        found.append((f"{token.n_launches}", "launches"))
    for chunk in profile.chunks[:1]:
        found.append((f"{chunk.rows * 1e6 / chunk.wall_us:,.0f} tok/s", f"of a prompt, {chunk.rows:,} rows"))
    return '<div class="numbers">' + "".join(f"<div><b>{a}</b><span>{b}</span></div>" for a, b in found) + "</div>"


def _sections(profile: Profile, model: FloorModel | None) -> Iterable[str]:
    if model is not None:
        shades = "".join(f'<span><i class="{SHADES[name]}"></i>{name}: {what}</span>' for name, what in MADE_OF.items())
        bars = _both_widths(token_bars(profile, WIDTH), token_bars(profile, WIDE))
        yield _section("A token's time", legend(profile) + bars + f'<p class="legend">{shades}</p>', "wide")
    yield _section("Roofline", _marks(profile) + roofline(profile))
    if model is not None:
        said = "The line is the model's: bytes at the pace of their formats, and a boundary for each launch."
        plot = f'<p class="quiet-text">{said}</p>{depth_plot(profile, model)}'
        yield _section("Time against depth", plot)
        token = profile.tokens[0]
        strip = _both_widths(layer_bars(profile, token, WIDTH), layer_bars(profile, token, WIDE))
        folded = f"<details><summary>as a table</summary>{_sheet(by_layer(profile, token, model))}</details>"
        yield _section(f"By layer, {token.title}", strip + folded, "wide")
    for step in (*profile.tokens, *profile.chunks):
        yield _step_section(profile, step, model)
    if model is not None:
        fitted = f'<p class="quiet-text">{escape(of_model(model))}</p>'
        yield _section("The model", fitted + _sheet(by_depth(profile, model)), "wide")
        yield _section(
            "What would change it: other formats", _changes(profile, changes_of_formats(profile, model)), "wide"
        )
        yield _section("What would change it: the cache", _changes(profile, changes_of_caches(profile, model)), "wide")


def _section(title: str, inner: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{inner}</section>\n'


def _both_widths(narrow: str, wide: str) -> str:
    """A plot across the page in two forms, of which one is shown: scaled, letters would become too small."""
    return f'<div class="if-narrow">{narrow}</div><div class="if-wide">{wide}</div>'


def _marks(profile: Profile) -> str:
    words = "Dots: the token. Squares: the chunk. Bytes are those that are really read."
    return f'<p class="quiet-text">{words if profile.chunks else "Bytes are those that are really read."}</p>'


def _sheet(sheet: Sheet, first: Callable[[str], str] = escape, last_is_all: bool = False) -> str:
    """A table. first: the HTML of a row's first cell."""
    lines = [_row([first(name), *map(escape, cells)]) for name, *cells in sheet.rows]
    if last_is_all:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="all">')
    head = "".join(f"<th>{escape(heading)}</th>" for heading in sheet.headings)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _coloured(name: str) -> str:
    return name if name == "all" else f'<i class="k-{name}"></i>{name}'


def _step_section(profile: Profile, step: StepProfile, model: FloorModel | None) -> str:
    said = f'<p>{escape(headline(profile, step))}</p><p class="quiet-text">{escape(trust(step))}</p>'
    table = _sheet(by_kind(profile, step, model), _coloured, last_is_all=True)
    words = ""
    if step.kind == "token":
        parts = worth_words(parts_by_kind(profile, step, model))
        words = f"<ul>{''.join(f'<li>{escape(explain(part))}</li>' for part in parts)}</ul>"
    return _section(step.title, said + table + words, "wide")


def _changes(profile: Profile, changes: Sequence[Change]) -> str:
    """With a bar beside each name, as long as its predicted rate."""
    best = max((change.shallow.tok_s or 0.0 for change in changes), default=0.0)
    rates = {change.name: (change.shallow.tok_s or 0.0) / best if best else 0.0 for change in changes}

    def with_bar(name: str) -> str:
        return f'<span class="rate"><b style="width:{rates[name]:.1%}"></b></span>{escape(name)}'

    return f'<p class="quiet-text">{escape(CHANGES)}</p>{_sheet(by_change(profile, changes), with_bar)}'
