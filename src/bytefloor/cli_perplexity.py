"""The command line of ``perplexity``; a file of its own, since its options are many."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bytefloor.cli_flags import DeviceOption, KvBudgetOption, KvOption, ModelOption, parse_size
from bytefloor.tools import interrupt


def perplexity(
    model: ModelOption = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="The text; without it standard input is read.")
    ] = None,
    context: Annotated[
        Any, typer.Option("-c", "--context", parser=parse_size, metavar="N", help="Positions of a window (512).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", help="A window every so many tokens, which count; else side by side.")
    ] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", help="No more windows than this.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help='The text is JSON lines, {"messages": [...]}; the assistant\'s turns count.')
    ] = False,
    by: Annotated[str, typer.Option("--by", help="chunk, or token: one row at a time, as answers are made.")] = "chunk",
    base: Annotated[
        str | None, typer.Option("--base", help="A model to compare with, or what --save-base wrote.")
    ] = None,
    save_base: Annotated[
        Path | None, typer.Option("--save-base", metavar="FILE", help="Keep all probabilities, for --base.")
    ] = None,
    kv: KvOption = None,
    kv_budget: KvBudgetOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="All of it, as JSON.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the row to this file too, as JSON.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure how well a model predicts a text, and how far that is from another's predictions."""
    with interrupt.at_once():
        from bytefloor.tools.bench_rows import RowWriter
        from bytefloor.tools.perplexity import PerplexityOptions, measure, read_text
        from bytefloor.tools.perplexity_view import RunningEstimate, lines_of

    text = read_text(file)
    writer = RowWriter("none", save)
    options = PerplexityOptions(context, stride, chunks, chat, by, base, save_base, kv, kv_budget, device)
    with RunningEstimate() as show:
        row = measure(model, text, options, show)
    if save_base is not None:
        typer.echo(f"written: {save_base}, {save_base.stat().st_size:,} bytes", err=True)
    writer.add(row)
    typer.echo(json.dumps(asdict(row), indent=1) if json_output else "\n".join(lines_of(row)))
