"""The verb ``profile`` and its flags. Heavy imports stay inside, as in `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bytefloor.cli_flags import DeviceOption, KvOption, parse_sizes
from bytefloor.errors import RequestError
from bytefloor.tools import interrupt
from bytefloor.tools.outputs import check_output

OUTPUTS = {
    "--save": (b'{\n "model":', "a profile"),
    "--trace": (b'{"traceEvents":', "a trace"),
    "--html": (b"<!doctype html>", "a page"),
}
"""How each file begins, and what it is: nothing else is overwritten."""


def profile(
    call: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help="As for run; synthetic:MODEL/MIXTURE too."),
    ] = None,
    depths: Annotated[
        str, typer.Option("-d", "--depth", help="Positions in the cache before a token, by commas; empty for none.")
    ] = "0,4096,32768",
    prompts: Annotated[
        str, typer.Option("-p", "--prompt", help="Rows of a chunk of a prompt, by commas; empty for none.")
    ] = "2048",
    repeats: Annotated[int, typer.Option("-r", "--repeats", help="Runs of which the medians count.")] = 10,
    kv: KvOption = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.json", help="Keep it, for the flags below.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="Write a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write a page with plots, all in one file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.json", help="Show this saved profile; measure nothing.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A.json B.json", help="Show two saved profiles side by side."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Show where the time of a token goes, kernel by kernel."""
    if report is not None or compare is not None:
        _refuse_measuring(call, "--report" if report is not None else "--compare")
    if compare is not None:
        _compare(compare, (report, trace, html))
        return
    for flag, path in (("--save", save), ("--trace", trace), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{flag} {path}: there is no folder {path.parent}")
        if path is not None:
            check_output(path, *OUTPUTS[flag])
    if repeats < 1:
        raise RequestError(f"-r {repeats}: expected at least 1")
    sizes = parse_sizes("-d", depths, 0), parse_sizes("-p", prompts, 1)
    with interrupt.at_once():
        from bytefloor.tools.profile import ProfileOptions
        from bytefloor.tools.profile import profile as measure
        from bytefloor.tools.profile_data import read_profile, write_profile
        from bytefloor.tools.profile_html import write_html
        from bytefloor.tools.profile_trace import write_trace
        from bytefloor.tools.profile_view import print_profile

    found = measure(model, ProfileOptions(*sizes, repeats, device, kv)) if report is None else read_profile(report)
    # What was measured is kept before anything else is made of it.
    for path, write in ((save, write_profile), (trace, write_trace), (html, write_html)):
        if path is not None:
            write(found, path)
    print_profile(found)


def _refuse_measuring(call: typer.Context, flag: str) -> None:
    """Flags that say what to measure say nothing where nothing is measured."""
    for name in ("model", "depths", "prompts", "repeats", "kv", "save", "device"):
        source = call.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            spelled = next(p.opts[0] for p in call.command.params if p.name == name)
            raise RequestError(f"{spelled}: has no effect beside {flag}, which measures nothing")


def _compare(paths: tuple[Path, Path], others: tuple[Path | None, ...]) -> None:
    if any(path is not None for path in others):
        raise RequestError("--compare: goes without --report, --trace and --html")
    with interrupt.at_once():
        from bytefloor.tools.profile_compare import compare
        from bytefloor.tools.profile_data import read_profile
        from bytefloor.tools.profile_view import print_comparison

    a, b = (read_profile(path) for path in paths)
    print_comparison(a, b, compare(a, b))
