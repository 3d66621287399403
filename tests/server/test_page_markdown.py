"""How the chat page draws an answer, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from server.browser import MISSING, ChatPage, chromium
from server.live import Live

DRAWN = "return draw(make('div'), arguments[0]).innerHTML"
CASES = {
    "plain": ("a < b & c", "<p>a &lt; b &amp; c</p>"),
    "lines": ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
    "marks": ("**a** *b* `c` ~~d~~ ***e***", "<p><strong>a</strong> <em>b</em> <code>c</code> <s>d</s> "
              "<strong><em>e</em></strong></p>"),
    "no marks": ("2 * 3 * 4 ** 5 a*b*c snake_case_name", "<p>2 * 3 * 4 ** 5 a*b*c snake_case_name</p>"),
    "unclosed": ("**a `b", "<p>**a `b</p>"),
    "escaped": (r"\*a\* \# b", "<p>*a* # b</p>"),
    "code wins": ("`**a**` ``b ` c``", "<p><code>**a**</code> <code>b ` c</code></p>"),
    "headings": ("# a\n### b **c**\ntext", "<h3>a</h3><h5>b <strong>c</strong></h5><p>text</p>"),
    "no heading": ("#tag", "<p>#tag</p>"),
    "rule": ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    "list": ("text:\n- a\n- b\n  more", "<p>text:</p><ul><li><p>a</p></li><li><p>b\nmore</p></li></ul>"),
    "numbers": ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    "nested": ("1. a\n   - b\n   - c\n2. d", '<ol start="1"><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul>'
               "</li><li><p>d</p></li></ol>"),
    "two lists": ("- a\n1. b", '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>'),
    "after a list": ("- a\n\nb", "<ul><li><p>a</p></li></ul><p>b</p>"),
    "quote": ("> a\n> - b\nc", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><p>c</p>"),
    "table": ("|a|b|\n|---|:-:|\n|**c**|d\\|e|\nf", '<div class="table" tabindex="0"><table><thead><tr><th>a</th>'
              '<th class="center">b</th></tr></thead><tbody><tr><td><strong>c</strong></td><td class="center">d|e</td>'
              "</tr></tbody></table></div><p>f</p>"),
    "no table": ("a | b\nc", "<p>a | b\nc</p>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, server: Live) -> Iterator[ChatPage]:
    if MISSING is not None:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield ChatPage(driver, server.url)


@pytest.mark.parametrize("case", CASES)
def test_markdown(page: ChatPage, case: str) -> None:
    text, drawn = CASES[case]
    assert page.script(DRAWN, text) == drawn


@pytest.mark.parametrize("tail", ["\n```", "\n```\nafter", ""], ids=["closed", "followed", "open"])
def test_code_is_as_it_was_written(page: ChatPage, tail: str) -> None:
    code = "if a:\n\n    # **b** <i>\n- c"
    texts = "[first.querySelector('code'), first, ...others].map((element) => element.textContent)"
    read = f"const [first, ...others] = draw(make('div'), arguments[0]).children; return {texts}"
    found = page.script(read, f"```python\n{code}{tail}")
    assert found[0] == code
    assert found[1].startswith("python")
    assert found[2:] == (["after"] if "after" in tail else [])


def test_a_growing_text_keeps_what_stays(page: ChatPage) -> None:
    page.script("window.at = draw(make('div'), '# a\\n\\nb'); window.kept = [...at.children]")
    same = page.script("draw(at, '# a\\n\\nb c\\n\\n- d'); return [...at.children].map((e, i) => e === kept[i])")
    assert same == [True, False, False]
    assert page.script("draw(at, 'x'); return at.innerHTML") == "<p>x</p>"


@pytest.mark.parametrize(
    "text",
    ["> " * 3000 + "a", "**a " * 10000, "*a " * 10000, "`" * 20000, "`a " * 10000, "|" * 20000 + "\n" + "|-" * 9000,
     "\n".join("  " * i + "- a" for i in range(300)), "# " + " " * 20000 + "#", "```" + " " * 20000 + "`",
     "- a" + "\n" * 20000 + "- b", "\\" * 20001, "- " * 5000],
    ids=["quotes", "bold", "emphasis", "ticks", "code", "table", "lists", "heading", "fence", "blanks", "slashes",
         "markers"],
)  # fmt: skip
def test_no_text_holds_the_page_up(page: ChatPage, text: str) -> None:
    began = time.monotonic()
    assert page.script("return draw(make('div'), arguments[0]).childElementCount", text) > 0
    assert time.monotonic() - began < 4
