"""`/heat` as exact text: tints by the target's probability or entropy, and the perplexity worked out by hand."""

import math

import pytest

from app.screen.inspection import Candidates, SaidToken
from app.screen.palette import Look
from app.screen.plots import Heat, perplexity
from tests.support.panes import printed
from tests.support.refusals import refused


def said(number: int, text: str, p: float | None = None, entropy: float | None = None) -> SaidToken:
    other = Candidates(100, "other", p=0.001)
    choices = (other,) if p is None else (other, Candidates(number, text, p=p))
    return SaidToken(number, text, text, 1, "accepted", choices=choices, entropy=entropy)


TOKENS = [said(1, "A", 0.95, 0.2), said(2, " river", 0.5, 1.5), said(3, " runs", 0.1, 3.0), said(4, " on", 0.01, 9.0)]


def shown(tokens: list[SaidToken], by: str, look: Look) -> list[str]:
    return printed(Heat(tokens, by, look), look.width, "256" if look.color else None).splitlines()  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_without_colour_the_figure_stands_behind_what_was_unsure(width: int) -> None:
    assert shown(TOKENS, "p", Look(width, color=False)) == [
        "A river(.50) runs(.10) on(.01)",
        # exp(-(ln .95 + ln .5 + ln .1 + ln .01) / 4) = 6.77; (.2 + 1.5 + 3 + 9) / 4 = 3.425
        "perplexity 6.77 over 4 tokens  mean entropy 3.42 bits",
    ]
    assert shown(TOKENS, "entropy", Look(width, color=False))[0] == "A river(1.5) runs(3.0) on(9.0)"


def test_in_colour_the_tint_says_how_unsure() -> None:
    text, below = shown(TOKENS, "p", Look(140))
    assert text == "A\x1b[38;5;136m river\x1b[0m\x1b[4;38;5;166m runs\x1b[0m\x1b[1;4;38;5;160m on\x1b[0m"
    assert below.startswith("p .90 or more  \x1b[38;5;136m< .90\x1b[0m  \x1b[38;5;172m< .50\x1b[0m  ")
    assert shown(TOKENS, "entropy", Look(140))[1].startswith("up to 0.5 bits  \x1b[38;5;136m> 0.5\x1b[0m")


def test_tokens_that_were_not_recorded_are_left_out_and_counted() -> None:
    tokens = [*TOKENS, said(5, " and on")]
    assert shown(tokens, "p", Look(100, color=False))[1].startswith("perplexity 6.77 over 4 tokens")
    assert shown(tokens, "p", Look(100, color=False))[1].endswith("1 not recorded")
    refused(Heat, [said(5, " and on")], "p", Look(), match="were not recorded")


def test_the_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity([0.125] * 9) == pytest.approx(8)
    assert perplexity([1.0, 0.0]) == math.inf
