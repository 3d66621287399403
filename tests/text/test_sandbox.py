"""Templates are programs of strangers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bytefloor.errors import RequestError
from bytefloor.text.sandbox import compiled


def render(source: str, **variables: Any) -> str:
    return compiled(source)(variables)


def refused_within(limit_s: float, source: str, match: str = "chat template") -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=match):
        render(source)
    assert time.process_time() - start < limit_s


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ items.append(3) }}",
        "{% set _ = table.update({'a': 2}) %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_beyond_its_variables(source: str) -> None:
    items, table = [1, 2], {"a": 1}
    with pytest.raises(RequestError, match="chat template"):
        render(source, items=items, table=table)
    assert items == [1, 2]
    assert table == {"a": 1}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ [1] | map(attribute='__class__') | first }}",
    ],
)
def test_what_a_template_must_not_see_is_empty(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(999999999) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set __steps_left = [10**9] %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_cannot_run_for_ever_or_fill_the_memory(source: str) -> None:
    refused_within(10, source)


DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=10**64) %}{% for i in range(25) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        DOUBLED + "{{ ns.x | string | length }}",
        DOUBLED + "{{ ns.x }}",
        DOUBLED + "{{ ns.x | tojson }}",
        DOUBLED + "{{ [ns.x] | join(',') }}",
        DOUBLED + "{{ (ns.x ~ 'a') | length }}",
        DOUBLED + "{{ ('%s' % ns.x) | length }}",
        DOUBLED + "{{ ('%s' % [ns.x]) | length }}",
        DOUBLED + "{{ ('%s' | format(ns.x)) | length }}",
        DOUBLED + "{{ '{}'.format(ns.x) | length }}",
        DOUBLED + "{{ ns.x | upper | length }}",
        DOUBLED + "{{ ns.x | pprint | length }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ 'a\\t'.expandtabs(999999999) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
        "{{ ('a\\n' * 1000) | indent(1000000) }}",
        "{{ [1, 2] | tojson(indent=100000000) }}",
        "{{ (['a' * 1000000] * 1000) | join }}",
        "{{ ''.join(['a' * 1000000] * 1000) }}",
        "{{ ('a' * 100000).join([''] * 100000) }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
    ],
)
def test_a_template_cannot_make_much_of_little(source: str) -> None:
    refused_within(2, source, match="may not|may ask for")


def test_what_templates_really_do_with_texts_is_done() -> None:
    assert render("{{ '%05.2f|%s|%d%%' % (1.5, 'x', 12345) }}") == "01.50|x|12345%"
    assert render("{{ '{:>5}|{}'.format('a', 1700000000) }}") == "    a|1700000000"
    assert (
        render("{{ 'a,b'.split(',', 1) | join(' ') }}{{ 'a'.center(5) }}|{{ 'ab' | replace('b', 'c') }}")
        == "a b  a  |ac"
    )
    assert render("{{ [1, [2, 'x']] }}{{ {'a': 1} }}{{ items | map('upper') | join('-') }}", items=["a", "b"]) == (
        "[1, [2, 'x']]{'a': 1}A-B"
    )
    assert render("{{ 'a\\nb' | indent(2) }}{{ 1700000000 * 1000 }}") == "a\n  b1700000000000"


@pytest.mark.parametrize("operator", ["~", "+"])
def test_a_text_that_doubles_stops_at_the_limit_and_not_where_the_memory_ends(operator: str) -> None:
    doubling = f"{{% for i in range(30) %}}{{% set ns.s = ns.s {operator} ns.s %}}{{% endfor %}}"
    with pytest.raises(RequestError, match="texts longer than"):
        render("{% set ns = namespace(s='aaaaaaaa') %}" + doubling)


def test_each_rendering_has_a_budget_of_its_own() -> None:
    run = compiled("{% for i in range(9000) %}{% for j in range(50) %}{% endfor %}{% endfor %}done")
    assert run({}) == run({}) == "done"


def test_what_a_template_refuses_is_in_its_own_words() -> None:
    """C01."""
    with pytest.raises(RequestError, match="refuses these messages: only one system turn"):
        render("{{ raise_exception('only one system turn') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'open", "{% strange %}", "{{ x | nofilter }}"])
def test_a_template_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        compiled(source)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ 'a' + 1 }}", "{{ [1] | tojson(indent='x') + 2 }}"]
)
def test_a_template_that_fails_is_a_refused_request_not_a_crash(source: str) -> None:
    with pytest.raises(RequestError, match="failed on these messages"):
        render(source)


def test_json_has_no_html_escapes_and_keeps_characters() -> None:
    value = {"a": "<é> & 'x'", "b": [1, True, None]}
    assert render("{{ v | tojson }}", v=value) == '{"a": "<é> & \'x\'", "b": [1, true, null]}'
    assert render("{{ v | tojson(indent=2) }}", v={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ v | tojson(ensure_ascii=True) }}", v="\ue000é") == '"\ue000é"'
    assert render("{{ v | tojson(separators=(',', ':'), sort_keys=True) }}", v={"b": 1, "a": 2}) == '{"a":2,"b":1}'


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loop_controls_the_generation_tag_and_the_date_are_there() -> None:
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ x }}{% endgeneration %}b", x=1) == "a1b"
    assert render("{{ strftime_now('%Y') }}") >= "2025"


def test_loops_keep_all_that_they_offer() -> None:
    source = "{% for k, v in t.items() if v %}{{ loop.index }}/{{ loop.length }}{{ k }}{{ loop.last }},{% endfor %}"
    assert render(source, t={"a": 1, "b": 0, "c": 2}) == "1/2aFalse,2/2cTrue,"
    tree = [{"n": 1, "c": [{"n": 2, "c": []}]}]
    assert render("{% for x in t recursive %}{{ x.n }}{{ loop(x.c) }}{% else %}.{% endfor %}", t=tree) == "12."
