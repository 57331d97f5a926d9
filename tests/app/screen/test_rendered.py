"""The finished answer as Markdown: drawn where there is some, plain elsewhere, and never obeyed by the terminal."""

import pytest

from app.screen.spans import answer_text, rendered
from app.settings.table import Settings
from tests.support.panes import printed


def drawn(text: str, *, render: bool = True, width: int = 40) -> str:
    answer = printed(answer_text(text, Settings(render=render), live=True), width)
    return "\n".join(line.rstrip() for line in answer.splitlines())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "So:\n\n```python\ndef f(n):\n    return n\n```\n\n1. **one**\n2. two",
            "So:\n\n\n def f(n):\n     return n\n\n\n 1 one\n 2 two",
        ),
        ("**Name**: Ann\n**Age**: 7", "Name: Ann\nAge: 7"),
    ],
)
def test_code_and_lists_are_drawn_with_the_models_line_breaks_unless_rendering_is_off(text: str, wanted: str) -> None:
    assert (drawn(text), drawn(text, render=False)) == (wanted, text)


@pytest.mark.parametrize("text", ["", "A river is water.", "two\nlines\n\nand 3 * 4 * 5", "a_b_c", "x < y > z"])
def test_a_text_without_markdown_stays_as_it_is(text: str) -> None:
    assert rendered(text) is None
    assert drawn(text) == text


def test_what_looks_like_html_is_text() -> None:
    assert drawn("**Use** <div> & <b>x</b>\n\n<p>a block</p>") == "Use <div> & <b>x</b>\n\n<p>a block</p>"
    assert rendered("if a < b > c: <div>") is None


def test_nothing_in_it_reaches_the_terminal_as_more_than_text() -> None:
    text = drawn("# \x1b[31mred\x1b[0m\n\n[a](http://x.y) `\x1b]8;;http://x\x1b\\`", width=80)
    assert "\x1b" not in text
    assert "http://x.y" in text
