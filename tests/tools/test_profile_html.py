"""The page of a profile: one file that asks nobody, drawn in a browser in both themes and at two widths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from selenium import webdriver

from bytefloor.tools.profile_data import KINDS, Profile
from bytefloor.tools.profile_html import page_of, write_html
from made_profiles import Truth, made_profile
from server.browser import MISSING, chromium

WIDTHS = (800, 1600)
THEMES = {"light": "rgb(251, 250, 248)", "dark": "rgb(22, 23, 26)"}
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()])
    .filter(([, r]) => r.width > 0);
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const [a, p] = texts[i], [b, q] = texts[j];
    const over = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const under = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (over > 1 && under > 3) found.push(`${a} / ${b}`);
  }
  const box = svg.getBoundingClientRect();
  for (const [a, r] of texts)
    if (r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1) found.push(`${a} outside`);
}
return found;
"""
SIZES = """
return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).filter(r => r.width > 0)
  .map(r => [r.width, r.height]);
"""
LETTERS = """
return Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width > 0)
  .map(t => parseFloat(getComputedStyle(t).fontSize)
    * t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width));
"""


class Tags(HTMLParser):
    """Every tag, and every attribute that could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    made = {name: made_profile(f"synthetic:{name}/Q4_K_M") for name in ("gemma4-12b", "gemma4-e4b")}
    # As on a CPU: slow, without tensor cores, and what is stored changes nothing.
    slow = Truth({kind: 40 * us for kind, us in Truth().boundaries.items()}, gb_s=2.2)
    small = made_profile("synthetic:smollm2-135m/Q8_0", (0, 2000), (512,), slow)
    return {**made, "cpu": replace(small, executor="reference", peak_tflops=None, card="cpu")}


@pytest.mark.parametrize("name", ["gemma4-12b", "gemma4-e4b", "cpu"])
def test_the_page_is_whole_and_refers_to_nothing(profiles: dict[str, Profile], name: str) -> None:
    text = page_of(profiles[name])
    found = Tags(text)
    assert found.open == []
    assert found.links == ["data:,"]
    assert not {"script", "iframe", "img", "object", "embed"} & set(found.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)
    assert found.tags.count("svg") == 6


def test_the_page_says_what_the_profile_says(profiles: dict[str, Profile]) -> None:
    profile = profiles["gemma4-12b"]
    text, token = page_of(profile), profile.tokens[0]
    assert f"{1e6 / token.wall_us:,.1f} tok/s" in text
    assert f"{token.floor_us(profile.stream_gb_s) / token.wall_us:.1%}" in text
    for kind in {link.span.kind for step in profile.steps for link in step.links}:
        assert f'<i class="k-{kind}"></i>{kind}' in text
        assert f".k-{kind} {{ fill: var(--{kind})" in text
    for words in (
        "Roofline",
        "Time against depth",
        "By layer",
        "What would change it",
        "Q4_K_M",
        "int8",
        "NVIDIA H200",
    ):
        assert words in text


def test_every_colour_is_known_in_both_themes(profiles: dict[str, Profile]) -> None:
    text = page_of(profiles["cpu"])
    light, dark = (set(re.findall(r"--([a-z_]+):", block)) for block in re.findall(r":root \{([^}]*)\}", text))
    used = set(re.findall(r"var\(--([a-z_]+)\)", text))
    assert used <= light
    assert {*KINDS, "gaps"} <= dark <= light


def test_names_are_words_and_no_tags(profiles: dict[str, Profile]) -> None:
    name = '<script>alert("x")</script> & more'
    text = page_of(replace(profiles["cpu"], model=name, notes=("<b>careful</b>",)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "note: &lt;b&gt;careful" in text


def test_chunks_alone_make_a_page(profiles: dict[str, Profile]) -> None:
    profile = profiles["gemma4-12b"]
    text = page_of(replace(profile, steps=profile.chunks))
    assert Tags(text).tags.count("svg") == 1
    assert "of a prompt, 2,048 rows" in text


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if MISSING:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("browser")) as found:
        yield found


def show(driver: webdriver.Chrome, path: Path, width: int, theme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get_log("performance")
    driver.get(path.as_uri())


def requests(driver: webdriver.Chrome, page: str) -> list[str]:
    """Addresses that a page has asked for, its own first: the browser may still be at its own first page's."""
    logged = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [each["params"] for each in logged if each["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if each["documentURL"] == page]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gemma4-12b", "gemma4-e4b", "cpu"])
def test_a_browser_draws_it(
    driver: webdriver.Chrome, profiles: dict[str, Profile], tmp_path: Path, name: str, width: int
) -> None:
    path = tmp_path / "profile.html"
    write_html(profiles[name], path)
    for theme, ground in THEMES.items():
        show(driver, path, width, theme)
        assert requests(driver, path.as_uri()) == [path.as_uri()]
        assert driver.get_log("browser") == []
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == ground
        sizes = driver.execute_script(SIZES)
        assert len(sizes) == 4  # of those drawn for two widths, one each
        assert all(w > 600 and h > 150 for w, h in sizes)
        assert driver.execute_script(OVERLAPS) == []
        assert driver.execute_script(LETTERS) > 10
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.get_screenshot_as_png()[:4] == b"\x89PNG"
    clipped = "return [...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"
    assert max(driver.execute_script(clipped)) <= 1
