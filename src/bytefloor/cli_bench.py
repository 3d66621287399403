"""The verbs of ``bench``. Heavy imports stay inside them, as in `cli.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from bytefloor.cli_flags import ContextOption, DeviceOption, KvOption, parse_sizes
from bytefloor.errors import RequestError
from bytefloor.tools import interrupt
from bytefloor.tools.packages import CLIENT, SERVER, require

bench_app = typer.Typer(invoke_without_command=True)
OutputOption = Annotated[str, typer.Option("-o", "--output", help="md, json or csv.")]
SaveOption = Annotated[Path | None, typer.Option("--save", help="Write the rows to this file too, as JSON.")]
RepeatsOption = Annotated[int, typer.Option("-r", "--repeats", help="Measurements of which the median counts.")]


@bench_app.callback()
def bench(
    call: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", metavar="MODEL", help="May be repeated; synthetic:MODEL/MIXTURE too."),
    ] = None,
    prompts: Annotated[str, typer.Option("-p", "--prompt", help="Prompt lengths, by commas; empty for none.")] = "512",
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of a measurement.")] = 128,
    depths: Annotated[str, typer.Option("-d", "--depth", help="Positions in the cache before it, by commas.")] = "0",
    batches: Annotated[str, typer.Option("-b", "--batch", help="Sequences that decode together, by commas.")] = "1",
    repeats: RepeatsOption = 5,
    context: ContextOption = None,
    kv: KvOption = None,
    output: OutputOption = "md",
    save: SaveOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure tokens a second, and their share of the floor."""
    if call.invoked_subcommand is not None:
        _refuse_options_before(call)
        return
    with interrupt.at_once():
        from bytefloor.tools.bench import BenchOptions
        from bytefloor.tools.bench import bench as measure

    _check_bench(output, repeats)
    if tokens < 1:
        raise RequestError(f"-n {tokens}: expected at least 1")
    options = BenchOptions(
        parse_sizes("-p", prompts, 1), tokens, parse_sizes("-d", depths, 0), repeats, device, context, kv,
        parse_sizes("-b", batches, 1),
    )  # fmt: skip
    names: list[str | None] = [*(model or ())] or [None]
    _write_rows((row for name in names for row in measure(name, options)), output, save)


@bench_app.command()
def kernels(
    formats: Annotated[str, typer.Option("-f", "--formats", help="Weight formats, by commas; empty for all.")] = "",
    shapes: Annotated[
        str, typer.Option("-s", "--shapes", help="Shapes or words of their names (75MB, qwen3-8b, down), by commas.")
    ] = "",
    rows: Annotated[
        str,
        typer.Option("--rows", help="By commas: instead, products of so many rows, against unpacking and cuBLAS."),
    ] = "",
    repeats: RepeatsOption = 7,
    output: OutputOption = "md",
    save: SaveOption = None,
) -> None:
    """Time each kernel alone, over weights that no cache holds."""
    with interrupt.at_once():
        from bytefloor.tools.bench_kernels import KernelOptions, bench_kernels
        from bytefloor.tools.bench_row_products import bench_row_products

    _check_bench(output, repeats)
    words = [tuple(part.strip() for part in text.split(",") if part.strip()) for text in (formats, shapes)]
    options = KernelOptions(words[0], words[1], repeats, parse_sizes("--rows", rows, 1))
    _write_rows(bench_row_products(options) if options.rows else bench_kernels(options), output, save)


@bench_app.command()
def serve(
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="MODEL", help="As for bench; it is served for the while.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="http://HOST:PORT", help="Ask this bytefloor server instead.")
    ] = None,
    streams: Annotated[
        str, typer.Option("-s", "--streams", help="Requests at a time, by commas; cold ones come one at a time.")
    ] = "",
    prompts: Annotated[
        str, typer.Option("-p", "--prompt", help="Prompt lengths, by commas (128; with --cold 512).")
    ] = "",
    tokens: Annotated[
        str, typer.Option("-n", "--tokens", metavar="N", help="Tokens of each answer; 64..192 for lengths in between.")
    ] = "128",
    requests: Annotated[int, typer.Option("-r", "--requests", help="Requests of each stream.")] = 4,
    rates: Annotated[
        str,
        typer.Option("--rate", help="By commas: instead, requests that arrive so many a second, whatever runs."),
    ] = "",
    cold: Annotated[bool, typer.Option("--cold", help="Each request on a new connection.")] = False,
    temp: Annotated[float, typer.Option("--temp", help="0 takes the best token always.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, arrivals and sampling.")] = 0,
    context: ContextOption = None,
    kv: KvOption = None,
    output: OutputOption = "md",
    save: SaveOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure what a server gives its clients, and what HTTP costs."""
    require(CLIENT if url is not None else SERVER, "bench serve")
    with interrupt.at_once():
        from bytefloor.tools.bench_serve import LoadOptions, bench_serve

    _check_bench(output, requests)
    least, most = _lengths(tokens)
    streams = streams or ("1" if cold else "1,4,8,16,32,64")
    options = LoadOptions(
        parse_sizes("-s", streams, 1), parse_sizes("-p", prompts or ("512" if cold else "128"), 1), most, requests,
        _rates(rates), cold, temp, seed, device, context, kv, least,
    )  # fmt: skip
    _write_rows(bench_serve(model, url, options), output, save)


def _lengths(text: str) -> tuple[int, int]:
    """N, or N..M."""
    first, dots, last = text.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError:
        least, most = 0, 0
    if not 1 <= least <= most:
        raise RequestError(f"-n {text}: expected a number of tokens, at least 1, or two like 64..192")
    return least, most


def _rates(text: str) -> tuple[float, ...]:
    """Numbers above 0 by commas."""
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = (0.0,)
    if any(not 0 < rate < math.inf for rate in rates):
        raise RequestError(f"--rate {text}: expected numbers above 0")
    return rates


def _refuse_options_before(call: typer.Context) -> None:
    """Options of bench itself say nothing to what it calls, and would be lost."""
    for parameter in call.command.params:
        source = call.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            verb = f"bench {call.invoked_subcommand}"
            raise RequestError(f"{parameter.opts[0]}: stands before {call.invoked_subcommand}; see bytefloor {verb} -h")


def _check_bench(output: str, repeats: int) -> None:
    if output not in ("md", "json", "csv"):
        raise RequestError(f"-o {output}: expected md, json or csv")
    if repeats < 1:
        raise RequestError(f"-r {repeats}: expected at least 1")


def _write_rows(rows: Iterable[Any], output: str, save: Path | None) -> None:
    """Each row as it is measured; what came before an error or Ctrl-C is kept."""
    from bytefloor.tools.bench_rows import RowWriter

    writer = RowWriter(output, save)
    try:
        for row in rows:
            writer.add(row)
    finally:
        writer.finish()
