from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopMatcher

ALPHABET = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def cut_at(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; the first completed stop string wins, the longest of a tie."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@given(text=ALPHABET, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_any_cutting_gives_the_reference(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    result = "".join(matcher.push(piece) for piece in cut_at(text, cuts)) + matcher.flush()
    assert (result, matcher.has_matched) == reference(text, stops)


@given(text=ALPHABET, stops=STOPS)
def test_nothing_is_let_out_that_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        out += matcher.push(char)
        if matcher.has_matched:
            return
        held = text[len(out) : end]
        assert out + held == text[:end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_that_cannot_match_is_not_delayed() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("some text E") == "some text "
    assert matcher.push("asy") == "Easy"
    assert matcher.push(" EN") == " "
    assert matcher.push("D more") == ""
    assert matcher.has_matched
    assert matcher.push("ignored") == ""
    assert matcher.flush() == ""
