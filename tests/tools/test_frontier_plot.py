"""The front against its definition; the plot: where points lie, that names cover nothing, what it says."""

from __future__ import annotations

import itertools
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from bytefloor.tools.front import Point, front_of, plane_of
from bytefloor.tools.frontier_plot import FRAME, MOST_CHARACTERS, draw, linear_ticks, log_ticks
from bytefloor.tools.frontier_tables import load_frontiers
from bytefloor.tools.plot_labels import Box, Mark, place
from bytefloor.tools.tables import RESULTS

SVG = "{http://www.w3.org/2000/svg}"


def row(recipe: str, kl: float, token_mb: float, tok_s: float = 100.0, **more: Any) -> dict[str, Any]:
    speeds = [{"depth": depth, "tok_s": tok_s / (1 + depth), "tok_s_spread": 0.02, "share": 0.5} for depth in (0, 9)]
    return {
        "recipe": recipe, "state": "measured", "reason": None, "executor": "reference", "substitutes": [], "notes": [],
        "divergence": {"kl": {"value": kl, "error": kl / 50}, "same_best": {"value": 0.9, "error": 0.01}},
        "perplexity": {"value": 10.0, "error": 0.5}, "token_bytes": token_mb * 1e6, "disk_bytes": token_mb * 1e6,
        "bits_per_weight": 4.5, "speeds": speeds, "source": "m<1>.gguf", "source_formats": ["BF16"], "card": "cpu",
        "date": "2026-11-30", "n_predictions": 4080, "n_windows": 16, "context": 512, "kv": "float32", "model": "M",
        **more,
    }  # fmt: skip


def source(**more: Any) -> dict[str, Any]:
    return row("source", 1.0, 50.0, 90.0, **{"state": "source", "divergence": None, **more})


def refused(recipe: str, state: str = "refused") -> dict[str, Any]:
    nothing = {"perplexity": None, "divergence": None, "executor": None, "n_predictions": None, "speeds": []}
    return row(recipe, 1.0, 1.0, state=state, reason="a reason", **nothing)


# --- the front


@pytest.mark.parametrize("is_speed", [False, True])
def test_the_front_is_what_nobody_beats(is_speed: bool) -> None:
    random.seed(4)
    for _ in range(200):
        # Few values, so that there are ties in one number and in both.
        points = [
            Point(f"p{i}", random.randrange(5), 0.0, random.randrange(1, 6), 0.0) for i in range(random.randrange(1, 9))
        ]
        expected = set()
        for p in points:
            beaten = False
            for q in points:
                is_no_slower = q.x >= p.x if is_speed else q.x <= p.x
                is_better = q.kl < p.kl or (q.x > p.x if is_speed else q.x < p.x)
                beaten |= is_no_slower and q.kl <= p.kl and is_better
            if not beaten:
                expected.add(p.name)
        front = front_of(points, is_speed)
        assert {p.name for p in front} == expected
        assert [p.kl for p in front] == sorted(p.kl for p in front)
        xs = [p.x for p in front]
        assert xs == sorted(xs, reverse=not is_speed)


def test_bytes_stand_for_speed_where_no_kernels_ran() -> None:
    rows = [source(), row("a", 0.1, 20.0, 900.0), row("b", 0.2, 25.0, 1000.0), refused("c"), refused("d", "failed")]
    plane = plane_of(rows)
    assert (plane.is_speed, plane.source_x, plane.left_out) == (False, 50e6, ())
    assert [(p.name, p.x, p.x_error) for p in plane.points] == [("a", 20e6, 0.0), ("b", 25e6, 0.0)]
    assert [p.name for p in plane.front] == ["a"]


def test_with_kernels_only_their_speeds_count() -> None:
    on = {"executor": "kernels"}
    rows = [source(**on), row("a", 0.1, 20.0, 900.0, **on), row("b", 0.2, 25.0, 1000.0, **on), row("c", 0.3, 9.0, 5000)]
    plane = plane_of(rows)
    assert (plane.is_speed, plane.source_x, plane.left_out) == (True, 90.0, ("c",))
    assert [(p.name, p.x, p.x_error) for p in plane.points] == [("a", 900.0, 9.0), ("b", 1000.0, 10.0)]
    assert [p.name for p in plane.front] == ["a", "b"]
    assert plane_of([source(), *rows[1:]]).source_x is None


