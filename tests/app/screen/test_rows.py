"""Text to lines: wrapped by display width, nothing visible lost, nothing left that a terminal obeys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from app.screen.rows import _SIMPLE, hard_lines, visible, wrap

texts = st.text(
    st.sampled_from("abc xyz.,\n\t日本😀👍🏽é́\u200d\ufe0f❤[]{}+-\x1b\r") | st.characters(codec="utf-8"), max_size=30
)
roles = st.sampled_from(["accepted", "rejected", "discarded", "target", "plain"])


def lines_of(text: str, width: int) -> list[str]:
    return ["".join(part for part, _ in line) for line in wrap([(text, "plain")], width)]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 7, ["one two", "three"]),
        ("one two three", 8, ["one two", "three"]),
        ("a  b", 10, ["a  b"]),
        ("extraordinary", 5, ["extra", "ordin", "ary"]),
        ("an extraordinary", 6, ["an", "extrao", "rdinar", "y"]),
        ("if x:\n    return y", 20, ["if x:", "    return y"]),
        ("    long_name = other", 15, ["    long_name =", "other"]),
        ("a\n\nb", 5, ["a", "", "b"]),
        ("a\tb", 10, ["a   b"]),
        ("日本語のテキスト", 7, ["日本語", "のテキ", "スト"]),
        ("日本、語", 4, ["日", "本、", "語"]),
        ("see 日本 now", 6, ["see 日", "本 now"]),
        ("👩‍👩‍👧👍🏽é", 3, ["👩‍👩‍👧", "👍🏽é"]),
        ("cafe\u0301 noir", 5, ["cafe\u0301", "noir"]),
        ("        return", 10, ["        re", "turn"]),
        ("        日本", 11, ["        日", "本"]),
        ("        return 日", 10, ["        re", "turn 日"]),
        ("a\u200db \u200c", 5, ["ab \u200c"]),
        ("", 5, [""]),
    ],
)
def test_wrapping(text: str, width: int, lines: list[str]) -> None:
    assert lines_of(text, width) == lines


def test_what_is_measured_by_its_length_is_one_column_a_character() -> None:
    simple = [char for char in map(chr, range(0x110000)) if _SIMPLE.fullmatch(char)]
    assert len(simple) > 1000
    assert all(cell_len(char) == 1 for char in simple)


def test_a_style_goes_on_over_the_end_of_a_line() -> None:
    rows = wrap([("one ", "accepted"), ("two three", "target"), (" four", "accepted")], 8)
    assert rows == [(("one ", "accepted"), ("two", "target")), (("three", "target"),), (("four", "accepted"),)]


def test_an_emoji_of_two_tokens_is_drawn_as_one_in_the_later_ones_style() -> None:
    assert wrap([("👩", "accepted"), ("\u200d👧!", "target")], 10) == [(("👩\u200d👧!", "target"),)]


def test_control_characters_have_ascii_pictures() -> None:
    assert visible("\x1b[2J\x7f\x00", ascii_only=True) == "^[[2J^?^@"
    assert visible("a\r\nb") == "a\nb"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, roles), max_size=8), st.integers(2, 60))
def test_wrapping_loses_no_visible_character_and_no_style(pieces: list[tuple[str, str]], width: int) -> None:
    def solid(lines: object) -> list[tuple[str, str]]:
        """Visible characters with their roles; joined emoji and marks make a role slide by one token."""
        return [(c, role) for line in lines for text, role in line for c in text if c != " " and c != "\u200d"]  # type: ignore[attr-defined]

    whole, wrapped = solid(hard_lines(pieces)), solid(wrap(pieces, width))
    assert [c for c, _ in wrapped if cell_len(c)] == [c for c, _ in whole if cell_len(c)]
    if all(text.isascii() for text, _ in pieces):
        assert wrapped == whole
    assert all(sum(cell_len(text) for text, _ in line) <= width for line in wrap(pieces, width))
