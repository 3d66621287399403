"""Scales, their ticks, and labels that find a place."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from bytefloor.tools.svg import LETTER, LINE, Labels, Scale, bar, dot, fits, path, picture, round_step, text


def test_a_scale_goes_from_end_to_end() -> None:
    straight = Scale(0, 200, 50, 700)
    assert (straight(0), straight(100), straight(200)) == (50, 375, 700)
    upward = Scale(0.1, 1000, 300, 20, is_log=True)
    assert (upward(0.1), upward(10), upward(1000)) == (300, 160, 20)


@pytest.mark.parametrize(("most", "ticks"), [(2713, 6), (9, 5), (1.0, 6), (35.2, 8), (810_000, 5)])
def test_ticks_are_round_and_within(most: float, ticks: int) -> None:
    found = Scale(0, most, 0, 1).ticks
    assert found[0] == 0
    assert found[-1] <= most < found[-1] + found[1]
    assert len(found) == ticks
    step = round_step(most)
    assert f"{step:e}"[0] in "125"


def test_ticks_of_decades() -> None:
    assert Scale(0.02, 3e4, 0, 1, is_log=True).ticks == pytest.approx([0.1, 1, 10, 100, 1000, 10000])


def boxes(shapes: list[str]) -> list[tuple[float, float, float, float]]:
    found = []
    for shape in shapes:
        for element in ET.fromstring(f"<svg>{shape}</svg>").iter("text"):
            x, y = float(element.get("x")), float(element.get("y"))
            found.append((x, y - 4 - LINE / 2, x + len(element.text) * LETTER, y - 4 + LINE / 2))
    return found


def test_labels_lie_neither_on_each_other_nor_on_what_is_there() -> None:
    generator = random.Random(2)
    labels = Labels((0, 0, 600, 400))
    points = [(generator.uniform(200, 330), generator.uniform(150, 220)) for _ in range(14)]
    for x, y in points:
        labels.block(x - 6, y - 6, 12, 12)
    labels.block_path([(0, 0), (600, 400)])
    placed = boxes([labels.place(x, y, "gate_up") for x, y in points])
    assert len(placed) > 7
    blocked = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    for i, box in enumerate(placed):
        assert box[0] >= 0
        assert box[3] <= 400
        for other in (*placed[i + 1 :], *blocked):
            assert not (box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3])


def test_a_label_without_room_is_left_out() -> None:
    labels = Labels((0, 0, 100, 40))
    labels.block(0, 0, 100, 40)
    assert labels.place(50, 20, "anything") == ""


def test_words_are_escaped() -> None:
    shapes = [
        text(1, 2, "<a & b>"),
        bar(0, 0, -1, 2, "k", "1 < 2"),
        dot(1, 1, 2, "k", '"'),
        path([(0, 0), (1, 2)], "p"),
    ]
    drawn = ET.fromstring(picture(10, 10, 'a "label" <', shapes))
    assert drawn.get("aria-label") == 'a "label" <'
    assert [element.text for element in drawn.iter("text")] == ["<a & b>"]
    assert drawn.find("rect").get("width") == "0.00"
    assert drawn.find("path").get("d") == "M0.00 0.00L1.00 2.00"


def test_what_fits() -> None:
    assert fits("down 546", 70)
    assert not fits("down 546", 50)
