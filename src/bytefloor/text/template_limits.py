"""What a chat template may make with the text functions of its language: a stranger's column of a billion spaces would
fill the memory of whoever opens the file."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.sandbox import SecurityError

MOST_LETTERS = 64_000_000
"""Of a text that is joined: sixteen times the longest prompt."""
MOST_ITEMS = 1_000_000
"""Of a list, or letters of a text, that is made by repeating one; parts of what is written down."""
MOST_WIDTH = 10_000
"""Of a column, an indentation, a batch."""
LARGEST = 1 << 256
"""Factor of a product: beyond, one operation takes seconds."""
WIDTHS = frozenset(["center", "indent", "batch", "slice", "wordwrap", "truncate", "tojson"])
LIMITED = (
    *("batch", "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint"),
    *("replace", "safe", "slice", "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode"),
    *("urlize", "wordcount", "wordwrap", "xmlattr"),
)
"""Filters that write down what they are given, or more. Others are called again and again on whole conversations."""
_PERCENT = re.compile(r"%[^%a-zA-Z]*(?:\d{5}|\*)")
_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")


def check_widths(values: Sequence[Any]) -> None:
    """SecurityError for a number that would be a column too wide."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_WIDTH:
            raise SecurityError(f"a width of {value:.3g} is beyond what a chat template may ask for")


def check_percent(text: str) -> None:
    """Of ``text % values``."""
    if _PERCENT.search(text):
        raise SecurityError("a chat template may not format with widths of its own or above 9,999")


def check_size(value: Any) -> None:
    """SecurityError for what would be very long once it is written down, however often it holds the same."""
    n_items = n_letters = 0
    stack = [value]
    while stack:
        one = stack.pop()
        n_items += 1
        if isinstance(one, str):
            n_letters += len(one)
        elif isinstance(one, Mapping):
            stack += itertools.chain.from_iterable(one.items())
        elif isinstance(one, (list, tuple)):
            stack += one
        if n_items + len(stack) > MOST_ITEMS or n_letters > MOST_LETTERS:
            raise SecurityError(f"a chat template may not make texts longer than {MOST_LETTERS}, or of so many parts")


def check_replaced(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    """Of ``text.replace(old, new)``."""
    if text.count(str(old)) * len(str(new)) > MOST_LETTERS:
        raise SecurityError(f"a chat template may not make texts longer than {MOST_LETTERS}")


def check_joined(items: Any, separator: str) -> None:
    """Of ``separator.join(items)``."""
    check_size(items)
    if isinstance(items, (list, tuple)) and len(items) * len(separator) > MOST_LETTERS:
        raise SecurityError(f"a chat template may not make texts longer than {MOST_LETTERS}")


def check_method(function: Any, args: Sequence[Any], more: Mapping[str, Any]) -> None:
    """Before a template calls a text's method."""
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps format
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in ("format", "format_map"):
        if _BRACES.search(text):
            raise SecurityError("a chat template may not format with widths of its own or above 9,999")
        check_size([*args, *more.values()])
    elif name == "replace":
        check_replaced(text, *args)
    elif name == "join":
        for items in args:
            check_joined(items, text)
    else:
        check_widths([*args, *more.values()])


def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter of that name, which refuses first what would be too much."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **more: Any) -> Any:
        value, rest = args[place], args[place + 1 :]
        if isinstance(value, Iterator):
            value = list(itertools.islice(value, MOST_ITEMS + 1))
        if name in WIDTHS:
            check_widths([*rest, *more.values()])
        if name == "format":
            check_percent(str(value))
            check_size([*rest, *more.values()])
        elif name == "replace":
            check_replaced(str(value), *rest)
        elif name == "join":
            check_joined(value, str(rest[0]) if rest else str(more.get("d", "")))
        else:
            check_size(value)
        return function(*args[:place], value, *rest, **more)

    return checked
