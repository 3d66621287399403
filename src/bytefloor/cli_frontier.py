"""The verb ``frontier`` and its flags. Heavy imports stay inside, as in `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bytefloor.cli_flags import DeviceOption, ModelOption, parse_size
from bytefloor.errors import RequestError
from bytefloor.tools import interrupt


def frontier(
    model: ModelOption = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="The text; without it standard input is read.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            metavar="NAME[=WORDS]",
            help="A built-in recipe, or a new one: 'mine=affine-8b *.up_proj.*=affine-4b'. May be repeated; else all.",
        ),
    ] = None,
    context: Annotated[
        Any, typer.Option("-c", "--context", parser=parse_size, metavar="N", help="Positions of a window (512).")
    ] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", help="No more windows than this.")] = None,
    depth: Annotated[
        Any, typer.Option("-d", "--depth", parser=parse_size, metavar="N", help="Time tokens at this depth too.")
    ] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens of a timing.")] = 128,
    repeats: Annotated[int, typer.Option("-r", "--repeats", min=1, help="Timings of which the median counts.")] = 5,
    save: Annotated[Path | None, typer.Option("--save", help="Write the rows to this file too, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw quality against speed, or bytes on a CPU.")
    ] = None,
    keep_files: Annotated[
        Path | None, typer.Option("--keep-files", metavar="DIR", help="Keep what is written, under the recipes' names.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure several recipes of one model: size, speed, distance from the source."""
    with interrupt.at_once():
        from bytefloor.quantize.recipes import choose_recipes
        from bytefloor.tools.frontier import FrontierOptions
        from bytefloor.tools.frontier import frontier as measure
        from bytefloor.tools.frontier_view import check_plot, show
        from bytefloor.tools.perplexity import read_text

    if depth is not None and depth < 1:
        raise RequestError(f"-d {depth}: expected at least 1; an empty cache is timed anyway")
    check_plot(plot)
    options = FrontierOptions(
        choose_recipes(tuple(recipe or ())), context, chunks, depth, tokens, repeats, keep_files, device
    )
    raise typer.Exit(show(measure(model, read_text(file), options), save, plot))
