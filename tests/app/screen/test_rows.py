"""Text to lines: wrapped by display width, nothing visible lost, nothing left that a terminal obeys."""

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len

from app.screen.rows import in_short, wrap
from utils.visible import visible

texts = st.text(
    st.sampled_from("abc xyz.,\n\t日本😀👍🏽é́\u200d\ufe0f❤[]{}+-\x1b\r") | st.characters(codec="utf-8"), max_size=30
)


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
        ("see 日本 now", 8, ["see 日本", "now"]),
        ("👩‍👩‍👧👍🏽é", 4, ["👩👩", "👧👍🏽", "é"]),
        ("cafe\u0301 noir", 5, ["cafe\u0301", "noir"]),
        ("        return", 10, ["        re", "turn"]),
        ("        日本", 11, ["        日", "本"]),
        ("        return 日", 10, ["        re", "turn 日"]),
        ("a\u200db \u200c", 5, ["ab \u200c"]),
        ("", 5, [""]),
    ],
)
def test_wrapping(text: str, width: int, lines: list[str]) -> None:
    assert ["".join(part for part, _ in line) for line in wrap([(text, "plain")], width)] == lines


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.4, "0"), (999.4, "999"), (999.7, "1K"), (1536, "1.54K"), (999_600_000, "1B"), (1_543_714_304, "1.54B")],
)
def test_a_large_number_is_rounded_before_it_gets_its_unit(number: float, text: str) -> None:
    assert in_short(number) == text


def test_a_style_goes_on_over_the_end_of_a_line() -> None:
    rows = wrap([("one ", "accepted"), ("two three", "target"), (" four", "accepted")], 8)
    assert rows == [(("one ", "accepted"), ("two", "target")), (("three", "target"),), (("four", "accepted"),)]


def test_control_characters_have_ascii_pictures() -> None:
    assert visible("\x1b[2J\x7f\x00", ascii_only=True) == "^[[2J^?^@"
    assert visible("a\r\nb") == "a\nb"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(texts, st.sampled_from(["accepted", "rejected", "discarded", "target", "plain"])), max_size=8),
    st.integers(2, 60),
)
def test_wrapping_loses_no_visible_character_and_no_style(pieces: list[tuple[str, str]], width: int) -> None:
    def solid(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(c, role) for text, role in parts for c in text if not c.isspace() and c != "\u200d"]

    lines = wrap(pieces, width)
    assert solid([piece for line in lines for piece in line]) == solid([(visible(t), role) for t, role in pieces])
    assert all(sum(cell_len(text) for text, _ in line) <= width for line in lines)
