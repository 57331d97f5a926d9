"""Accepted text shows by its tint who proposed it, and the legend says which tint is whose."""

from itertools import combinations

import numpy as np
import pytest
from rich.style import Style
from syrupy.assertion import SnapshotAssertion

from app.screen.palette import PALETTES, TINTS, Look, letters, tint
from app.screen.panes import PaneData, pieces_of
from app.screen.rows import Drawn
from app.screen.spans import Span
from app.screen.view import Frame, meanings
from sampling.stats.summary import Stats
from tests.support.panes import pane_of, printed

NAMES = ("glide", "maxgram", "bigram")
SPANS = [
    Span("A", "target"),
    Span(" river is", "accepted", 0),
    Span(" a natural", "accepted", 1),
    Span(" down", "rejected", 1),
    Span(" stream", "target"),
    Span(" of water", "accepted", 2),
]
# Linear RGB as seen without red and without green cones (Machado, Oliveira and Fernandes 2009, severity 1).
NO_RED = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
NO_GREEN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8729))  # over those of white
STATS = Stats(predicted_n=9, predicted_ms=500, draft_n=8, draft_n_accepted=6, target_passes=3, openings=1)


def lane(name: str, names: tuple[str, ...], *sources: int) -> PaneData:
    """A lane whose accepted words are by these sources."""
    spans = [Span(f" {number}", "accepted", source) for number, source in enumerate(sources)]
    return pane_of(name, [Span("A", "target"), *spans], STATS, "done", names=names)


def shown(drawn: Drawn, color: bool = True) -> str:
    return printed(drawn, drawn.look.width, "256" if color else None)


def words(*panes: PaneData) -> list[list[tuple[str, str]]]:
    """The legend's fields before "rejected": texts and roles."""
    fields = [[(text.strip(), role) for text, role in item.pieces] for item in meanings(Look(100), panes)]
    return fields[: fields.index([("rejected", "rejected")])]


# ---------------------------------------------------------------- panes


def test_accepted_text_has_the_tint_of_its_source() -> None:
    assert pieces_of(SPANS, Look(), names=NAMES) == [
        ("A", "target"),
        (" river is", "accepted"),
        (" a natural", "accepted 2"),
        (" ", "plain"),
        ("down", "rejected"),
        (" ", "plain"),
        ("stream", "target"),
        (" of water", "accepted 3"),
    ]


def test_without_colour_letters_tell_the_sources_apart() -> None:
    one, several = (
        shown(Frame([pane_of("cascade", SPANS, STATS, "done", names=names)], Look(100, color=False)), color=False)
        for names in (("glide",), NAMES)
    )
    assert "{+A+} river is a natural [-down-] {+stream+} of water" in one
    assert "{+A+} {g:river is} {m:a natural} [-down-] {+stream+} {b:of water}" in several
    assert "accepted: {g:x} glide, {m:x} maxgram, {b:x} bigram  [-x-] rejected" in several
    assert "text accepted" in one
    assert "text accepted" not in several  # none is untagged
    assert "{g:x}" not in one


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (("match", "tables", "recalled", "suffix", "feature"), ("m", "t", "r", "s", "f")),
        (("model", "match", "mm", "模型"), ("m", "a", "2", "3")),
    ],
)
def test_every_source_of_a_lane_has_a_letter_of_its_own(sources: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert letters(sources) == expected


def test_a_bonus_differs_from_a_correction() -> None:
    pane = pane_of(
        "spec",
        [Span("A", "target"), Span(" river", "accepted"), Span(" runs", "bonus")],
        STATS,
        "done",
        names=("glide",),
    )
    assert "{+A+} river {*runs*}" in shown(Frame([pane], Look(60, color=False)), color=False)
    assert [item.pieces[0] for item in meanings(Look(100), [pane])][-2:] == [
        ("from the target", "target"),
        ("bonus", "bonus"),
    ]


def lab(role: str, palette: str, eyes: object = None) -> np.ndarray:
    """A role's colour in CIE L*a*b*, as these eyes see it."""
    color = Style.parse(PALETTES[palette][role]).color
    assert color is not None
    rgb = np.array(color.get_truecolor()) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(XYZ) @ (linear if eyes is None else np.clip(np.array(eyes) @ linear, 0, 1)))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("palette", "eyes"), [("default", None), ("cb", None), ("cb", NO_RED), ("cb", NO_GREEN)])
def test_the_five_tints_are_told_apart(palette: str, eyes: object) -> None:
    colours = [lab(role, palette, eyes) for role in TINTS]
    assert len(colours) == 5
    assert min(np.linalg.norm(one - other) for one, other in combinations(colours, 2)) > 20


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("palette", PALETTES)
def test_a_tinted_lane_with_its_legend(width: int, palette: str, snapshot: SnapshotAssertion) -> None:
    panes = [lane("ngram", ("ngram",), 0), pane_of("cascade", SPANS, STATS, "done", names=NAMES)]
    assert shown(Frame(panes, Look(width, palette=palette))) == snapshot


# ---------------------------------------------------------------- the legend


def legend(*sources: int) -> list[tuple[str, str]]:
    return [piece for source in sources for piece in (("", "plain"), (NAMES[source], tint(source)))]


@pytest.mark.parametrize(
    "panes",
    [
        [],
        [pane_of("spec", SPANS, STATS, "done")],
        [lane("ngram", ("ngram",), 0)],
        [pane_of("ar", [Span("A", "plain")], STATS), lane("cascade", NAMES)],
    ],
)
def test_the_legend_says_accepted_where_all_of_it_has_that_tint(panes: list[PaneData]) -> None:
    assert words(*panes) == [[("accepted", "accepted")]]


def test_the_legend_does_not_give_one_name_two_tints() -> None:
    found = words(lane("cascade", NAMES, 0, 1), lane("tables", ("match", "tables", "glide"), 1, 2))
    assert [field[0][0] for field in found] == ["accepted in cascade:", "accepted in tables:"]


# ---------------------------------------------------------------- the palettes

# Linear RGB as seen without red and without green cones (Machado, Oliveira and Fernandes 2009, severity 1).


# ---------------------------------------------------------------- titles
