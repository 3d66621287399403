"""The command line of ``quantize``; a file of its own, since its options are many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bytefloor.cli_flags import DeviceOption
from bytefloor.tools import interrupt


def quantize(
    format_name: Annotated[
        str,
        typer.Option("-f", "--format", help="Q4_K_M, Q8_0 and other GGUF names; affine-4b; FP4; FP8."),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(help="What to write: FILE.gguf, or a directory for affine, FP4 and FP8; none with --dry-run."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="The source: a GGUF file, a directory, or a pulled name.")
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            "--match",
            metavar="PATTERN=FORMAT",
            help="Another format, or 'keep', for tensors of that name ('*.down_proj.*=affine-8b'); the first counts.",
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option("--target-group-size", help="Weights that share an affine scale: 32, 64 or 128 (64).")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", metavar="TEXT", help="A text that tells which columns count.")
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback/--no-fallback", help="Another format where rows do not fit the one asked for.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="The plan and the losses, as JSON.")] = False,
    device: DeviceOption = "auto",
) -> None:
    """Write a model in other formats; print what each tensor gets and what it loses."""
    with interrupt.at_once():
        from bytefloor.tools.quantize import QuantizeOptions
        from bytefloor.tools.quantize import quantize as make

    matches = tuple(match or ())
    make(model, out, QuantizeOptions(format_name, matches, group, calibrate, fallback, dry_run, json_output, device))
