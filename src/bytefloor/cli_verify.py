"""The verb ``verify`` and its flags. Heavy imports stay inside, as in `cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bytefloor.cli_flags import DeviceOption, KvOption
from bytefloor.tools import interrupt


def verify(
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", help="As for run; synthetic:MODEL/MIXTURE too."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The text that is read; '-' is standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Read the text from a file.")] = None,
    ops: Annotated[
        str | None,
        typer.Option("--ops", metavar="A..B", help="Only these, by number or part: 12..40, layers.3, ..layers.0.mlp."),
    ] = None,
    lists_all: Annotated[bool, typer.Option("--all", help="Show every op, not the wrong ones alone.")] = False,
    kv: KvOption = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write every line to this file too, as JSON.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Prove a model's arithmetic op by op; status 1 where any differs."""
    with interrupt.at_once():
        from rich.console import Console

        from bytefloor.tools.outputs import check_rows
        from bytefloor.tools.run import read_prompt
        from bytefloor.tools.session import OpeningBar
        from bytefloor.tools.verify import VerifyOptions
        from bytefloor.tools.verify import verify as climb
        from bytefloor.tools.verify_view import show

    if save is not None:
        check_rows(save)
    text = read_prompt(prompt, file) if prompt is not None or file is not None else None
    opening = OpeningBar(Console(stderr=True, highlight=False), model or "the demo model")
    lines = climb(model, VerifyOptions(device, kv, text, ops), opening)
    raise typer.Exit(show(lines, lists_all, save))
