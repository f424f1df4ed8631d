from __future__ import annotations

from xml.etree import ElementTree

import pytest

from services.svg_chart import Line, Panel, draw, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def panel(*lines: Line) -> Panel:
    return Panel("Rows & more", "rows", "ms", (1, 2, 4), lines)


def circles(text: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(text)
    return [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]


def test_points_lie_where_their_logarithms_say() -> None:
    text = draw("t", "n", [panel(Line("a", [(1, 1.0), (2, 10.0), (4, 100.0)]))])
    (x1, y1), (x2, y2), (x3, y3) = circles(text)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.11)
    assert x1 < x2 < x3 and y1 > y2 > y3, "larger is further right, and higher up"


def test_every_panel_has_its_words_and_lines() -> None:
    text = draw(
        "t", "n", [panel(Line("a", [(1, 1.0)]), Line("b", [(2, 3.0)])), panel(Line("c", [(4, 2)]))]
    )
    root = ElementTree.fromstring(text)
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert words.count("Rows & more") == 2, "special characters are escaped"
    assert {"a", "b", "c", "1", "2", "4"} <= set(words)
    assert "prefers-color-scheme: dark" in text


def test_panels_do_not_overlap() -> None:
    line = Line("a", [(1, 1.0), (4, 8.0)])
    first, second, third, fourth = (
        circles(draw("t", "n", [panel(line)] * n))[-1] for n in (1, 2, 3, 4)
    )
    assert second[0] > first[0] and second[1] == first[1]
    assert third[0] == first[0] and third[1] > first[1]
    assert fourth == (second[0], third[1])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 10, [1, 2, 5, 10]), (3, 40, [2, 5, 10, 20, 50]), (0.3, 0.4, [0.2, 0.5]), (5, 5, [5, 10])],
)
def test_ticks_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(expected)


def test_what_has_no_logarithm_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        draw("t", "n", [panel(Line("a", [(1, 0.0)]))])
    with pytest.raises(ValueError, match="positive"):
        draw("t", "n", [panel()])
