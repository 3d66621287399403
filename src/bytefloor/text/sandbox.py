"""Runs a chat template. Templates come with model files, so they are programs of strangers.

They see strings, numbers, lists and nothing else; a budget of steps ends those that would run on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from bytefloor.errors import RequestError
from bytefloor.text.template_limits import (
    LARGEST,
    LIMITED,
    MOST_ITEMS,
    MOST_LETTERS,
    check_method,
    check_percent,
    check_size,
    limited,
)

#: What one rendering may cost: a loop's round one step, a call five. A thousand messages need a few tens of thousands.
MAX_STEPS = 1_000_000
_CALL_STEPS = 5
_MAX_EXPONENT = 64
_BUDGET = "__steps_left"


class _Refusal(Exception):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set on the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget: rounds of loops and calls cost steps."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "counted")
        for concat in tree.find_all(nodes.Concat):  # `~`, which is no operator to the sandbox
            concat.nodes = [_filtered(operand, "joined") for operand in concat.nodes]
        return tree

    # The base class's own parameter names, which keep clear of keyword arguments a template may pass.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls on behalf of the template."""
        _spend(__context, _CALL_STEPS)
        check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Adds, multiplies, raises and formats, within bounds."""
        if operator == "%" and isinstance(left, str):
            check_percent(left)
            check_size(right)
        if operator == "*" and any(isinstance(value, int) and abs(value) > LARGEST for value in (left, right)):
            raise SecurityError("a chat template may not multiply numbers of more than 256 bits")
        if operator == "+":
            _bounded(left)
            _bounded(right)
        if operator == "**" and not (abs(right) <= _MAX_EXPONENT and abs(left) <= MOST_ITEMS):
            raise SecurityError(f"{left} ** {right} is beyond what a chat template may compute")
        for made, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(made, (str, list, tuple)) and len(made) * count > MOST_ITEMS:
                raise SecurityError(f"a chat template may not repeat something into more than {MOST_ITEMS} items")
        return super().call_binop(context, operator, left, right)


def _filtered(expression: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, expression), name, [], [], None, None, lineno=expression.lineno)


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MOST_LETTERS // 2:
        raise SecurityError(f"a chat template may not make texts longer than {MOST_LETTERS}")
    return value


def _shown(value: Any) -> Any:
    """What is about to be written down."""
    if isinstance(value, (list, tuple, dict)):
        check_size(value)
    return value


def _joined(value: Any) -> Any:
    """What is about to become part of a text."""
    return _bounded(_shown(value))


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(context, 1)
        yield item


def _spend(context: Context, n_steps: int) -> None:
    # Kept among what the rendering was given, which a template's own assignments do not reach.
    steps: list[int] = context.parent[_BUDGET]
    steps[0] -= n_steps
    if steps[0] < 0:
        raise SecurityError(f"the chat template took more than {MAX_STEPS} steps")


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as models were trained on it: no HTML escapes, characters as themselves (`ensure_ascii` is not heeded)."""
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=False, indent=indent, **allowed)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        finalize=_shown,
    )
    environment.filters["counted"] = _counted
    environment.filters["joined"] = _joined
    environment.filters["tojson"] = _tojson
    for name in LIMITED:
        environment.filters[name] = limited(name, environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compiled(source: str) -> Callable[[Mapping[str, Any]], str]:
    """The template as a function of its variables. It raises RequestError, with the template's words if it refuses."""
    try:
        template = _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as problem:
        raise RequestError(f"the model's chat template cannot be read: {problem}") from problem

    def render(variables: Mapping[str, Any]) -> str:
        try:
            return template.render({**variables, _BUDGET: [MAX_STEPS]})
        except _Refusal as refusal:
            raise RequestError(f"the model's chat template refuses these messages: {refusal}") from None
        except Exception as problem:  # whatever a stranger's program does wrong is not a bug of ours
            raise RequestError(f"the model's chat template failed on these messages: {problem}") from problem

    return render