# --- the plot


def circles(svg: str) -> dict[str, tuple[float, float, str]]:
    """Centre and class of each point, by its name."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        title, circle = group.find(f"{SVG}title"), group.find(f"{SVG}circle")
        assert title is not None
        assert title.text is not None
        assert circle is not None
        found[title.text.split(":")[0]] = (
            float(circle.attrib["cx"]), float(circle.attrib["cy"]), circle.attrib["class"]
        )  # fmt: skip
    return found


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_points_lie_where_their_numbers_say() -> None:
    svg = draw([source(), row("best", 0.001, 30.0), row("small", 0.1, 10.0), row("bad", 0.2, 20.0), refused("none")])
    found = circles(svg)
    assert {name: kind for name, (_, _, kind) in found.items()} == {
        "best": "front", "small": "front", "bad": "beaten"
    }  # fmt: skip
    assert found["small"][0] < found["bad"][0] < found["best"][0]
    assert found["bad"][1] < found["small"][1] < found["best"][1]
    # Half way between 10 and 30 MB; a KL's place goes by its logarithm.
    assert found["bad"][0] == pytest.approx((found["small"][0] + found["best"][0]) / 2, abs=0.2)
    per_decade = (found["best"][1] - found["small"][1]) / 2
    assert found["small"][1] - found["bad"][1] == pytest.approx(0.30103 * per_decade, abs=0.2)
    for x, y, _ in found.values():
        assert FRAME.holds(Box(x, y, x, y))


def test_it_says_what_it_is_of_and_what_it_leaves_out() -> None:
    rows = [source(source_formats=["Q4_1", "F32"]), row("a", 0.001, 30.0), row("b", 0.01, 20.0), refused("c")]
    said = words(draw([*rows, refused("d", "failed")]))
    assert "m<1>.gguf: quality against bytes" in said
    told = " ".join(said)
    assert "KL is to m<1>.gguf (Q4_1, F32, itself quantised), over 4,080 predictions; cpu, 2026-11-30; bars: " in told
    assert "standard errors; the source: 50.0 MB a token; not drawn: c (refused), d (failed)" in told
    assert any(line.startswith("weights that a token reads, MB (less is better); no kernels ran") for line in said)
    on = {"executor": "kernels", "card": "NVIDIA H200"}
    card = [{**each, **on} if each["state"] != "refused" else each for each in rows]
    said = words(draw([*card, row("e", 0.1, 1.0)]))
    assert "m<1>.gguf: quality against speed" in said
    told = " ".join(said)
    assert "standard errors, and the spread of repeats; the source: 90 tokens a second; not drawn: " in told
    assert "not drawn: c (refused), e (no kernels)" in told
    assert "tokens a second, best tokens from an empty cache (more is better)" in said
    assert "source" not in said  # 90 is off the axis, which begins beside 100


def test_long_words_are_cut_and_wrapped() -> None:
    name = "a-model-with-a-name-that-goes-on-and-on-for-ever-Instruct-Q4_K_M.gguf"
    rows = [{**each, "source": name} for each in (source(), row("a", 0.001, 30.0), row("b", 0.01, 20.0))]
    said = words(draw([*rows, *(refused(f"recipe-number-{i}") for i in range(5))]))
    assert "a-model-with-a-name-that-goes-on-an…: quality against bytes" in said
    assert max(map(len, said)) <= MOST_CHARACTERS
    assert name in " ".join(said)


def test_the_source_is_a_line_where_it_is_within() -> None:
    on = {"executor": "kernels"}
    svg = draw([source(**on), row("a", 0.1, 1.0, 80.0, **on), row("b", 0.2, 1.0, 100.0, **on)])
    assert "source" in words(svg)
    (line,) = (path for path in ET.fromstring(svg).iter(f"{SVG}path") if path.attrib["class"] == "source")
    x = float(line.attrib["d"].split()[0][1:])
    found = circles(svg)
    assert x == pytest.approx((found["a"][0] + found["b"][0]) / 2, abs=0.2)


def test_a_recipe_equal_to_its_source_lies_on_the_bottom() -> None:
    svg = draw([source(), row("copy", 3e-9, 30.0), row("zero", 0.0, 31.0), row("a", 0.01, 20.0)])
    assert {"copy, a copy", "zero, a copy", "a"} <= set(words(svg))
    found = circles(svg)
    assert found["copy"][1] == found["zero"][1] == FRAME.bottom
    # And does not squeeze the others: one decade or so is all there is.
    assert found["a"][1] < FRAME.bottom - 100
    assert circles(draw([source(), row("copy", 3e-9, 30.0)]))["copy"][1] == FRAME.bottom


def test_a_single_point_and_equal_points_can_be_drawn() -> None:
    (at,) = circles(draw([source(), row("a", 0.01, 20.0)])).values()
    assert FRAME.holds(Box(*at[:2], *at[:2]))
    assert len(circles(draw([source(), row("a", 0.01, 20.0), row("b", 0.01, 20.0)]))) == 2


def test_colours_are_for_light_and_dark_pages() -> None:
    svg = draw([source(), row("a", 0.01, 20.0), row("b", 0.02, 10.0)])
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"var\((--\w+)\)", svg))
    assert names
    for half in (light, dark):
        assert names <= set(re.findall(r"(--\w+): #[0-9a-f]{6}", half))


@pytest.mark.parametrize("seed", range(12))
def test_names_cover_neither_each_other_nor_points(seed: int) -> None:
    rng = random.Random(seed)
    marks = []
    for i in range(14):
        # Crowded: most of them in a quarter of the frame.
        x, y = FRAME.left + 200 + rng.random() * 260, FRAME.top + 60 + rng.random() * 200
        marks.append(
            Mark("abcdefghijklmnopqrst"[: rng.randrange(3, 19)] + str(i), x, y, (Box(x - 6, y - 6, x + 6, y + 6),))
        )
    names = place(marks, FRAME)
    assert len(names) == 14
    assert all(map(FRAME.holds, names))
    assert sum(a.shared(b) for a, b in itertools.combinations(names, 2)) == 0
    assert sum(name.shared(body) for name in names for mark in marks for body in mark.bodies) == 0


@pytest.mark.parametrize("stem", sorted(load_frontiers(RESULTS)))
def test_names_of_committed_plots_cover_nothing(stem: str) -> None:
    svg = ET.fromstring((RESULTS / f"{stem}.svg").read_text())
    texts = [text for text in svg.iter(f"{SVG}text") if text.attrib["class"].startswith("name ")]
    boxes = []
    for text in texts:
        x, y, half = float(text.attrib["x"]), float(text.attrib["y"]), 6.2 * len(text.text or "") / 2
        boxes.append(Box(x - half, y - 10, x + half, y + 2))
    assert len(boxes) == len(circles(ET.tostring(svg, encoding="unicode"))) > 5
    assert sum(a.shared(b) for a, b in itertools.combinations(boxes, 2)) == 0
    assert all(map(FRAME.holds, boxes))


def test_ticks_are_round_numbers_within() -> None:
    assert linear_ticks(12.2, 28.1) == [14, 16, 18, 20, 22, 24, 26, 28]
    assert linear_ticks(2290, 2610) == [2300, 2350, 2400, 2450, 2500, 2550, 2600]
    for low, high in ((0.0, 1.0), (5.0, 5.4), (1e6, 9e6), (-3.0, 11.0)):
        ticks = linear_ticks(low, high)
        assert 4 <= len(ticks) <= 10
        assert low <= ticks[0] < ticks[-1] <= high
    assert log_ticks(0.003, 0.03) == pytest.approx([0.005, 0.01, 0.02])
    assert log_ticks(1e-7, 1.0) == pytest.approx([10.0**i for i in range(-7, 1)])
