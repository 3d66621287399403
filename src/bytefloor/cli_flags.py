"""Flags that verbs share, and how their values are read."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bytefloor.errors import RequestError


def parse_size(text: str) -> int:
    """32768, 32k or 1m."""
    digits, factor = text.strip().lower(), 1
    for suffix, value in (("k", 1024), ("m", 1024 * 1024)):
        if digits.endswith(suffix):
            digits, factor = digits[:-1], value
    try:
        return int(float(digits) * factor)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r}: expected a number such as 4096 or 32k") from None


def parse_sizes(flag: str, text: str, least: int) -> tuple[int, ...]:
    """Numbers by commas, none below the least."""
    try:
        sizes = tuple(parse_size(part) for part in text.split(",") if part.strip())
    except typer.BadParameter as error:
        raise RequestError(f"{flag} {text}: {error.message}") from None
    if any(size < least for size in sizes):
        raise RequestError(f"{flag} {text}: expected numbers from {least}")
    return sizes


ModelOption = Annotated[
    str | None,
    typer.Option("-m", "--model", help="A file, a directory, or a pulled name; without it the installed demo model."),
]
ContextOption = Annotated[
    Any,
    typer.Option(
        "-c",
        "--context",
        parser=parse_size,
        metavar="N",
        help="Positions of prompt and answer together, like 32k (8k, or what the model was made for).",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
KvOption = Annotated[
    str | None,
    typer.Option(
        "--kv",
        metavar="TYPE",
        help="What the cache keeps: bf16, the kernels' own way; in half the bytes int8 or fp8; without kernels, in a "
        "quarter, k4v2.",
    ),
]
KvBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--kv-budget",
        metavar="N",
        help="Of a longer prompt keep the N positions that its end attends to; sliding layers keep their windows.",
    ),
]
