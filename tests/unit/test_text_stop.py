"""Stop strings: found wherever the text is cut, never leaked, never late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkd.errors import RequestError
from sparkd.text.stop import MAX_STOP_CHARACTERS, MAX_STOPS, StopMatcher, end_texts


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule on a whole text: first start, then shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    given_out = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        given_out += text
        if stopped is not None:
            return given_out, stopped
    text, stopped = matcher.finish()
    return given_out + text, stopped


LETTERS = st.text("ab<|", max_size=12)
STOPS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


@given(STOPS, LETTERS)
def test_every_cut_gives_what_the_whole_text_gives(stops: list[str], text: str) -> None:
    expected = reference(stops, text)
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected
    for cut in range(len(text) + 1):
        assert run(stops, [text[:cut], text[cut:]]) == expected


@given(STOPS, LETTERS)
def test_no_more_is_held_back_than_may_still_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    out, stopped = matcher.push(text)
    if stopped is None:
        held = text[len(out) :]
        possible = [n for n in range(1, len(text) + 1) for stop in stops if len(stop) > n and stop[:n] == text[-n:]]
        assert len(held) == max(possible, default=0)


def test_a_stop_string_split_over_tokens_never_leaks() -> None:
    matcher = StopMatcher(["</assistant>"])
    assert matcher.push("fine</assi") == ("fine", None)
    assert matcher.push("stan") == ("", None)
    assert matcher.push("t> more") == ("", "</assistant>")
    assert matcher.push("more") == ("", "</assistant>")
    assert matcher.finish() == ("", "</assistant>")


def test_a_beginning_that_leads_nowhere_is_given_out_at_once() -> None:
    matcher = StopMatcher(["</assistant>"])
    assert matcher.push("</assist") == ("", None)
    assert matcher.push("ed") == ("</assisted", None)
    assert matcher.push("<") == ("", None)
    assert matcher.finish() == ("<", None)


def test_a_stop_string_at_the_very_end_stops_without_waiting() -> None:
    assert StopMatcher(["END"]).push("the END") == ("the ", "END")


def test_of_overlapping_stop_strings_the_first_start_wins_and_then_the_shortest() -> None:
    assert run(["bc", "abc"], ["xab", "c"]) == ("x", "abc")
    assert run(["b", "abc"], ["xab", "d"]) == ("xa", "b")
    assert run(["b", "abc"], ["xab"]) == ("xa", "b")
    assert run(["abc", "ab"], ["xab"]) == ("x", "ab")


def test_without_stop_strings_everything_passes() -> None:
    assert StopMatcher([]).push("any") == ("any", None)


@pytest.mark.parametrize("stops", [[""], ["x" * (MAX_STOP_CHARACTERS + 1)], ["x"] * (MAX_STOPS + 1)])
def test_impossible_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop: "):
        StopMatcher(stops)


def test_what_a_model_spells_to_end_its_turn_ends_the_text_and_is_no_stop_string_of_the_request() -> None:
    (end,) = end_texts("laguna")
    matcher = StopMatcher(["xx"] * MAX_STOPS, [end])
    assert matcher.push("Yes.</assis") == ("Yes.", None)
    assert matcher.push("tant>\n<user>") == ("", "</assistant>")
    assert matcher.asked is None
    asked_for = StopMatcher(["</assistant>"], [end])
    asked_for.push("Yes.</assistant>")
    assert asked_for.asked == "</assistant>"
    assert end_texts("qwen35moe") == ()
